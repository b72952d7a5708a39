"""How deals and steps are loaded for a change, locked, and how the job claims and moves steps in sets.

Locks are taken in one order: the deal, then its steps by id. The job locks steps only, and never waits.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from asyncpg import Record
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.batching import SkipLocked
from chassis.db import driver_connection
from crm.domain import (
    ClaimedStep,
    Deal,
    DealNotFound,
    DealTimelineEventType,
    StepOverdue,
    StepStatus,
    TimelineStep,
)
from crm.tables import SCHEMA, steps

SINGLE_RUNNER_LOCK: Final = "Pin:lock:job:scheduled:crm-timeline-overdue"

OVERDUE: Final = SkipLocked(
    schema=SCHEMA,
    job="timeline-overdue",
    table="crm.deal_timeline_event",
    columns=("t.id", "t.deal_id", "t.tenant_id", "t.type", "t.status", "t.due_at"),
    where="t.status = 'InProgress' and t.due_at is not null and t.due_at < $4",
    order=("t.due_at", "t.id"),
    arguments=1,
    cursor_types=("timestamptz", "uuid"),
)

_MOVE = (
    "update crm.deal_timeline_event as t set status = 'Overdue', updated_at = $2"
    " from unnest($1::uuid[]) as moved(id) where t.id = moved.id and t.status = 'InProgress'"
)
_BACKLOG = text(
    "select count(*) from (select from crm.deal_timeline_event t where t.status = 'InProgress'"
    " and t.due_at is not null and t.due_at < :now limit 100000) as due"
)
_LEFTOVERS = text(
    "select s.id, s.deal_id, count(*) over () as total from crm.deal_timeline_event s"
    " join crm.deal d on d.id = s.deal_id where s.status in ('InProgress', 'Overdue') and d.status <> 'Active'"
    " order by s.id limit 20"
)
_TRY_SINGLE_RUNNER = text("select pg_try_advisory_xact_lock(hashtextextended(:name, 0))")


async def get_deal_for_update(session: AsyncSession, deal_id: UUID) -> Deal:
    """Return a deal with its row locked.

    Raises:
        DealNotFound: the caller's tenant has no such deal.
    """
    deal = await session.get(Deal, deal_id, with_for_update=True, populate_existing=True)
    if deal is None:
        raise DealNotFound(f"no deal {deal_id}")
    return deal


async def find_open_step_for_update(
    session: AsyncSession, deal_id: UUID, kind: DealTimelineEventType
) -> TimelineStep | None:
    """Return the oldest open step of a type with its row locked, waiting for whoever holds it."""
    steps_of_kind = _open_steps(deal_id).where(steps.c.type == kind).order_by(steps.c.occurred_at, steps.c.id).limit(1)
    return (await session.execute(steps_of_kind)).scalars().first()


async def find_open_steps_for_update(session: AsyncSession, deal_id: UUID) -> Sequence[TimelineStep]:
    """Return all open steps of a deal with their rows locked, in id order."""
    return (await session.execute(_open_steps(deal_id).order_by(steps.c.id))).scalars().all()


def to_claimed_step(row: Record) -> ClaimedStep:
    """Return the domain's view of a claimed row.

    Raises:
        ValueError: the row has a type or status that the domain doesn't know.
    """
    return ClaimedStep(
        row["id"],
        row["deal_id"],
        row["tenant_id"],
        DealTimelineEventType(row["type"]),
        StepStatus(row["status"]),
        row["due_at"],
    )


async def move_to_overdue(session: AsyncSession, moved: Sequence[StepOverdue], now: datetime) -> None:
    """Set status and `updated_at` of the given steps, and nothing else.

    Raises:
        RuntimeError: a row was not in progress although this transaction holds its lock.
    """
    connection = await driver_connection(session)
    answer = await connection.execute(_MOVE, [step.step_id for step in moved], now)
    if int(answer.split()[-1]) != len(moved):
        raise RuntimeError(f"{answer} where {len(moved)} locked rows were to move")


async def count_overdue_backlog(session: AsyncSession, now: datetime) -> int:
    """Return how many steps are due and still in progress, counted up to 100000."""
    return int((await session.execute(_BACKLOG, {"now": now})).scalar_one())


async def find_leftover_steps(session: AsyncSession) -> tuple[int, list[tuple[UUID, UUID]]]:
    """Return how many steps are open though their deal has ended, and the first of them as (step id, deal id)."""
    rows = (await session.execute(_LEFTOVERS)).all()
    return (rows[0].total if rows else 0), [(row.id, row.deal_id) for row in rows]


async def try_single_runner(session: AsyncSession) -> bool:
    """Take the job's advisory lock for this transaction; return whether it was free."""
    return bool((await session.execute(_TRY_SINGLE_RUNNER, {"name": SINGLE_RUNNER_LOCK})).scalar_one())


def _open_steps(deal_id: UUID):  # type: ignore[no-untyped-def]  # noqa: ANN202 - SQLAlchemy's Select of an entity
    open_statuses = (StepStatus.IN_PROGRESS, StepStatus.OVERDUE)
    return (
        select(TimelineStep)
        .where(steps.c.deal_id == deal_id, steps.c.status.in_(open_statuses))
        .with_for_update()
        .execution_options(populate_existing=True)
    )
