"""Reads for HTTP: straight SQL to what a page shows, under the caller's row level security."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncSession

from crm.domain import BookingNotFound, DealNotFound

OVERDUE_ICON: Final = "просрочено"

_DEAL = text(
    "select id, title, status, version, created_at, updated_at,"
    " (select count(*) from crm.deal_timeline_event s where s.deal_id = d.id and s.status = 'Overdue') as overdue_steps"
    " from crm.deal d where id = :id"
)
_DEALS = text(
    "select id, title, status, version, created_at, updated_at,"
    " (select count(*) from crm.deal_timeline_event s where s.deal_id = d.id and s.status = 'Overdue') as overdue_steps"
    " from crm.deal d where (cast(:after as uuid) is null or id < :after)"
    " and (cast(:status as text) is null or status = :status) order by id desc limit :limit"
)
_TIMELINE = text(
    "select id, type, status, occurred_at, due_at, completed_at, updated_at, actor_role,"
    " case when status = 'Overdue' then :icon end as icon"
    " from crm.deal_timeline_event where deal_id = :id order by occurred_at, id"
)
_BOOKING_COLUMNS: Final = (
    "b.id, b.deal_id, b.partner_id, b.state, b.reason, b.version, b.price_minor, b.currency, b.quote_expires_at,"
    " b.reserved_until, b.booked_until, b.registration_asked_at, b.created_at, b.updated_at,"
    " (select array_agg(o.property_object_id order by o.position) from crm.booking_object o where o.booking_id = b.id)"
    " as property_object_ids"
)
_BOOKING = text(f"select {_BOOKING_COLUMNS} from crm.booking b where b.id = :id")
_BOOKINGS = text(
    f"select {_BOOKING_COLUMNS} from crm.booking b where (cast(:after as uuid) is null or b.id < :after)"
    " and (cast(:state as text) is null or b.state = :state)"
    " and (cast(:deal as uuid) is null or b.deal_id = :deal) order by b.id desc limit :limit"
)
_BOOKING_OBJECTS = text(
    "select property_object_id, asked, outcome from crm.booking_object where booking_id = :id order by position"
)
_BOOKING_HISTORY = text(
    "select version, from_state, to_state, reason, actor, changed_at from crm.booking_history"
    " where booking_id = :id order by version"
)


async def get_deal(session: AsyncSession, deal_id: UUID) -> RowMapping:
    """Return one deal.

    Raises:
        DealNotFound: the caller's tenant has no such deal.
    """
    row = (await session.execute(_DEAL, {"id": deal_id})).mappings().one_or_none()
    if row is None:
        raise DealNotFound(f"no deal {deal_id}")
    return row


async def list_deals(
    session: AsyncSession, *, limit: int, after: UUID | None, status: str | None
) -> Sequence[RowMapping]:
    """Return deals of the caller's tenant, newest first, after the given one."""
    found = await session.execute(_DEALS, {"limit": limit, "after": after, "status": status})
    return found.mappings().all()


async def get_timeline(session: AsyncSession, deal_id: UUID) -> tuple[int, Sequence[RowMapping]]:
    """Return the deal's version and its tab «Ход сделки»: the steps in order, the overdue ones with their icon.

    Raises:
        DealNotFound: the caller's tenant has no such deal.
    """
    deal = await get_deal(session, deal_id)
    steps = await session.execute(_TIMELINE, {"id": deal_id, "icon": OVERDUE_ICON})
    return deal["version"], steps.mappings().all()


async def get_booking(session: AsyncSession, booking_id: UUID) -> tuple[RowMapping, Sequence[RowMapping]]:
    """Return one booking and its objects in order.

    Raises:
        BookingNotFound: the caller may see no such booking.
    """
    row = (await session.execute(_BOOKING, {"id": booking_id})).mappings().one_or_none()
    if row is None:
        raise BookingNotFound(f"no booking {booking_id}")
    objects = await session.execute(_BOOKING_OBJECTS, {"id": booking_id})
    return row, objects.mappings().all()


async def list_bookings(
    session: AsyncSession, *, limit: int, after: UUID | None, state: str | None, deal_id: UUID | None
) -> Sequence[RowMapping]:
    """Return bookings that the caller may see, newest first, after the given one."""
    values = {"limit": limit, "after": after, "state": state, "deal": deal_id}
    return (await session.execute(_BOOKINGS, values)).mappings().all()


async def get_booking_history(session: AsyncSession, booking_id: UUID) -> tuple[int, Sequence[RowMapping]]:
    """Return a booking's version and its transitions, the first one first.

    Raises:
        BookingNotFound: the caller may see no such booking.
    """
    booking, _ = await get_booking(session, booking_id)
    moves = await session.execute(_BOOKING_HISTORY, {"id": booking_id})
    return booking["version"], moves.mappings().all()
