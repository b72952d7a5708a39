"""Use cases of deals and their timeline."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import AuditRecord
from chassis.ids import new_id
from chassis.instants import rfc3339
from chassis.jobs import Run
from chassis.outbox import Cause
from chassis.preconditions import ANY_VERSION, Precondition
from crm import repository
from crm.commands.settling import AUDIT, OUTBOX, By, Why, change_of, settle
from crm.domain import (
    CLOSES,
    BatchResult,
    Deal,
    DealStatus,
    DealTimelineEventType,
    DomainEvent,
    NoOpenStep,
    OverdueLimits,
    StepOverdue,
    StepStatus,
    TimelineStep,
    end_bookings,
    opening_status,
)
from crm.messages import to_message

Cursor = tuple[datetime, UUID]
"""(due time, id) of the last row of a batch: where the next batch of the cycle goes on."""


@dataclass(frozen=True, slots=True)
class NewStep:
    """A step to add: its content, which never changes afterwards."""

    type: DealTimelineEventType
    occurred_at: datetime
    due_at: datetime | None
    payload: dict[str, Any]


async def open_deal(session: AsyncSession, title: str, by: By) -> Deal:
    """Open a deal in the caller's tenant."""
    deal = Deal(id=new_id(), tenant_id=by.tenant_id, title=title, created_at=by.now, updated_at=by.now)
    session.add(deal)
    await session.flush()
    await _audit(session, deal, "deal.opened", {}, by)
    return deal


async def add_step(
    session: AsyncSession, deal_id: UUID, new: NewStep, by: By, expected: Precondition = ANY_VERSION
) -> TimelineStep:
    """Append a step to a deal's timeline; a closer closes the oldest open step of its pair.

    Raises:
        DealNotFound: no such deal in the caller's tenant.
        DealNotActive: the deal has ended.
        NoOpenStep: a closer came and nothing is open that it could close.
        PreconditionFailed: the deal is not at the expected version.
    """
    deal = await repository.get_deal_for_update(session, deal_id)
    expected.check(deal.version)
    step = TimelineStep(
        id=new_id(),
        deal_id=deal.id,
        tenant_id=deal.tenant_id,
        type=new.type,
        status=opening_status(new.type),
        occurred_at=new.occurred_at,
        due_at=new.due_at,
        payload=new.payload,
        actor_user_id=by.user_id,
        actor_role=by.role,
        created_at=by.now,
        updated_at=by.now,
        completed_at=by.now if new.type in CLOSES else None,
    )
    closes = await _paired_step(session, deal, new.type)
    events = deal.add_step(step, closes, by.now)
    session.add(step)
    closed = {} if closes is None else {"closes": str(closes.id)}
    await _settle(session, deal, events, "timeline-step.added", {"step": str(step.id), "type": new.type} | closed, by)
    return step


async def end_deal(
    session: AsyncSession, deal_id: UUID, status: DealStatus, by: By, expected: Precondition = ANY_VERSION
) -> Deal:
    """Complete or cancel a deal, close its open steps and end its bookings in the same transaction.

    Completing sells the objects of confirmed bookings; cancelling releases all that may be held.

    Raises:
        DealNotFound: no such deal in the caller's tenant.
        DealNotActive: it has ended already.
        BookingsNotConfirmed: it was to be completed, and a booking is live but not confirmed.
        PreconditionFailed: it is not at the expected version.
    """
    deal = await repository.get_deal_for_update(session, deal_id)
    expected.check(deal.version)
    open_steps = await repository.find_open_steps_for_update(session, deal_id)
    events = deal.end(status, open_steps, by.now)
    ended = await _end_bookings(session, deal, by)
    details = {"closedSteps": len(open_steps), "endedBookings": ended}
    await _settle(session, deal, events, f"deal.{status.lower()}", details, by)
    return deal


async def mark_overdue_steps(
    session: AsyncSession, run: Run, limits: OverdueLimits, after: Cursor | None
) -> BatchResult:
    """Move one batch of due steps to Overdue, with one event and one audit row each, in the caller's transaction.

    Args:
        session: a write session of the system role.
        run: the job's run; its `as_of` is the cut-off and the overdue instant.
        limits: the batch size.
        after: (due time, id) of the last row of this cycle; None for its first batch.
    """
    claimed = await repository.OVERDUE.claim(session, run, limit=limits.batch_size, arguments=(run.as_of,), after=after)

    async def write(session: AsyncSession, moved: Sequence[StepOverdue]) -> None:
        await repository.move_to_overdue(session, moved, run.as_of)
        await AUDIT.record(
            session,
            [_overdue_record(step) for step in moved],
            occurred_at=run.as_of,
            actor=None,
            correlation_id=str(run.id),
        )
        await OUTBOX.emit(session, [to_message(step, run.as_of) for step in moved], Cause(str(run.id), run_id=run.id))

    outcome = await repository.OVERDUE.apply(
        session,
        run,
        claimed,
        guard=lambda row: repository.to_claimed_step(row).mark_overdue(run.as_of),
        write=write,
    )
    healthy = [row for row in claimed.rows if not row["was_poisoned"]]
    return BatchResult(
        processed_count=len(outcome.written),
        has_more=claimed.has_more,
        skipped_locked=claimed.skipped_locked,
        failed_count=len(outcome.failed),
        cursor=(healthy[-1]["due_at"], healthy[-1]["id"]) if healthy else after,
    )


async def _end_bookings(session: AsyncSession, deal: Deal, by: By) -> int:
    bookings = await repository.lock_bookings_of_deal(session, deal.id)
    ended = end_bookings(bookings, deal.status, by.now)
    await settle(session, [change_of(booking) for booking in ended], Why.of(by))
    return len(ended)


async def _paired_step(session: AsyncSession, deal: Deal, kind: DealTimelineEventType) -> TimelineStep | None:
    opener = CLOSES.get(kind)
    if opener is None or deal.status is not DealStatus.ACTIVE:
        return None
    step = await repository.find_open_step_for_update(session, deal.id, opener)
    if step is None:
        raise NoOpenStep(f"deal {deal.id} has no open {opener} that {kind} could close")
    return step


async def _settle(
    session: AsyncSession,
    deal: Deal,
    events: Sequence[DomainEvent],
    action: str,
    details: dict[str, Any],
    by: By,
) -> None:
    await session.flush()
    await _audit(session, deal, action, details, by)
    await OUTBOX.emit(
        session, [to_message(event, deal.updated_at, deal.version) for event in events], Cause(by.correlation_id)
    )


async def _audit(session: AsyncSession, deal: Deal, action: str, details: dict[str, Any], by: By) -> None:
    record = AuditRecord(action, "deal", deal.id, deal.tenant_id, details)
    await AUDIT.record(session, [record], occurred_at=by.now, actor=by.user_id, correlation_id=by.correlation_id)


def _overdue_record(step: StepOverdue) -> AuditRecord:
    details = {
        "from": StepStatus.IN_PROGRESS,
        "to": StepStatus.OVERDUE,
        "dueAt": rfc3339(step.due_at),
        "overdueAt": rfc3339(step.overdue_at),
    }
    return AuditRecord("timeline-step.overdue", "timeline-step", step.step_id, step.tenant_id, details)
