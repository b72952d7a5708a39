"""The jobs of bookings: each does what a passed timer asks for, batch by batch, in transactions of their own.

booking-expiration is the normal path by which objects become free when their time is over: no grace, and each object
is released by an event. It never touches bookings that wait for an answer; those are booking-answers' affair.
"""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry

from chassis.db import Database
from chassis.jobs import JobMetrics, JobResult, Run
from crm import commands, repository
from crm.domain import BatchResult, Booking

MOST_BATCHES: Final = 50
"""Transactions of one cycle and phase; the next cycle goes on."""

log = structlog.get_logger(__name__)


class BookingSweep:
    """A job over bookings whose timer has passed.

    Args:
        name: the job's.
        database: under the system role.
        registry: where its metrics are registered.
        phases: what to claim, by the label under which it is counted; one phase has no label.
        act: what the timer asks of a booking.
        batch_size: rows of one transaction.
    """

    def __init__(
        self,
        name: str,
        database: Database,
        registry: CollectorRegistry,
        phases: Mapping[str, repository.TimerClaim],
        act: Callable[[Booking, datetime], None],
        batch_size: int,
    ) -> None:
        self.name = name
        self._database = database
        self._phases = phases
        self._act = act
        self._batch_size = batch_size
        self._is_labelled = len(phases) > 1
        labels = tuple(phases) if self._is_labelled else ()
        self.metrics = JobMetrics(f"crm_{name.replace('-', '_')}", registry, labels)

    async def run(self, run: Run) -> JobResult:
        """Run one cycle, phase by phase, and return its counts."""
        counts = {"processed": 0, "batches": 0, "skipped_locked": 0, "failed": 0}
        for phase, due in self._phases.items():
            await self._run_phase(run, phase, due, counts)
        backlog = 0
        async with self._database.read() as session:
            for due in self._phases.values():
                backlog += await due.count(session, run.as_of)
        self.metrics.backlog.set(backlog)
        return JobResult(counts)

    async def _run_phase(self, run: Run, phase: str, due: repository.TimerClaim, counts: dict[str, int]) -> None:
        after: tuple[datetime, UUID] | None = None
        for _ in range(MOST_BATCHES):
            if run.stop.requested:
                return
            async with self._database.write() as session:
                batch = await commands.sweep_bookings(session, run, due, self._act, self._batch_size, after)
            run.beat()
            self._count(phase, batch, counts)
            after = batch.cursor
            if not batch.has_more:
                return

    def _count(self, phase: str, batch: BatchResult, counts: dict[str, int]) -> None:
        items = self.metrics.items.labels(phase) if self._is_labelled else self.metrics.items
        items.inc(batch.processed_count)
        self.metrics.skip_locked.inc(batch.skipped_locked)
        self.metrics.errors.inc(batch.failed_count)
        counts["processed"] += batch.processed_count
        counts["batches"] += 1
        counts["skipped_locked"] += batch.skipped_locked
        counts["failed"] += batch.failed_count
        if batch.processed_count or batch.skipped_locked:
            log.info(
                "batch committed",
                phase=phase,
                processed=batch.processed_count,
                skipped_locked=batch.skipped_locked,
            )


def booking_expiration(database: Database, registry: CollectorRegistry, batch_size: int) -> BookingSweep:
    """Return the job that cancels bookings whose time is over and releases their objects."""
    phases = {"reserved": repository.RESERVED_OVER, "booked": repository.BOOKED_OVER}
    return BookingSweep("booking-expiration", database, registry, phases, Booking.expire, batch_size)


def booking_answers(database: Database, registry: CollectorRegistry, batch_size: int) -> BookingSweep:
    """Return the job that asks again for late answers, and calls a person where that did not help."""
    phases = {"late": repository.ANSWERS_LATE}
    return BookingSweep("booking-answers", database, registry, phases, Booking.miss_answer, batch_size)


def booking_quotes(database: Database, registry: CollectorRegistry, batch_size: int) -> BookingSweep:
    """Return the job that takes back quotes whose life is over."""
    phases = {"over": repository.QUOTES_OVER}
    return BookingSweep("booking-quotes", database, registry, phases, Booking.expire_quote, batch_size)
