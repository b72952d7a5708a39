"""Runs are recorded, orders obeyed, misfires made up for once; and none of it can break a cycle."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, time, timedelta
from time import monotonic
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import asyncpg
import orjson
import pytest
from prometheus_client import CollectorRegistry

from chassis import job_book, jobs
from chassis.clock import MovableClock
from chassis.db import Database
from chassis.ids import new_id
from chassis.job_book import Start
from chassis.job_records import JobRecords
from chassis.jobs import DailyAt, Job, JobDriver, JobMetrics, JobResult, Misfire, Run
from chassis.runtime import Stop

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
NIGHTLY = DailyAt(time(3), ZoneInfo("UTC"))
RECORDS = JobRecords("crm")
Admin = asyncpg.Connection


class Scene:
    """A job on the scratch database whose cycles a test can hold, with as many driver processes as it likes."""

    def __init__(self, database: Database, clock: MovableClock) -> None:
        self.database, self.clock = database, clock
        self.registry = CollectorRegistry()
        self.runs: list[Run] = []
        self.fails: BaseException | None = None
        self.held = asyncio.Event()
        self.held.set()
        self.metrics = JobMetrics("test_moving", self.registry)

    def driver(self, schedule: timedelta | DailyAt = timedelta(hours=1), misfire: Misfire = "run_once") -> JobDriver:
        job = Job("moving", schedule, self._cycle, self.metrics, misfire)
        return JobDriver(job, self.database, self.clock, JobRecords("crm"))

    async def _cycle(self, run: Run) -> JobResult:
        self.runs.append(run)
        await self.held.wait()
        if self.fails:
            raise self.fails
        return JobResult({"moved": len(self.runs)})

    def figure(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"test_moving_{name}")

    @asynccontextmanager
    async def running(self, *drivers: JobDriver) -> AsyncIterator[Stop]:
        stop = Stop()
        tasks = [asyncio.create_task(driver.run(stop)) for driver in drivers]
        try:
            yield stop
        finally:
            stop.request()
            self.held.set()
            async with asyncio.timeout(10):
                await asyncio.gather(*tasks)

    async def order(self, act: str, *values: Any) -> bool:
        async with self.database.write() as session:
            changed: bool = await getattr(RECORDS, act)(session, "moving", *values)
        return changed


@pytest.fixture
def scene(system: Database, clock: MovableClock, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(jobs, "LOOK_EVERY", 0.02)
    return Scene(system, clock)


async def rows(admin: Admin) -> list[dict[str, Any]]:
    found = await admin.fetch("select * from crm.job_run order by id")
    return [dict(row) | {"counts": orjson.loads(row["counts"])} for row in found]


async def past_run(admin: Admin, started: datetime, result: str | None = "ok", seen: datetime | None = None) -> UUID:
    """Add the record of an earlier run; its id sorts before those made now."""
    run_id = UUID(int=int(started.timestamp()))
    await admin.execute(
        "insert into crm.job_run (id, name, trigger, as_of, started_at, seen_at, finished_at, result, counts, process)"
        " values ($1, 'moving', 'schedule', $2::timestamptz, $2, $3,"
        " case when $4::text is not null then $2::timestamptz end, $4, '{}', 'elsewhere/1')",
        run_id,
        started,
        seen or started,
        result,
    )
    return run_id


# --- records


async def test_a_run_is_recorded_with_what_it_did(scene: Scene, admin: Admin) -> None:
    await scene.driver().run_once()
    (row,) = await rows(admin)
    assert (row["id"], row["name"], row["trigger"], row["result"]) == (scene.runs[0].id, "moving", "cli", "ok")
    assert (row["counts"], row["error"], row["as_of"], row["started_at"]) == ({"moved": 1}, None, NOW, NOW)
    assert NOW <= row["finished_at"] < NOW + timedelta(seconds=30)
    assert row["process"].rpartition("/")[2].isdigit()


async def test_a_cycle_that_dies_leaves_a_failed_run_without_the_rows_values(scene: Scene, admin: Admin) -> None:
    scene.fails = LookupError("no such thing\nDETAIL: Key (email)=(a@b.c)\0")
    with pytest.raises(LookupError):
        await scene.driver().run_once()
    (row,) = await rows(admin)
    assert (row["result"], row["error"], row["counts"]) == ("failed", "LookupError: no such thing", {})
    assert row["finished_at"] is not None


async def test_a_run_that_was_asked_to_stop_says_so(scene: Scene, admin: Admin) -> None:
    stop = Stop()
    stop.request()
    await scene.driver().run_once(stop)
    assert [row["result"] for row in await rows(admin)] == ["stopped"]


async def test_without_its_tables_a_job_runs_all_the_same(scene: Scene, admin: Admin, alter: Callable) -> None:
    await alter("alter table crm.job_run rename to job_run_away", "alter table crm.job_run_away rename to job_run")
    await alter(
        "alter table crm.job_control rename to control_away", "alter table crm.control_away rename to job_control"
    )
    assert (await scene.driver().run_once()).counts == {"moved": 1}
    async with scene.running(scene.driver(timedelta(milliseconds=20))):
        while len(scene.runs) < 4:
            await asyncio.sleep(0)
    assert scene.figure("errors_total") == 0


async def test_only_the_newest_runs_are_kept_and_deletes_are_bounded(
    scene: Scene, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chassis.job_records.MOST_DELETED", 3)
    for number in range(12):
        await past_run(admin, NOW - timedelta(hours=20 - number))
    for left in (9, 6, 5, 5):
        async with scene.database.write() as session:
            await RECORDS.prune(session, "moving", kept=5)
        assert await admin.fetchval("select count(*) from crm.job_run") == left
    assert await admin.fetchval("select min(started_at) from crm.job_run") == NOW - timedelta(hours=13)


async def test_a_driver_prunes_by_itself(scene: Scene, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chassis.job_records.JobRecords.prune.__defaults__", (3,))
    for number in range(5):
        await past_run(admin, NOW - timedelta(hours=20 - number))
    await scene.driver().run_once()
    assert await admin.fetchval("select count(*) from crm.job_run") == 3


# --- orders


async def test_a_paused_job_skips_its_ticks_and_counts_them_until_it_is_resumed(
    scene: Scene, admin: Admin, eventually: Callable
) -> None:
    assert await scene.order("pause", NOW, "op-1", "too loud")
    async with scene.running(scene.driver(timedelta(milliseconds=20))):
        await eventually(lambda: (scene.figure("paused_ticks_total") or 0) >= 3)
        assert scene.runs == []
        assert await scene.order("resume")
        await eventually(lambda: len(scene.runs) >= 2)
    assert {row["trigger"] for row in await rows(admin)} == {"schedule"}


async def test_a_pause_stands_while_the_orders_cannot_be_read(
    scene: Scene, alter: Callable, eventually: Callable
) -> None:
    await scene.order("pause", NOW, "op-1", "too loud")
    async with scene.running(scene.driver(timedelta(milliseconds=20))):
        await eventually(lambda: (scene.figure("paused_ticks_total") or 0) >= 1)
        await alter(
            "alter table crm.job_control rename to control_away", "alter table crm.control_away rename to job_control"
        )
        seen = scene.figure("paused_ticks_total") or 0
        await eventually(lambda: (scene.figure("paused_ticks_total") or 0) >= seen + 3)
    assert scene.runs == []


async def test_run_now_runs_once_though_three_processes_look(scene: Scene, admin: Admin, eventually: Callable) -> None:
    await past_run(admin, NOW - timedelta(minutes=1))
    drivers = [scene.driver(misfire="skip") for _ in range(3)]
    async with scene.running(*drivers):
        assert await scene.order("request_run", NOW, "op-1")
        await eventually(lambda: scene.figure("cycle_duration_seconds_count") == 1)
        assert await scene.order("request_run", NOW, "op-1")
        await eventually(lambda: scene.figure("cycle_duration_seconds_count") == 2)
    assert [row["trigger"] for row in await rows(admin)] == ["schedule", "manual", "manual"]


async def test_a_run_in_between_leaves_the_grid_as_it_is(scene: Scene, admin: Admin, eventually: Callable) -> None:
    async with scene.running(scene.driver(timedelta(seconds=1))):
        await eventually(lambda: len(scene.runs) == 1)
        await scene.order("request_run", NOW, "op-1")
        await eventually(lambda: len(scene.runs) >= 4)
    assert [row["trigger"] for row in await rows(admin)][:4] == ["schedule", "manual", "schedule", "schedule"]
    assert scene.figure("skipped_ticks_total") == 0


async def test_a_request_waits_for_a_driver_and_a_pause_drops_it(scene: Scene, admin: Admin) -> None:
    assert await scene.order("request_run", NOW, "op-1")
    assert not await scene.order("request_run", NOW, "op-2"), "one is asked for already"
    assert await scene.order("pause", NOW, "op-3", "no")
    assert not await scene.order("pause", NOW + timedelta(hours=1), "op-4", "again"), "the first pause stands"
    assert not await scene.order("request_run", NOW, "op-1"), "paused"
    assert not await scene.order("take_request")
    row = await admin.fetchrow("select * from crm.job_control")
    assert (row["paused_at"], row["paused_by"], row["pause_reason"]) == (NOW, "op-3", "no")
    assert await scene.order("resume")
    assert not await scene.order("resume")
    assert not await scene.order("take_request"), "the pause has dropped what was asked for"


# --- dead processes


async def test_a_run_of_a_killed_process_is_closed_by_whoever_looks_next(
    scene: Scene, admin: Admin, eventually: Callable
) -> None:
    dead = await past_run(admin, NOW - timedelta(minutes=10), None)
    alive = await past_run(admin, NOW - timedelta(minutes=5), None, seen=NOW - timedelta(seconds=30))
    async with scene.running(scene.driver()):
        await eventually(lambda: len(scene.runs) == 1)
        kept = {row["id"]: row for row in await rows(admin)}
        assert kept[dead]["result"] == "abandoned"
        assert "closed by" in kept[dead]["error"]
        assert kept[alive]["result"] is None
        scene.clock.advance(timedelta(minutes=2))

        async def closed() -> bool:
            return await admin.fetchval("select result from crm.job_run where id = $1", alive) == "abandoned"

        await eventually(closed)


async def test_a_long_cycle_gives_signs_of_life_and_is_not_taken_for_dead(
    scene: Scene, admin: Admin, eventually: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_book, "SEEN_EVERY", 0.02)
    scene.held.clear()
    running = asyncio.create_task(scene.driver().run_once())
    await eventually(lambda: scene.runs)

    async def renewed() -> bool:
        return bool(await admin.fetchval("select seen_at > started_at from crm.job_run"))

    await eventually(renewed)
    scene.held.set()
    await running
    assert [row["result"] for row in await rows(admin)] == ["ok"]


async def test_a_nightly_run_that_was_killed_is_done_again(scene: Scene, admin: Admin, eventually: Callable) -> None:
    started = NOW.replace(hour=3)
    await past_run(admin, started - timedelta(days=1))
    await past_run(admin, started, None, seen=NOW - timedelta(seconds=30))
    drivers = [scene.driver(NIGHTLY) for _ in range(3)]
    async with scene.running(*drivers):
        await eventually(lambda: all(driver.heartbeat.silence < 0.1 for driver in drivers))
        scene.clock.advance(timedelta(minutes=2))
        await eventually(lambda: scene.figure("cycle_duration_seconds_count") == 1)
    assert [(row["trigger"], row["result"]) for row in await rows(admin)] == [
        ("schedule", "ok"), ("schedule", "abandoned"), ("misfire", "ok"),
    ]  # fmt: skip


# --- misfires


async def test_after_two_hours_of_downtime_an_interval_job_runs_once_and_not_24_times(
    scene: Scene, admin: Admin, eventually: Callable
) -> None:
    await past_run(admin, NOW - timedelta(hours=2))
    async with scene.running(scene.driver(timedelta(minutes=5))):
        await eventually(lambda: scene.figure("cycle_duration_seconds_count") == 1)
    assert [row["trigger"] for row in await rows(admin)] == ["schedule", "misfire"]
    assert scene.figure("misfires_total") == 24


@pytest.mark.parametrize("schedule", [timedelta(minutes=5), NIGHTLY], ids=["interval", "nightly"])
async def test_processes_that_start_together_make_up_for_a_downtime_once(
    scene: Scene, admin: Admin, schedule: timedelta | DailyAt
) -> None:
    await past_run(admin, NOW - timedelta(days=2))
    starts = await asyncio.gather(*(scene.driver(schedule)._book.start() for _ in range(5)))
    assert sorted(start.claim is not None for start in starts) == [False] * 4 + [True]
    assert [row["trigger"] for row in await rows(admin)] == ["schedule", "misfire"]


async def test_ticks_that_fall_into_a_long_cycle_of_another_process_are_not_missed(scene: Scene, admin: Admin) -> None:
    await past_run(admin, NOW - timedelta(minutes=12), None, seen=NOW - timedelta(seconds=10))
    driver = scene.driver(timedelta(minutes=5))
    assert (await driver._book.start()).claim is None
    stop = Stop()
    stop.request()
    await driver.run(stop)
    assert scene.figure("misfires_total") == 0
    assert [row["trigger"] for row in await rows(admin)] == ["schedule"]


async def test_a_paused_job_makes_up_for_nothing(scene: Scene, admin: Admin) -> None:
    await past_run(admin, NOW - timedelta(days=2))
    await scene.order("pause", NOW, "op-1", "no")
    start = await scene.driver(NIGHTLY)._book.start()
    assert (start.missed, start.claim) == (2, None)


async def test_an_interval_job_that_skips_waits_for_its_next_tick(
    scene: Scene, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await past_run(admin, NOW - timedelta(hours=2, minutes=1))
    driver = scene.driver(timedelta(minutes=5), "skip")
    waits: list[float] = []

    async def rest(due: float, stop: Stop) -> None:
        waits.append(due - monotonic())
        stop.request()

    monkeypatch.setattr(driver, "_rest_until", rest)
    await driver.run(Stop())
    assert waits == [pytest.approx(240, abs=5)]
    assert scene.figure("misfires_total") == 24
    assert scene.runs == []


async def test_a_first_start_misses_nothing(scene: Scene, eventually: Callable) -> None:
    assert await scene.driver(NIGHTLY)._book.start() == Start()
    async with scene.running(scene.driver(misfire="skip")):
        await eventually(lambda: len(scene.runs) == 1)
    assert scene.figure("misfires_total") == 0


@pytest.mark.parametrize(
    ("last", "misfire", "runs", "missed"),
    [
        (NOW - timedelta(days=1), "run_once", 1, 1),
        (NOW - timedelta(days=3), "run_once", 1, 3),
        (NOW - timedelta(days=3), "skip", 0, 3),
        (NOW.replace(hour=3), "run_once", 0, 0),
        (NOW.replace(hour=4), "run_once", 0, 0),
    ],
    ids=["yesterday", "three nights", "three nights, skipped", "this night", "this night, late"],
)
async def test_a_nightly_job_that_was_missed_runs_once_at_start_if_its_policy_says_so(
    scene: Scene, admin: Admin, eventually: Callable, last: datetime, misfire: Misfire, runs: int, missed: int
) -> None:
    await past_run(admin, last)
    async with scene.running(scene.driver(NIGHTLY, misfire)):
        await eventually(lambda: scene.figure("misfires_total") == missed)
        await eventually(lambda: scene.figure("cycle_duration_seconds_count") == runs)
    assert len(scene.runs) == runs
    assert [row["trigger"] for row in await rows(admin)][1:] == ["misfire"] * runs


async def test_a_failed_night_is_not_repeated_before_the_next(scene: Scene, admin: Admin) -> None:
    await past_run(admin, NOW.replace(hour=3), "failed")
    start = await scene.driver(NIGHTLY)._book.start()
    assert (start.missed, start.claim) == (0, None)


def test_run_ids_order_runs_by_their_start() -> None:
    ids = [new_id() for _ in range(100)]
    assert ids == sorted(ids)
