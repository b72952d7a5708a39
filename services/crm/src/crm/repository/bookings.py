"""How bookings are loaded for a change with all that they are made of locked, and written back in sets.

Locks are taken in one order: the deal, bookings by id, claims by object, partners' limits. Whoever holds a booking's
row alone may move it; whoever holds a claim's row alone may emit for the object, so that its requests are in order.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from asyncpg import Record
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection, find_locked, remember_locked
from crm.domain import (
    Asked,
    Booking,
    BookingMoved,
    BookingNotFound,
    BookingObject,
    BookingState,
    ObjectClaim,
    Outcome,
    PartnerLimit,
    Reason,
)

_WRITTEN: Final = {
    "state": "text",
    "version": "int",
    "reserved_until": "timestamptz",
    "booked_until": "timestamptz",
    "quote_expires_at": "timestamptz",
    "answer_due_at": "timestamptz",
    "registration_asked_at": "timestamptz",
    "price_minor": "bigint",
    "amended_price_minor": "bigint",
    "currency": "text",
    "charged_minor": "bigint",
    "reason": "text",
    "came_from": "text",
    "probes": "int",
    "updated_at": "timestamptz",
}
"""What a command may change of a booking's row, and its types."""
BOOKING_COLUMNS: Final = ("id", "tenant_id", "deal_id", "partner_id", "created_at", *_WRITTEN)
_LOCK: Final = f"select {', '.join(BOOKING_COLUMNS)} from crm.booking where id = any($1) order by id for update"
_LOCK_OF_DEAL: Final = (
    f"select {', '.join(BOOKING_COLUMNS)} from crm.booking"
    " where deal_id = $1 and state not in ('ticketed', 'cancelled', 'failed') order by id for update"
)
_OBJECTS: Final = (
    "select booking_id, property_object_id, tenant_id, sequence, asked, outcome, reason, object_version"
    " from crm.booking_object where booking_id = any($1) order by booking_id, position"
)
_ADD_CLAIMS: Final = (
    "insert into crm.object_claim (tenant_id, property_object_id, sequence)"
    " select $1, o.id, 0 from unnest($2::uuid[]) as o(id) order by o.id on conflict do nothing"
)
_LOCK_CLAIMS: Final = (
    "select c.tenant_id, c.property_object_id, c.booking_id, c.sequence from crm.object_claim c"
    " where (c.tenant_id, c.property_object_id) in (select * from unnest($1::uuid[], $2::uuid[]))"
    " order by c.tenant_id, c.property_object_id for update"
)
_CLAIMED: Final = (
    "select property_object_id, booking_id from crm.object_claim"
    " where property_object_id = any($1) and booking_id is not null"
)
_QUOTED: Final = (
    "select b.id from crm.booking b join crm.booking_object o on o.booking_id = b.id"
    " where o.property_object_id = any($1) and b.state = 'quoted' order by b.id"
)
_LOCK_LIMITS: Final = (
    "select l.tenant_id, l.partner_id, l.currency, l.limit_minor, l.used_minor from crm.partner_limit l"
    " where (l.tenant_id, l.partner_id) in (select * from unnest($1::uuid[], $2::uuid[]))"
    " order by l.tenant_id, l.partner_id for update"
)
_CHARGE: Final = "update crm.partner_limit set used_minor = used_minor + $3 where tenant_id = $1 and partner_id = $2"
_SAVE: Final = (
    f"update crm.booking b set {', '.join(f'{name} = w.{name}' for name in _WRITTEN)}"
    f" from unnest($1::uuid[], {', '.join(f'${n}::{kind}[]' for n, kind in enumerate(_WRITTEN.values(), 2))})"
    f" as w(id, {', '.join(_WRITTEN)}) where b.id = w.id"
)
_SAVE_OBJECTS: Final = (
    "update crm.booking_object o set sequence = w.sequence, asked = w.asked, outcome = w.outcome, reason = w.reason,"
    " object_version = w.object_version from unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::text[], $5::text[],"
    " $6::text[], $7::bigint[]) as w(booking_id, object_id, sequence, asked, outcome, reason, object_version)"
    " where o.booking_id = w.booking_id and o.property_object_id = w.object_id"
)
_SAVE_CLAIMS: Final = (
    "update crm.object_claim c set booking_id = w.booking_id, sequence = w.sequence"
    " from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[])"
    " as w(tenant_id, object_id, booking_id, sequence)"
    " where c.tenant_id = w.tenant_id and c.property_object_id = w.object_id"
)
_ADD: Final = (
    "insert into crm.booking (id, tenant_id, deal_id, partner_id, state, version, charged_minor, probes, created_at,"
    " updated_at) values ($1, $2, $3, $4, $5, 1, 0, 0, $6, $6)"
)
_ADD_OBJECTS: Final = (
    "insert into crm.booking_object (booking_id, tenant_id, property_object_id, position)"
    " select $1, $2, o.id, o.position from unnest($3::uuid[]) with ordinality as o(id, position)"
)
_ADD_HISTORY: Final = (
    "insert into crm.booking_history (booking_id, version, tenant_id, from_state, to_state, reason, changed_at, actor)"
    " select m.*, $8 from unnest($1::uuid[], $2::int[], $3::uuid[], $4::text[], $5::text[], $6::text[],"
    " $7::timestamptz[]) as m"
)
"""No COPY here: it knows no row level security."""


async def lock_bookings(session: AsyncSession, ids: Iterable[UUID]) -> list[Booking]:
    """Return bookings in id order, those that exist, with their rows and their objects' claims locked."""
    wanted = sorted(set(ids))
    known = {one: booking for one in wanted if (booking := find_locked(session, Booking, one)) is not None}
    if missing := [one for one in wanted if one not in known]:
        connection = await driver_connection(session)
        loaded = await assemble_bookings(session, await connection.fetch(_LOCK, missing))
        known |= {booking.id: booking for booking in loaded}
    return [known[one] for one in wanted if one in known]


async def get_booking_for_update(session: AsyncSession, booking_id: UUID) -> Booking:
    """Return a booking with its row and its objects' claims locked.

    Raises:
        BookingNotFound: the caller may see no such booking.
    """
    found = await lock_bookings(session, [booking_id])
    if not found:
        raise BookingNotFound(f"no booking {booking_id}")
    return found[0]


async def lock_bookings_of_deal(session: AsyncSession, deal_id: UUID) -> list[Booking]:
    """Return a deal's bookings that have not ended, in id order, locked."""
    connection = await driver_connection(session)
    return await assemble_bookings(session, await connection.fetch(_LOCK_OF_DEAL, deal_id))


async def assemble_bookings(session: AsyncSession, rows: Sequence[Record]) -> list[Booking]:
    """Return the bookings of rows that this session has locked, and lock their objects' claims.

    Raises:
        ValueError: a row holds what the domain doesn't know.
    """
    make = await assembler(session, rows)
    bookings = [make(row) for row in rows]
    for booking in bookings:
        remember_locked(session, booking, booking.id)
    return bookings


async def assembler(session: AsyncSession, rows: Sequence[Record]) -> Callable[[Record], Booking]:
    """Lock the claims of locked rows' objects; return what makes one row's booking, or raises a ValueError for it."""
    connection = await driver_connection(session)
    found = await connection.fetch(_OBJECTS, [row["id"] for row in rows]) if rows else []
    claims = await _lock_claims(session, [(one["tenant_id"], one["property_object_id"]) for one in found])
    objects: dict[UUID, list[Record]] = {row["id"]: [] for row in rows}
    for one in found:
        objects[one["booking_id"]].append(one)

    def make(row: Record) -> Booking:
        parts = [_to_object(one, claims[one["tenant_id"], one["property_object_id"]]) for one in objects[row["id"]]]
        return _to_booking(row, parts)

    return make


async def add_booking(session: AsyncSession, booking: Booking) -> None:
    """Insert a new booking and its objects, each with a claim that hands out its sequences."""
    connection = await driver_connection(session)
    ids = [one.property_object_id for one in booking.objects]
    await connection.execute(_ADD_CLAIMS, booking.tenant_id, ids)
    await connection.execute(
        _ADD,
        booking.id,
        booking.tenant_id,
        booking.deal_id,
        booking.partner_id,
        booking.state.value,
        booking.created_at,
    )
    await connection.execute(_ADD_OBJECTS, booking.id, booking.tenant_id, ids)


async def save_bookings(session: AsyncSession, bookings: Sequence[Booking]) -> None:
    """Write bookings, their objects and claims, with one statement each.

    Raises:
        RuntimeError: a row is not there although this transaction holds its lock.
    """
    connection = await driver_connection(session)
    columns = [[getattr(booking, name) for booking in bookings] for name in _WRITTEN]
    answer = await connection.execute(_SAVE, [booking.id for booking in bookings], *columns)
    if int(answer.split()[-1]) != len(bookings):
        raise RuntimeError(f"{answer} where {len(bookings)} locked rows were to be written")
    parts = [(booking, one) for booking in bookings for one in booking.objects]
    await connection.execute(
        _SAVE_OBJECTS,
        [booking.id for booking, _ in parts],
        [one.property_object_id for _, one in parts],
        [one.sequence for _, one in parts],
        [one.asked for _, one in parts],
        [one.outcome for _, one in parts],
        [one.reason for _, one in parts],
        [one.object_version for _, one in parts],
    )
    claims = {(booking.tenant_id, one.property_object_id): one.claim for booking, one in parts}
    await connection.execute(
        _SAVE_CLAIMS,
        [tenant for tenant, _ in claims],
        [one for _, one in claims],
        [claim.booking_id for claim in claims.values()],
        [claim.sequence for claim in claims.values()],
    )


async def add_history(session: AsyncSession, moves: Sequence[BookingMoved], actor: str | None) -> None:
    """Keep the transitions of bookings for their pages."""
    connection = await driver_connection(session)
    await connection.execute(
        _ADD_HISTORY,
        [move.booking_id for move in moves],
        [move.version for move in moves],
        [move.tenant_id for move in moves],
        [move.from_state for move in moves],
        [move.to_state for move in moves],
        [move.reason for move in moves],
        [move.changed_at for move in moves],
        actor,
    )


async def lock_limits(
    session: AsyncSession, partners: Iterable[tuple[UUID, UUID]]
) -> dict[tuple[UUID, UUID], PartnerLimit]:
    """Return the limits of (tenant, partner), those that exist, with their rows locked in order."""
    wanted = set(partners)
    known = {one: limit for one in wanted if (limit := find_locked(session, PartnerLimit, one)) is not None}
    if missing := sorted(wanted - known.keys()):
        connection = await driver_connection(session)
        rows = await connection.fetch(_LOCK_LIMITS, [tenant for tenant, _ in missing], [one for _, one in missing])
        for row in rows:
            limit = PartnerLimit(*row)
            remember_locked(session, limit, (limit.tenant_id, limit.partner_id))
            known[limit.tenant_id, limit.partner_id] = limit
    return known


async def charge_limits(session: AsyncSession, charges: Mapping[tuple[UUID, UUID], int]) -> None:
    """Add to what is used of locked limits; a partner without one is left out."""
    connection = await driver_connection(session)
    await connection.executemany(_CHARGE, [(*partner, amount) for partner, amount in sorted(charges.items())])


async def find_claimants(session: AsyncSession, object_ids: Sequence[UUID]) -> dict[UUID, list[UUID]]:
    """Return the bookings that have the objects' claims, by object (ids of objects are not secret between tenants)."""
    connection = await driver_connection(session)
    found: dict[UUID, list[UUID]] = {}
    for row in await connection.fetch(_CLAIMED, object_ids):
        found.setdefault(row["property_object_id"], []).append(row["booking_id"])
    return found


async def find_quoted(session: AsyncSession, object_ids: Sequence[UUID]) -> list[UUID]:
    """Return the bookings with an open quote that have one of the objects."""
    connection = await driver_connection(session)
    return [row["id"] for row in await connection.fetch(_QUOTED, object_ids)]


async def _lock_claims(
    session: AsyncSession, keys: Sequence[tuple[UUID, UUID]]
) -> dict[tuple[UUID, UUID], ObjectClaim]:
    known = {key: claim for key in keys if (claim := find_locked(session, ObjectClaim, key)) is not None}
    if missing := sorted({key for key in keys if key not in known}):
        connection = await driver_connection(session)
        rows = await connection.fetch(_LOCK_CLAIMS, [tenant for tenant, _ in missing], [one for _, one in missing])
        for row in rows:
            claim = ObjectClaim(row["property_object_id"], row["booking_id"], row["sequence"])
            known[row["tenant_id"], row["property_object_id"]] = claim
            remember_locked(session, claim, (row["tenant_id"], row["property_object_id"]))
    return known


def _to_object(row: Record, claim: ObjectClaim) -> BookingObject:
    return BookingObject(
        row["property_object_id"],
        claim,
        row["sequence"],
        _maybe(Asked, row["asked"]),
        _maybe(Outcome, row["outcome"]),
        _maybe(Reason, row["reason"]),
        row["object_version"],
    )


def _to_booking(row: Record, objects: list[BookingObject]) -> Booking:
    kept: dict[str, Any] = {name: row[name] for name in BOOKING_COLUMNS}
    kept |= {
        "state": BookingState(row["state"]),
        "reason": _maybe(Reason, row["reason"]),
        "came_from": _maybe(BookingState, row["came_from"]),
    }
    return Booking(**kept, objects=objects, charge_on_record=row["charged_minor"])


def _maybe(kind: Any, value: str | None) -> Any:
    return None if value is None else kind(value)


def timer_of(row: Record, column: str) -> tuple[datetime, UUID]:
    """Return a claimed row's place in the order of its job."""
    return row[column], row["id"]
