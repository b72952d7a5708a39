"""What bookings do by themselves: react to the chessboard's messages, and to the passing of time.

The booking's row lock decides between a message, a job and a person; who comes second finds the state changed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from asyncpg import Record
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.jobs import Run
from chassis.outbox import Cause
from crm import repository
from crm.commands.settling import Change, Why, change_of, settle
from crm.domain import Answer, BatchResult, Booking, BookingState, Reason


async def take_answer(session: AsyncSession, answer: Answer, tenant_id: UUID, why: Why) -> bool:
    """Let a booking take an answer of the chessboard; return whether it said anything new."""
    found = await repository.lock_bookings(session, [answer.booking_id])
    if not found or found[0].tenant_id != tenant_id or not found[0].take_answer(answer, why.now):
        return False
    await settle(session, [change_of(found[0], f"object-{answer.outcome}")], why)
    return True


@dataclass(frozen=True, slots=True)
class Freed:
    """The safety net has freed an object.

    Attributes:
        version: the object's version after that.
    """

    property_object_id: UUID
    tenant_id: UUID
    version: int


async def react_to_net(session: AsyncSession, freed: Freed, why: Why) -> bool:
    """Let the booking that has an object's claim react to its release; return whether it meant anything."""
    claimants = await repository.find_claimants(session, [freed.property_object_id])
    bookings = await repository.lock_bookings(session, claimants.get(freed.property_object_id, ()))
    changed = [
        booking
        for booking in bookings
        if booking.tenant_id == freed.tenant_id
        and _has_claim(booking, freed.property_object_id)
        and booking.learn_freed(freed.property_object_id, freed.version, why.now)
    ]
    await settle(session, [change_of(booking, "object-freed-by-net") for booking in changed], why)
    return bool(changed)


async def invalidate_quotes(session: AsyncSession, property_object_id: UUID, tenant_id: UUID, why: Why) -> int:
    """Take back the open quotes of bookings with an object whose offer has changed; return how many."""
    ids = await repository.find_quoted(session, [property_object_id])
    bookings = await repository.lock_bookings(session, ids)
    quoted = [one for one in bookings if one.state is BookingState.QUOTED and one.tenant_id == tenant_id]
    for booking in quoted:
        booking.invalidate_quote(Reason.PRICE_CHANGED, why.now)
    await settle(session, [change_of(booking) for booking in quoted], why)
    return len(quoted)


async def sweep_bookings(
    session: AsyncSession,
    run: Run,
    due: repository.TimerClaim,
    act: Callable[[Booking, datetime], None],
    limit: int,
    after: tuple[datetime, UUID] | None,
) -> BatchResult:
    """Do to one batch of bookings what their timer asks for, in the caller's transaction.

    Args:
        session: a write session of the system role.
        run: the job's run; its `as_of` is the instant that everything is compared with.
        due: what to claim.
        act: what the timer asks for; raises for a booking that is not due.
        limit: the batch size.
        after: (timer, id) of the last row of this cycle; None for its first batch.
    """
    claimed = await due.rows.claim(session, run, limit=limit, arguments=(run.as_of,), after=after)
    booking_of = await repository.assembler(session, claimed.rows)
    why = Why(run.as_of, Cause(str(run.id), run_id=run.id))

    def guard(row: Record) -> Change:
        booking = booking_of(row)
        act(booking, run.as_of)
        return change_of(booking)

    outcome = await due.rows.apply(
        session, run, claimed, guard=guard, write=lambda session, changes: settle(session, changes, why)
    )
    healthy = [row for row in claimed.rows if not row["was_poisoned"]]
    return BatchResult(
        processed_count=len(outcome.written),
        has_more=claimed.has_more,
        skipped_locked=claimed.skipped_locked,
        failed_count=len(outcome.failed),
        cursor=repository.timer_of(healthy[-1], due.column) if healthy else after,
    )


def _has_claim(booking: Booking, property_object_id: UUID) -> bool:
    return any(
        one.property_object_id == property_object_id and one.claim.booking_id == booking.id for one in booking.objects
    )
