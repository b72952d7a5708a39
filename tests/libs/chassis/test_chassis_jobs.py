"""The driver of jobs: a fixed grid of ticks, no overlap, skipped ticks counted, and a failure that stops nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

import pytest
import structlog
from prometheus_client import CollectorRegistry

from chassis import jobs, runtime
from chassis.clock import DatabaseClock, MovableClock
from chassis.db import Database
from chassis.jobs import Job, JobDriver, JobMetrics, JobResult, Run
from chassis.runtime import Stop
from chassis.testing.plugin import DatabaseTemplates

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)


class Monotonic:
    """The monotonic clock of a test: it moves when somebody waits, or when a cycle says how long it took."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.stop = FakeStop(self)

    def __call__(self) -> float:
        return self.now


class FakeStop(Stop):
    """Waiting moves the clock instead of taking time; asks for a stop when the clock has passed `until`."""

    def __init__(self, clock: Monotonic) -> None:
        super().__init__()
        self._clock = clock
        self.until = float("inf")
        self.waits: list[float] = []

    async def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self._clock.now += seconds
        if self._clock.now >= self.until:
            self.request()
        await asyncio.sleep(0)
        return self.requested


@pytest.fixture
def monotonic(monkeypatch: pytest.MonkeyPatch) -> Monotonic:
    clock = Monotonic()
    fake = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
    monkeypatch.setattr(jobs, "time", fake)
    monkeypatch.setattr(runtime, "time", fake)
    return clock


class Scene:
    """A job whose cycles do what a test says."""

    def __init__(self, database: Database, clock: MovableClock, interval: float = 60.0) -> None:
        self.registry = CollectorRegistry()
        self.runs: list[Run] = []
        self.act: Callable[[Run], Awaitable[None]] = self._nothing
        self.job = Job("moving", timedelta(seconds=interval), self._cycle, JobMetrics("test_moving", self.registry))
        self.driver = JobDriver(self.job, database, clock)

    async def _nothing(self, _: Run) -> None:
        return

    async def _cycle(self, run: Run) -> JobResult:
        self.runs.append(run)
        await self.act(run)
        return JobResult({"moved": len(self.runs)})

    def figure(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"test_moving_{name}")


@pytest.fixture
def somewhere(databases: DatabaseTemplates, opened: Callable[..., Database]) -> Database:
    """The driver asks a database for its clock and for nothing else."""
    return opened(databases.server.url())


@pytest.fixture
def scene(somewhere: Database, clock: MovableClock) -> Scene:
    return Scene(somewhere, clock)


# --- one cycle


async def test_a_cycle_has_an_id_and_one_instant(scene: Scene, clock: MovableClock):
    first = await scene.driver.run_once()
    clock.advance(timedelta(hours=1))
    await scene.driver.run_once()
    assert first.counts == {"moved": 1}
    assert [run.as_of for run in scene.runs] == [NOW, NOW + timedelta(hours=1)]
    assert [run.id.version for run in scene.runs] == [7, 7]
    assert scene.runs[0].id < scene.runs[1].id
    assert not scene.runs[0].stop.requested


async def test_production_takes_the_instant_from_the_database(scene: Scene):
    scene.driver._clock = DatabaseClock()
    before = datetime.now(UTC)
    await scene.driver.run_once()
    assert scene.runs[0].as_of.tzinfo is UTC
    assert abs((scene.runs[0].as_of - before).total_seconds()) < 30


async def test_a_cycles_log_lines_carry_job_and_run_id(scene: Scene):
    lines: list[dict[str, object]] = []

    def keep(_: object, __: str, event: dict[str, object]) -> str:
        lines.append(event)
        raise structlog.DropEvent

    async def say(_: Run) -> None:
        structlog.get_logger("elsewhere").info("said")

    scene.act = say
    before = structlog.get_config()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep])
    try:
        await scene.driver.run_once()
    finally:
        structlog.configure(**before)
    assert [line["event"] for line in lines] == ["cycle started", "said", "cycle completed"]
    assert {(line["job"], line["run_id"]) for line in lines} == {("moving", str(scene.runs[0].id))}
    assert UUID(str(lines[0]["run_id"]))
    assert lines[-1]["moved"] == 1


async def test_every_cycle_is_counted_and_a_failed_one_as_an_error(scene: Scene):
    await scene.driver.run_once()

    async def fail(_: Run) -> None:
        raise LookupError

    scene.act = fail
    with pytest.raises(LookupError):
        await scene.driver.run_once()
    assert scene.figure("run_total") == 2
    assert scene.figure("errors_total") == 1
    assert scene.figure("cycle_duration_seconds_count") == 2
    assert scene.figure("skipped_ticks_total") == 0


async def test_a_cycle_that_cannot_read_the_clock_is_an_error_too(opened: Callable[..., Database], clock: MovableClock):
    scene = Scene(opened("postgresql://nobody@127.0.0.1:1/none"), clock)
    with pytest.raises(OSError, match="Connect"):
        await scene.driver.run_once()
    assert scene.runs == []
    assert scene.figure("errors_total") == 1


def test_the_metrics_have_the_names_of_their_job():
    registry = CollectorRegistry()
    metrics = JobMetrics("crm_timeline_overdue", registry)
    for counter in (metrics.runs, metrics.items, metrics.skip_locked, metrics.errors, metrics.skipped_ticks):
        counter.inc()
    metrics.seconds.observe(1)
    metrics.backlog.set(1)
    for name in ("run", "items", "skip_locked", "errors", "skipped_ticks"):
        assert registry.get_sample_value(f"crm_timeline_overdue_{name}_total") == 1
    assert registry.get_sample_value("crm_timeline_overdue_cycle_duration_seconds_count") == 1
    assert registry.get_sample_value("crm_timeline_overdue_backlog") == 1


def test_a_job_with_phases_shows_each_from_the_start():
    registry = CollectorRegistry()
    JobMetrics("hold", registry, phases=["reserved", "booked"])
    for phase in ("reserved", "booked"):
        assert registry.get_sample_value("hold_items_total", {"phase": phase}) == 0


# --- the grid


async def test_the_first_cycle_runs_at_once_and_the_next_on_the_grid(scene: Scene, monotonic: Monotonic):
    started: list[float] = []

    async def take_ten_seconds(_: Run) -> None:
        started.append(monotonic.now)
        monotonic.now += 10

    scene.act = take_ten_seconds
    monotonic.stop.until = 1000 + 4 * 60 - 1
    await scene.driver.run(monotonic.stop)
    assert started == [1000, 1060, 1120, 1180]
    assert scene.figure("skipped_ticks_total") == 0


async def test_ticks_that_fall_into_a_running_cycle_are_skipped_and_counted(scene: Scene, monotonic: Monotonic):
    started: list[float] = []
    lengths = iter([10, 150, 60, 10, 10])

    async def take_a_while(_: Run) -> None:
        started.append(monotonic.now)
        monotonic.now += next(lengths)

    scene.act = take_a_while
    monotonic.stop.until = 1000 + 7 * 60 - 1
    await scene.driver.run(monotonic.stop)
    assert started == [1000, 1060, 1240, 1360]
    assert scene.figure("skipped_ticks_total") == 3


async def test_after_a_long_stall_one_cycle_runs_and_not_all_that_were_missed(scene: Scene, monotonic: Monotonic):
    stalls = iter([7200.0])

    async def stall(_: Run) -> None:
        monotonic.now += next(stalls, 1.0)

    scene.act = stall
    monotonic.stop.until = 1000 + 7200 + 3 * 60 - 1
    await scene.driver.run(monotonic.stop)
    assert len(scene.runs) == 3
    assert scene.figure("skipped_ticks_total") == 120


async def test_cycles_never_overlap(scene: Scene, monotonic: Monotonic):
    running = 0

    async def alone(_: Run) -> None:
        nonlocal running
        running += 1
        assert running == 1
        monotonic.now += 200
        await asyncio.sleep(0)
        running -= 1

    scene.act = alone
    monotonic.stop.until = 1000 + 2000
    await scene.driver.run(monotonic.stop)
    assert len(scene.runs) > 5
    assert scene.figure("errors_total") == 0


async def test_a_job_that_raises_is_tried_again_on_the_next_tick(scene: Scene, monotonic: Monotonic):
    async def fail(run: Run) -> None:
        if len(scene.runs) < 3:
            raise LookupError(run.id)

    scene.act = fail
    monotonic.stop.until = 1000 + 4 * 60 - 1
    await scene.driver.run(monotonic.stop)
    assert len(scene.runs) == 4
    assert scene.figure("errors_total") == 2


async def test_the_driver_beats_at_least_every_half_minute_while_it_waits(
    somewhere: Database, clock: MovableClock, monotonic: Monotonic
):
    scene = Scene(somewhere, clock, interval=3600)
    monotonic.stop.until = 1000 + 3600 - 1
    await scene.driver.run(monotonic.stop)
    assert max(monotonic.stop.waits) <= 30
    assert sum(monotonic.stop.waits) == pytest.approx(3600)
    assert scene.driver.heartbeat.silence <= 30


async def test_a_cycle_beats_when_it_says_so(scene: Scene, monotonic: Monotonic):
    silences: list[float] = []

    async def work(run: Run) -> None:
        monotonic.now += 100
        silences.append(scene.driver.heartbeat.silence)
        run.beat()
        silences.append(scene.driver.heartbeat.silence)

    scene.act = work
    await scene.driver.run_once()
    assert silences == [100, 0]


async def test_a_cycle_that_hangs_is_seen_as_dead(scene: Scene, monotonic: Monotonic):
    async def hang(_: Run) -> None:
        monotonic.now += 181
        assert not scene.driver.heartbeat.alive

    scene.act = hang
    await scene.driver.run_once()
    assert scene.figure("errors_total") == 0


# --- stopping


async def test_a_stop_lets_the_running_cycle_finish_and_starts_no_other(scene: Scene, monotonic: Monotonic):
    async def stop_in_the_middle(run: Run) -> None:
        monotonic.stop.request()
        assert run.stop.requested
        await asyncio.sleep(0)

    scene.act = stop_in_the_middle
    await scene.driver.run(monotonic.stop)
    assert len(scene.runs) == 1
    assert scene.figure("errors_total") == 0


async def test_a_stop_wakes_a_driver_that_waits_for_its_tick(scene: Scene, eventually: Callable):
    stop = Stop()
    running = asyncio.create_task(scene.driver.run(stop))
    await eventually(lambda: scene.figure("cycle_duration_seconds_count") == 1)
    stop.request()
    async with asyncio.timeout(5):
        await running
    assert len(scene.runs) == 1
