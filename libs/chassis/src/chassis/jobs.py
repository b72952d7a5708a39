"""Declared jobs and the one driver that runs them.

A job is a function of one run; the driver owns time. Ticks stand on a fixed grid: a cycle never overlaps the next,
and a tick that falls into a running cycle is skipped and counted, not queued. Ticks that passed while no process ran
are counted as misfires; the job's policy says whether they are made up for by one run.

Runs are recorded and people's orders obeyed (`chassis.job_records`); neither can break a cycle: what can't be
recorded runs all the same, and while the orders can't be read the last ones read stand.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from datetime import time as clock_time
from typing import Final, Literal, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock
from chassis.db import DATABASE_ERRORS, Database
from chassis.ids import new_id
from chassis.job_records import SEEN_EVERY, Ending, JobRecords, Pause, Trigger, short_error
from chassis.runtime import Heartbeat, Stop
from chassis.tracing import working

LONGEST_BATCH: Final = 120.0
"""Seconds that a job may work on one batch before its loop counts as dead; while it waits it says so."""
LOOK_EVERY: Final = 2.0
"""Seconds between looks at what people have ordered, while a job rests."""

LONGEST_REST: Final = 30.0
PRUNE_EVERY: Final = 50
MOST_MISSED: Final = 10_000
Misfire = Literal["run_once", "skip"]
Answer = TypeVar("Answer")
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
        self._records = records
        self._pause: Pause | None = None
        self._cycles = 0

    async def run(self, stop: Stop) -> None:
        """Run a cycle on every tick until stopped; an interval's first tick is now, unless the job skips misfires."""
        missed, wait = await self._start()
        if isinstance(self.job.schedule, DailyAt):
            await self._run_daily(self.job.schedule, stop, missed=missed)
        else:
            await self._run_every(self.job.schedule.total_seconds(), stop, missed=missed, wait=wait)

    async def _start(self) -> tuple[bool, float]:
        """Count what was missed; return whether that is made up for, and else the seconds to an interval's next tick.

        Raises:
            sqlalchemy.exc.DBAPIError, OSError: the clock can't be read; the loop is started again.
        """
        if self._records is None:
            return False, 0.0
        last = await self._recorded(self._find_last_started)
        now = await self._now() if last else None
        if last is None or now is None:
            return False, 0.0
        missed = self.job.missed_since(last, now)
        if missed:
            self.job.metrics.misfires.inc(missed)
            log.warning("ticks missed", job=self.job.name, ticks=missed, last=last.isoformat(), policy=self.job.misfire)
        if self.job.misfire == "run_once":
            return missed > 0, 0.0
        if isinstance(self.job.schedule, DailyAt):
            return False, 0.0
        return False, (last + (missed + 1) * self.job.schedule - now).total_seconds()

    async def _run_every(self, interval: float, stop: Stop, *, missed: bool, wait: float) -> None:
        due = time.monotonic() + max(0.0, min(wait, interval))
        trigger: Trigger | None = "misfire" if missed else "schedule"
        if wait > 0:
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

    async def _run_daily(self, schedule: DailyAt, stop: Stop, *, missed: bool) -> None:
        last = datetime.min.replace(tzinfo=UTC)
        if missed and not stop.requested:
            await self._tick("misfire", stop)
        while not stop.requested:
            now = await self._now()
            tick = schedule.next_after(max(now, last))
            trigger = await self._rest_until(time.monotonic() + (tick - now).total_seconds(), stop)
            if not stop.requested:
                last = last if trigger else tick
                await self._tick(trigger or "schedule", stop)

    async def _rest_until(self, due: float, stop: Stop) -> Trigger | None:
        """Wait; return early with the trigger if a run is asked for, or must be made up for."""
        longest = LONGEST_REST if self._records is None else LOOK_EVERY
        while (rest := due - time.monotonic()) > 0:
            self.heartbeat.beat()
            if await stop.wait(min(rest, longest)):
                return None
            if trigger := await self._ordered():
                return trigger
        return None

    async def _ordered(self) -> Trigger | None:
        wanted, abandoned = await self._recorded(self._look) or (False, False)
        if wanted:
            return "manual"
        daily = isinstance(self.job.schedule, DailyAt) and self.job.misfire == "run_once"
        return "misfire" if abandoned and daily else None

    async def _tick(self, trigger: Trigger, stop: Stop) -> None:
        if trigger != "manual":
            await self._recorded(self._read_pause)
            if self._pause is not None:
                self.job.metrics.paused_ticks.inc()
                log.warning("tick of a paused job", job=self.job.name, by=self._pause.by, reason=self._pause.reason)
                return
        try:
            await self.run_once(stop, trigger)
        except Exception:
            log.exception("cycle failed", job=self.job.name)

    async def run_once(self, stop: Stop | None = None, trigger: Trigger = "cli") -> JobResult:
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
        run_id = new_id()
        with (
            structlog.contextvars.bound_contextvars(job=self.job.name, run_id=str(run_id)),
            working(self.job.name, run_id),
        ):
            try:
                as_of = await self._now()
                log.info("cycle started", as_of=as_of.isoformat(), trigger=trigger)
                run = Run(run_id, as_of, stop or Stop(), self.heartbeat.beat)
                result = await self._run_recorded(run, trigger)
            except Exception:
                metrics.errors.inc()
                raise
            finally:
                seconds = time.perf_counter() - started
                metrics.seconds.observe(seconds)
            log.info("cycle completed", duration_ms=round(seconds * 1000), **result.counts)
        return result

    async def _run_recorded(self, run: Run, trigger: Trigger) -> JobResult:
        """Run a cycle between the records of its begin and its end; their instants are reckoned from the cycle's."""
        started = time.perf_counter()

        def now() -> datetime:
            return run.as_of + timedelta(seconds=time.perf_counter() - started)

        await self._recorded(lambda records: self._begin(records, run, trigger))
        try:
            async with self._seen(run.id, now):
                result = await self.job.run(run)
        except Exception as failure:
            ending = Ending("failed", {}, short_error(failure))
            await self._recorded(lambda records: self._finish(records, run.id, now(), ending))
            raise
        ended = Ending("stopped" if run.stop.requested else "ok", result.counts)
        await self._recorded(lambda records: self._finish(records, run.id, now(), ended))
        return result

    @asynccontextmanager
    async def _seen(self, run_id: UUID, now: Callable[[], datetime]) -> AsyncIterator[None]:
        """Give signs of life while the block runs."""

        async def signal() -> None:
            while True:
                await asyncio.sleep(SEEN_EVERY)
                await self._recorded(lambda records: self._renew(records, run_id, now()))

        if self._records is None:
            yield
            return
        signalling = asyncio.create_task(signal())
        try:
            yield
        finally:
            signalling.cancel()
            await asyncio.wait([signalling])

    async def _recorded(self, act: Callable[[JobRecords], Awaitable[Answer]]) -> Answer | None:
        """Do something with the records; a database that refuses or is away costs the record and nothing else."""
        if self._records is None:
            return None
        try:
            return await act(self._records)
        except DATABASE_ERRORS as error:
            log.warning("job not recorded", job=self.job.name, reason=str(error)[:300])
            return None

    async def _find_last_started(self, records: JobRecords) -> datetime | None:
        async with self._database.write() as session:
            await self._close_abandoned(records, session)
            return await records.find_last_started(session, self.job.name)

    async def _read_pause(self, records: JobRecords) -> None:
        async with self._database.read() as session:
            self._pause = await records.find_pause(session, self.job.name)

    async def _look(self, records: JobRecords) -> tuple[bool, bool]:
        async with self._database.write() as session:
            wanted = await records.take_request(session, self.job.name)
            return wanted, await self._close_abandoned(records, session)

    async def _close_abandoned(self, records: JobRecords, session: AsyncSession) -> bool:
        abandoned = await records.abandon(session, self.job.name, await self._clock.now(session))
        if abandoned:
            log.error("run abandoned", job=self.job.name, runs=[str(run_id) for run_id in abandoned])
        return bool(abandoned)

    async def _begin(self, records: JobRecords, run: Run, trigger: Trigger) -> None:
        self._cycles += 1
        async with self._database.write() as session:
            await records.begin(session, run.id, self.job.name, trigger, run.as_of)
            if self._cycles % PRUNE_EVERY == 1:
                await records.prune(session, self.job.name)

    async def _renew(self, records: JobRecords, run_id: UUID, now: datetime) -> None:
        async with self._database.write() as session:
            await records.renew(session, run_id, now)

    async def _finish(self, records: JobRecords, run_id: UUID, now: datetime, ending: Ending) -> None:
        async with self._database.write() as session:
            await records.finish(session, run_id, now, ending)

    async def _now(self) -> datetime:
        async with self._database.read() as session:
            return await self._clock.now(session)
