"""What the safety net does: holds that are long over are freed, each with its history, audit row and event."""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.batching import Claimed
from chassis.jobs import Run
from chassis.outbox import Cause
from chessboard import repository
from chessboard.domain import ExpirationLimits, Phase, StatusChanged, release_expired
from chessboard.expired_holds import CLAIMS
from chessboard.repository import Origin

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Expired:
    """What one batch of the safety net did.

    Attributes:
        released: the changes that were written.
        skipped_locked: holds among the first of the order that somebody else has locked.
        failed: holds left out, since their guard or the database refused them.
        conflicts: objects that had changed after they were read.
    """

    released: tuple[StatusChanged, ...] = ()
    skipped_locked: int = 0
    failed: int = 0
    conflicts: int = 0


async def release_expired_holds(session: AsyncSession, run: Run, phase: Phase, limits: ExpirationLimits) -> Expired:
    """Free one batch of holds that are over by more than the grace, in the caller's transaction.

    Objects whose version has moved on after they were read are read once more: they are freed if they are still due.

    Args:
        session: a write session of the system role.
        run: the job's run; its `as_of` is the instant of every comparison and change.
        phase: which holds.
        limits: the batch size and the grace.
    """
    batch, moved_on = await _release(session, run, phase, limits, limits.batch_size)
    if not moved_on:
        return batch
    again, _ = await _release(session, run, phase, limits, len(moved_on))
    return Expired(
        batch.released + again.released,
        batch.skipped_locked + again.skipped_locked,
        batch.failed + again.failed,
        batch.conflicts + again.conflicts,
    )


async def _release(
    session: AsyncSession, run: Run, phase: Phase, limits: ExpirationLimits, size: int
) -> tuple[Expired, set[UUID]]:
    claimed = await CLAIMS[phase].claim(session, run, limit=size, arguments=(run.as_of, limits.hold_grace))
    log.info("batch selected", phase=phase.value, count=len(claimed.rows))
    if not claimed.rows:
        return Expired(skipped_locked=claimed.skipped_locked), set()
    return await _write(session, run, phase, limits, claimed)


async def _write(
    session: AsyncSession, run: Run, phase: Phase, limits: ExpirationLimits, claimed: Claimed
) -> tuple[Expired, set[UUID]]:
    origin = Origin(run.as_of, None, Cause(str(run.id), run_id=run.id))
    moved_on: set[UUID] = set()

    async def write(session: AsyncSession, changes: Sequence[StatusChanged]) -> None:
        moved_on.difference_update(change.property_object_id for change in changes)
        moved_on.update(await repository.write_changes(session, changes, origin))

    outcome = await CLAIMS[phase].apply(
        session,
        run,
        claimed,
        guard=lambda row: release_expired(repository.to_property_object(row), run.as_of, limits.hold_grace),
        write=write,
    )
    released = tuple(change for change in outcome.written if change.property_object_id not in moved_on)
    return Expired(released, claimed.skipped_locked, len(outcome.failed), len(moved_on)), moved_on
