"""Declared jobs and the one driver that runs them.

A job is a function of one run; the driver owns time. Ticks stand on a fixed grid: a cycle never overlaps the next,
and a tick that falls into a running cycle is skipped and counted, not queued. Ticks that passed while no process ran
are counted as misfires; the job's policy says whether they are made up for by one run.

Runs are recorded and people's orders obeyed (`chassis.job_book`); neither can break a cycle: what can't be recorded
runs all the same, and while the orders can't be read the last ones read stand.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from datetime import time as clock_time
from typing import Final, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chassis.clock import Clock
from chassis.db import Database
from chassis.ids import new_id
from chassis.job_book import Claim, JobBook, Start
from chassis.job_records import Ending, JobRecords, Trigger
from chassis.runtime import Heartbeat, Stop
from chassis.tracing import working

LONGEST_BATCH: Final = 120.0
"""Seconds that a job may work on one batch before its loop counts as dead; while it waits it says so."""
LOOK_EVERY: Final = 2.0
"""Seconds between looks at what people have ordered, while a job rests."""

LONGEST_REST: Final = 30.0
MOST_MISSED: Final = 10_000
Misfire = Literal["run_once", "skip"]
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
        self.misfires = Counter(f"{prefix}_misfires_total", "Ticks that passed with no process.", registry=registry)
        self.paused_ticks = Counter(f"{prefix}_paused_ticks_total", "Ticks of a paused job.", registry=registry)
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

    def missed_between(self, last: datetime, instant: datetime) -> int:
        """Return how many ticks lie after one instant and not after another."""
        missed, tick = 0, self.next_after(last)
        while tick <= instant and missed < MOST_MISSED:
            missed, tick = missed + 1, self.next_after(tick)
        return missed


@dataclass(frozen=True, slots=True)
class Job:
    """A declared job.

    Attributes:
        name: kebab-case, unique in the service.
        schedule: time from tick to tick, or the time of day.
        run: one cycle; may raise, the next tick tries again.
        metrics: where the driver counts cycles.
        misfire: what becomes of ticks that passed while no process ran: one run at start, however many they are, or
            none (`skip`: the job waits for its next tick).
    """

    name: str
    schedule: timedelta | DailyAt
    run: Callable[[Run], Awaitable[JobResult]]
    metrics: JobMetrics
    misfire: Misfire = "run_once"

    def next_after(self, last: datetime | None, now: datetime) -> datetime:
        """Return the tick that follows, given when the last run began."""
        if isinstance(self.schedule, DailyAt):
            return self.schedule.next_after(now)
        return now if last is None else last + self.schedule

    def missed_since(self, last: datetime | None, now: datetime) -> int:
        """Return how many ticks have passed since the last run began."""
        if last is None or last >= now:
            return 0
        if isinstance(self.schedule, DailyAt):
            return self.schedule.missed_between(last, now)
        return (now - last) // self.schedule


class JobDriver:
    """Runs one job on its schedule, when somebody asks for it, or once.

    Args:
        job: what to run.
        database: for the clock and the records.
        clock: gives each cycle its `as_of`.
        records: where runs are recorded and orders read; None: nowhere, and nobody can pause the job.
    """

    def __init__(self, job: Job, database: Database, clock: Clock, records: JobRecords | None = None) -> None:
        self.job = job
        self.name = f"job {job.name}"
        self.heartbeat = Heartbeat(longest_silence=LONGEST_BATCH)
        self._database = database
        self._clock = clock
        self._book = JobBook(job.name, database, clock, records, job.missed_since, makes_up=job.misfire == "run_once")

    async def run(self, stop: Stop) -> None:
        """Run a cycle on every tick until stopped; an interval's first tick is now, unless the job skips misfires."""
        start = await self._book.start()
        if start.missed and not start.running:
            self.job.metrics.misfires.inc(start.missed)
            log.warning("ticks missed", job=self.job.name, ticks=start.missed, policy=self.job.misfire)
        if isinstance(self.job.schedule, DailyAt):
            await self._run_daily(self.job.schedule, start, stop)
        else:
            await self._run_every(self.job.schedule.total_seconds(), start, stop)

    async def _run_every(self, interval: float, start: Start, stop: Stop) -> None:
        due = time.monotonic()
        trigger: Trigger | Claim | None = start.claim
        if self.job.misfire == "skip" and start.since:
            due += max(0.0, (start.missed + 1) * interval - start.since)
            trigger = await self._rest_until(due, stop)
        while not stop.requested:
            await self._tick(trigger or "schedule", stop)
            if trigger != "manual":
                due = self._next_due(due, interval)
            trigger = await self._rest_until(due, stop)

    def _next_due(self, due: float, interval: float) -> float:
        missed = max(0, int((time.monotonic() - due) // interval))
        if missed:
            self.job.metrics.skipped_ticks.inc(missed)
            log.warning("ticks skipped", job=self.job.name, ticks=missed)
        return due + interval * (missed + 1)

    async def _run_daily(self, schedule: DailyAt, start: Start, stop: Stop) -> None:
        last = datetime.min.replace(tzinfo=UTC)
        if start.claim is not None:
            await self._tick(start.claim, stop)
        while not stop.requested:
            now = await self._now()
            tick = schedule.next_after(max(now, last))
            trigger = await self._rest_until(time.monotonic() + (tick - now).total_seconds(), stop)
            if not stop.requested:
                last = last if trigger else tick
                await self._tick(trigger or "schedule", stop)

    async def _rest_until(self, due: float, stop: Stop) -> Trigger | Claim | None:
        """Wait; return early if a run is asked for, or must be made up for."""
        longest = LOOK_EVERY if self._book.is_kept else LONGEST_REST
        while (rest := due - time.monotonic()) > 0:
            self.heartbeat.beat()
            if await stop.wait(min(rest, longest)):
                return None
            if trigger := await self._book.look():
                return trigger
        return None

    async def _tick(self, trigger: Trigger | Claim, stop: Stop) -> None:
        pause = await self._book.find_pause() if trigger == "schedule" else None
        if pause is not None:
            self.job.metrics.paused_ticks.inc()
            log.warning("tick of a paused job", job=self.job.name, by=pause.by, reason=pause.reason)
            return
        try:
            await self.run_once(stop, trigger)
        except Exception:
            log.exception("cycle failed", job=self.job.name)

    async def run_once(self, stop: Stop | None = None, trigger: Trigger | Claim = "cli") -> JobResult:
        """Run one cycle, paused or not.

        Returns:
            The cycle's counts.

        Raises:
            Exception: whatever the job raised; its open batch is rolled back.
        """
        metrics = self.job.metrics
        self.heartbeat.beat()
        metrics.runs.inc()
        started = time.perf_counter()
        run_id = trigger.run_id if isinstance(trigger, Claim) else new_id()
        with (
            structlog.contextvars.bound_contextvars(job=self.job.name, run_id=str(run_id)),
            working(self.job.name, run_id),
        ):
            try:
                as_of = trigger.as_of if isinstance(trigger, Claim) else await self._now()
                log.info("cycle started", as_of=as_of.isoformat())
                result = await self._cycle(Run(run_id, as_of, stop or Stop(), self.heartbeat.beat), trigger)
            except Exception:
                metrics.errors.inc()
                raise
            finally:
                seconds = time.perf_counter() - started
                metrics.seconds.observe(seconds)
            log.info("cycle completed", duration_ms=round(seconds * 1000), **result.counts)
        return result

    async def _cycle(self, run: Run, trigger: Trigger | Claim) -> JobResult:
        async with self._book.recording(run.id, run.as_of, trigger) as page:
            result = await self.job.run(run)
            page.ending = Ending("stopped" if run.stop.requested else "ok", result.counts)
        return result

    async def _now(self) -> datetime:
        async with self._database.read() as session:
            return await self._clock.now(session)
