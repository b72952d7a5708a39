"""Declared jobs and the one driver that runs them.

A job is a function of one run; the driver owns time. Ticks stand on a fixed grid: a cycle never overlaps the next,
and a tick that falls into a running cycle is skipped and counted, not queued.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from datetime import time as clock_time
from typing import Final
from uuid import UUID
from zoneinfo import ZoneInfo

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chassis.clock import Clock
from chassis.db import Database
from chassis.ids import new_id
from chassis.runtime import Heartbeat, Stop

LONGEST_BATCH: Final = 120.0
"""Seconds that a job may work on one batch before its loop counts as dead; while it waits it says so."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """One cycle of a job.

    Attributes:
        id: the run's id, the correlation id of what it writes.
        as_of: the cycle's instant; every comparison of the cycle uses this one.
        stop: asked for at shutdown; looked at between batches.
        beat: notes progress; called between batches.
    """

    id: UUID
    as_of: datetime
    stop: Stop
    beat: Callable[[], None]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a cycle did, for its log line and for who runs it by hand: names and numbers."""

    counts: dict[str, int]


class JobMetrics:
    """The metrics that every job exports under its own prefix.

    Args:
        prefix: e.g. `crm_timeline_overdue`.
        registry: where they are registered.
        phases: label values of `_items_total{phase}`; none for a job without phases.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry, phases: Sequence[str] = ()) -> None:
        self.runs = Counter(f"{prefix}_run_total", "Cycles, failed ones included.", registry=registry)
        self.seconds = Histogram(
            f"{prefix}_cycle_duration_seconds",
            "Duration of a cycle.",
            registry=registry,
            buckets=(0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 15, 30, 60, 300),
        )
        self.items = Counter(f"{prefix}_items_total", "Rows moved.", ["phase"] if phases else [], registry=registry)
        self.backlog = Gauge(f"{prefix}_backlog", "Rows due and not yet moved after the last cycle.", registry=registry)
        self.skip_locked = Counter(f"{prefix}_skip_locked_total", "Rows left to whoever holds them.", registry=registry)
        self.errors = Counter(f"{prefix}_errors_total", "Rows left out and cycles failed.", registry=registry)
        self.skipped_ticks = Counter(
            f"{prefix}_skipped_ticks_total", "Ticks that fell into a running cycle.", registry=registry
        )
        for phase in phases:
            self.items.labels(phase)


@dataclass(frozen=True, slots=True)
class DailyAt:
    """Once a day at a wall-clock time.

    Attributes:
        at: the time of day.
        zone: where the clock hangs; a time that a clock change skips or repeats is run once.
    """

    at: clock_time
    zone: ZoneInfo

    def next_after(self, instant: datetime) -> datetime:
        """Return the first tick after an instant (UTC)."""
        day = instant.astimezone(self.zone).date()
        while (tick := datetime.combine(day, self.at, self.zone).astimezone(UTC)) <= instant:
            day += timedelta(days=1)
        return tick


@dataclass(frozen=True, slots=True)
class Job:
    """A declared job.

    Attributes:
        name: kebab-case, unique in the service.
        schedule: time from tick to tick, or the time of day.
        run: one cycle; may raise, the next tick tries again.
        metrics: where the driver counts cycles.
    """

    name: str
    schedule: timedelta | DailyAt
    run: Callable[[Run], Awaitable[JobResult]]
    metrics: JobMetrics


class JobDriver:
    """Runs one job on its schedule, or once.

    Args:
        job: what to run.
        database: read for the clock only.
        clock: gives each cycle its `as_of`.
    """

    def __init__(self, job: Job, database: Database, clock: Clock) -> None:
        self.job = job
        self.name = f"job {job.name}"
        self.heartbeat = Heartbeat(longest_silence=LONGEST_BATCH)
        self._database = database
        self._clock = clock

    async def run(self, stop: Stop) -> None:
        """Run a cycle on every tick until stopped; an interval's first tick is now."""
        if isinstance(self.job.schedule, DailyAt):
            await self._run_daily(self.job.schedule, stop)
        else:
            await self._run_every(self.job.schedule.total_seconds(), stop)

    async def _run_every(self, interval: float, stop: Stop) -> None:
        due = time.monotonic()
        while not stop.requested:
            await self._run_counted(stop)
            missed = max(0, int((time.monotonic() - due) // interval))
            if missed:
                self.job.metrics.skipped_ticks.inc(missed)
                log.warning("ticks skipped", job=self.job.name, ticks=missed)
            due += interval * (missed + 1)
            await self._rest_until(due, stop)

    async def _run_daily(self, schedule: DailyAt, stop: Stop) -> None:
        last = datetime.min.replace(tzinfo=UTC)
        while not stop.requested:
            now = await self._now()
            tick = schedule.next_after(max(now, last))
            await self._rest_until(time.monotonic() + (tick - now).total_seconds(), stop)
            if not stop.requested:
                last = tick
                await self._run_counted(stop)

    async def _rest_until(self, due: float, stop: Stop) -> None:
        while (rest := due - time.monotonic()) > 0:
            self.heartbeat.beat()
            if await stop.wait(min(rest, 30.0)):
                return

    async def run_once(self, stop: Stop | None = None) -> JobResult:
        """Run one cycle.

        Returns:
            The cycle's counts.

        Raises:
            Exception: whatever the job raised; its open batch is rolled back.
        """
        metrics = self.job.metrics
        self.heartbeat.beat()
        metrics.runs.inc()
        started = time.perf_counter()
        run_id = new_id()
        with structlog.contextvars.bound_contextvars(job=self.job.name, run_id=str(run_id)):
            try:
                as_of = await self._now()
                log.info("cycle started", as_of=as_of.isoformat())
                result = await self.job.run(Run(run_id, as_of, stop or Stop(), self.heartbeat.beat))
            except Exception:
                metrics.errors.inc()
                raise
            finally:
                seconds = time.perf_counter() - started
                metrics.seconds.observe(seconds)
            log.info("cycle completed", duration_ms=round(seconds * 1000), **result.counts)
        return result

    async def _run_counted(self, stop: Stop) -> None:
        try:
            await self.run_once(stop)
        except Exception:
            log.exception("cycle failed", job=self.job.name)

    async def _now(self) -> datetime:
        async with self._database.read() as session:
            return await self._clock.now(session)
