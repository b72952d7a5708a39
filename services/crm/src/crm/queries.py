"""Reads for HTTP: straight SQL to what a page shows, under the caller's row level security."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncSession

from crm.domain import DealNotFound

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
