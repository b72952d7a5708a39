"""How property objects are loaded for a change, locked, and the one way in which a change is written.

Locks are taken in the order of ids by whoever waits for them; the job takes them in the order of times and never waits.
All write through `write_changes`: one UPDATE filtered by id and version, and with it a row of history, audit and outbox
per change.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any, Final
from uuid import UUID

import structlog
from asyncpg import Connection, Record
from prometheus_client import Counter
from sqlalchemy.ext.asyncio import AsyncSession

import chessboard
from chassis.audit import Audit, AuditRecord
from chassis.contracts import contract_of
from chassis.contracts.checker import ContractChecker
from chassis.db import COPY_NULL, copy_lines, copy_text, driver_connection, find_locked, meanwhile, remember_locked
from chassis.gathering import gather, is_gathering
from chassis.instants import rfc3339
from chassis.outbox import Cause, Outbox
from chessboard.domain import (
    Change,
    Hold,
    Ledger,
    LedgerEntry,
    PropertyObject,
    PropertyObjectNotFound,
    Status,
    StatusChanged,
    StatusSource,
    VersionConflict,
)
from chessboard.messages import to_message
from chessboard.tables import SCHEMA

OUTBOX: Final = Outbox(SCHEMA, ContractChecker.of(contract_of(chessboard.__file__)))
AUDIT: Final = Audit(SCHEMA)
VERSION_CONFLICTS: Final = Counter(
    "chessboard_property_object_version_conflicts_total",
    "Changes that were not written, since the object had changed after it was read.",
    registry=None,
)
"""Of the process; the composition root registers it."""

OBJECT_COLUMNS: Final = (
    "id, tenant_id, project_id, building_id, section, number, floor, rooms, area, price_minor, currency, status,"
    " reserved_until, booked_until, hold_deal_id, hold_booking_id, sold_at, status_source, status_changed_at, version,"
    " created_at, updated_at"
)
_LOCK: Final = (
    f"select {OBJECT_COLUMNS} from chessboard.property_object where id = any($1::uuid[]) order by id for update"
)
_UPDATE: Final = """
update chessboard.property_object as o
set status = c.status, reserved_until = c.reserved_until, booked_until = c.booked_until,
    hold_deal_id = c.hold_deal_id, hold_booking_id = c.hold_booking_id, sold_at = c.sold_at,
    status_source = c.status_source, status_changed_at = c.status_changed_at, price_minor = c.price_minor,
    currency = c.currency, version = c.version, updated_at = c.updated_at
from unnest($1::uuid[], $2::int[], $3::int[], $4::text[], $5::timestamptz[], $6::timestamptz[], $7::uuid[], $8::uuid[],
            $9::timestamptz[], $10::text[], $11::timestamptz[], $12::bigint[], $13::text[], $14::timestamptz[])
  as c(id, expected, version, status, reserved_until, booked_until, hold_deal_id, hold_booking_id, sold_at,
       status_source, status_changed_at, price_minor, currency, updated_at)
where o.id = c.id and o.version = c.expected
returning o.id
"""
_HISTORY: Final = (
    "property_object_id", "version", "tenant_id", "from_status", "to_status", "source", "reserved_until",
    "booked_until", "hold_deal_id", "hold_booking_id", "price_minor", "currency", "actor", "correlation_id",
    "changed_at",
)  # fmt: skip
_LEDGER: Final = (
    "select property_object_id, booking_id, deal_id, last_sequence, released from chessboard.hold_ledger"
    " where property_object_id = any($1::uuid[])"
)
_WRITE_LEDGER: Final = """
insert into chessboard.hold_ledger as l (property_object_id, booking_id, deal_id, last_sequence, released)
select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::bigint[], $5::boolean[])
on conflict (property_object_id, booking_id)
do update set last_sequence = excluded.last_sequence, released = excluded.released
"""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Why objects change, for their history, the audit and the events.

    Attributes:
        now: the instant of the request, the batch or the cycle.
        actor: subject of the caller; None for the system.
        cause: correlation id, and the event or run that caused it.
    """

    now: datetime
    actor: str | None
    cause: Cause


async def get_for_update(session: AsyncSession, property_object_id: UUID) -> PropertyObject:
    """Return an object with its row locked.

    Raises:
        PropertyObjectNotFound: the caller's tenant has no such object.
    """
    found = await find_for_update(session, [property_object_id])
    if property_object_id not in found:
        raise PropertyObjectNotFound(f"no property object {property_object_id}")
    return found[property_object_id]


async def find_for_update(session: AsyncSession, ids: Iterable[UUID]) -> dict[UUID, PropertyObject]:
    """Return those of the objects that there are, with their rows locked in the order of ids.

    An object that this session has locked already is the same one as before, with all that was done to it.
    """
    wanted = set(ids)
    found = {one: entity for one in wanted if (entity := find_locked(session, PropertyObject, one)) is not None}
    if missing := sorted(wanted - found.keys()):
        connection = await driver_connection(session)
        for row in await connection.fetch(_LOCK, missing):
            entity = to_property_object(row)
            remember_locked(session, entity, entity.id)
            found[entity.id] = entity
    return found


async def preload(session: AsyncSession, ids: Sequence[UUID]) -> None:
    """Lock objects and load their ledgers for a batch of requests: one statement each."""
    await find_for_update(session, ids)
    await _load_ledgers(session, ids)


async def get_ledger(session: AsyncSession, property_object_id: UUID) -> Ledger:
    """Return the ledger of an object that this session has locked."""
    ledger = find_locked(session, Ledger, property_object_id)
    if ledger is None:
        await _load_ledgers(session, [property_object_id])
        ledger = find_locked(session, Ledger, property_object_id)
    if ledger is None:
        raise LookupError(f"no ledger of {property_object_id}")
    return ledger


async def _load_ledgers(session: AsyncSession, ids: Sequence[UUID]) -> None:
    ledgers = {one: Ledger(one) for one in ids}
    for row in await (await driver_connection(session)).fetch(_LEDGER, list(ledgers)):
        entry = LedgerEntry(*row)
        ledgers[entry.property_object_id].entries[entry.booking_id] = entry
    for ledger in ledgers.values():
        remember_locked(session, ledger, ledger.property_object_id)


async def write_ledger(session: AsyncSession, ledger: Ledger) -> None:
    """Write the entries of a ledger that have changed; within a `gathered` block once for all, at its end."""
    await gather(session, _write_entries, ledger.changed.values())
    ledger.changed.clear()


async def _write_entries(session: AsyncSession, entries: Sequence[LedgerEntry]) -> None:
    last = {(entry.property_object_id, entry.booking_id): entry for entry in entries}
    if not last:
        return
    rows = (
        (one.property_object_id, one.booking_id, one.deal_id, one.last_sequence, one.released) for one in last.values()
    )
    await (await driver_connection(session)).execute(_WRITE_LEDGER, *map(list, zip(*rows, strict=True)))


def to_property_object(row: Record) -> PropertyObject:
    """Return the object of a row.

    Raises:
        ValueError: the row has a status or source that the domain doesn't know.
    """
    deal_id, booking_id = row["hold_deal_id"], row["hold_booking_id"]
    return PropertyObject(
        id=row["id"],
        tenant_id=row["tenant_id"],
        project_id=row["project_id"],
        building_id=row["building_id"],
        section=row["section"],
        number=row["number"],
        floor=row["floor"],
        rooms=row["rooms"],
        area=row["area"],
        price_minor=row["price_minor"],
        currency=row["currency"],
        status=Status(row["status"]),
        status_source=StatusSource(row["status_source"]),
        reserved_until=row["reserved_until"],
        booked_until=row["booked_until"],
        hold=None if deal_id is None or booking_id is None else Hold(deal_id, booking_id),
        sold_at=row["sold_at"],
        status_changed_at=row["status_changed_at"],
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


async def write_changes(session: AsyncSession, changes: Sequence[Change], origin: Origin) -> frozenset[UUID]:
    """Write changes of objects with their history, audit rows, events and requests to count a project again.

    An object may change several times: it gets one UPDATE, from the version before its first change to the state after
    its last, and a row of history, audit and outbox for each. Within a `gathered` block the UPDATE is sent once for all
    changes of the block, at its end.

    Args:
        session: an open write session.
        changes: what the domain's methods returned, in order.
        origin: why they change.

    Returns:
        Ids of the objects whose version has moved on since they were read: nothing of them was written. Within a
        `gathered` block always empty.

    Raises:
        VersionConflict: within a `gathered` block, at its end: an object's version has moved on.
    """
    if is_gathering(session):
        await gather(session, _update_all, changes)
        await _write_lines(session, _lines(session, changes, origin))
        return frozenset()
    if not changes:
        return frozenset()
    update = _update(await driver_connection(session), changes)
    moved_on, lines = await meanwhile(update, lambda: _lines(session, changes, origin))
    await _write_lines(session, lines, without=moved_on)
    return moved_on


async def _update_all(session: AsyncSession, changes: Sequence[Change]) -> None:
    if changes and (moved_on := await _update(await driver_connection(session), changes)):
        raise VersionConflict(f"{len(moved_on)} objects have changed since they were read")


async def _update(connection: "Connection[Record]", changes: Sequence[Change]) -> frozenset[UUID]:
    """Send one UPDATE; return the ids of those that it did not find at the version that was read."""
    first: dict[UUID, int] = {}
    last: dict[UUID, Change] = {}
    for change in changes:
        first.setdefault(change.property_object_id, change.version - 1)
        last[change.property_object_id] = change
    rows = [_row(first[one], change) for one, change in last.items()]
    written = await connection.fetch(_UPDATE, *map(list, zip(*rows, strict=True)))
    if len(written) == len(last):
        return frozenset()
    moved_on = frozenset(last.keys() - {row["id"] for row in written})
    VERSION_CONFLICTS.inc(len(moved_on))
    log.warning("version conflict", objects=[str(one) for one in sorted(moved_on)[:20]], count=len(moved_on))
    return moved_on


def _row(expected: int, change: Change) -> tuple[Any, ...]:
    if isinstance(change, StatusChanged):
        status, status_changed_at = change.to_status, change.changed_at
    else:
        status, status_changed_at = change.status, change.status_changed_at
    return (
        change.property_object_id,
        expected,
        change.version,
        status.value,
        change.reserved_until,
        change.booked_until,
        None if change.hold is None else change.hold.deal_id,
        None if change.hold is None else change.hold.booking_id,
        change.sold_at,
        change.source.value,
        status_changed_at,
        change.price_minor,
        change.currency,
        change.changed_at,
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """What tells of one change: its row of history, audit and outbox, and the request to count again, if it asks."""

    property_object_id: UUID
    history: str
    audit: str
    event: str
    recount: str | None


def _lines(session: AsyncSession, changes: Sequence[Change], origin: Origin) -> list[_Line]:
    """Make what tells of changes."""
    correlation_id = origin.cause.correlation_id
    actor = COPY_NULL if origin.actor is None else copy_text(origin.actor)
    by = f"{actor}\t{copy_text(correlation_id)}"
    audit: list[str] = []
    for at, group in groupby(changes, lambda change: change.changed_at):
        records = [_audit_record(change, origin) for change in group]
        audit += AUDIT.lines(records, occurred_at=at, actor=origin.actor, correlation_id=correlation_id)
    events = OUTBOX.lines(session, [to_message(change) for change in changes], origin.cause)
    asked_at = rfc3339(origin.now)
    return [
        _Line(
            change.property_object_id,
            _history(change, by),
            audit[at],
            events[at],
            f"{change.project_id}\t{asked_at}" if change.from_status is not change.to_status else None,
        )
        if isinstance(change, StatusChanged)
        else _Line(change.property_object_id, _history(change, by), audit[at], events[at], None)
        for at, change in enumerate(changes)
    ]


async def _write_lines(session: AsyncSession, lines: Sequence[_Line], without: Collection[UUID] = frozenset()) -> None:
    """Write what tells of changes, but for those of some objects."""
    if without:
        lines = [line for line in lines if line.property_object_id not in without]
    if not lines:
        return
    await copy_lines(session, "chessboard.property_object_version", _HISTORY, [line.history for line in lines])
    await AUDIT.write(session, [line.audit for line in lines])
    await OUTBOX.write(session, [line.event for line in lines])
    if recounts := [line.recount for line in lines if line.recount is not None]:
        await copy_lines(session, "chessboard.project_recalc_request", ("project_id", "requested_at"), recounts)


def _history(change: Change, by: str) -> str:
    if isinstance(change, StatusChanged):
        from_status, to_status = change.from_status.value, change.to_status.value
    else:
        from_status = to_status = change.status.value
    deal, booking = (COPY_NULL, COPY_NULL)
    if change.hold is not None:
        deal, booking = str(change.hold.deal_id), str(change.hold.booking_id)
    return "\t".join(
        (
            str(change.property_object_id),
            str(change.version),
            str(change.tenant_id),
            from_status,
            to_status,
            change.source.value,
            _instant(change.reserved_until),
            _instant(change.booked_until),
            deal,
            booking,
            str(change.price_minor),
            change.currency,
            by,
            rfc3339(change.changed_at),
        )
    )


def _audit_record(change: Change, origin: Origin) -> AuditRecord:
    if not isinstance(change, StatusChanged):
        details: dict[str, Any] = {"status": change.status.value, "version": change.version}
        return AuditRecord(
            "property-object.price-changed", "property-object", change.property_object_id, change.tenant_id, details
        )
    run_id = origin.cause.run_id
    previous = change.previous_hold
    until = change.previous_until
    details = {
        "from": change.from_status.value,
        "to": change.to_status.value,
        "source": change.source.value,
        "version": change.version,
        "asOf": rfc3339(origin.now),
        "runId": None if run_id is None else str(run_id),
        "previousHoldDealId": None if previous is None else str(previous.deal_id),
        "previousReservedUntil": _or_none(until if change.from_status is Status.RESERVED else None),
        "previousBookedUntil": _or_none(until if change.from_status is Status.BOOKED else None),
    }
    return AuditRecord(
        "property-object.status-changed", "property-object", change.property_object_id, change.tenant_id, details
    )


def _or_none(value: datetime | None) -> str | None:
    return None if value is None else rfc3339(value)


def _instant(value: datetime | None) -> str:
    return COPY_NULL if value is None else rfc3339(value)
