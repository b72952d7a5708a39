"""Background loops: restarted with growing delays, stopped in good order, and seen when they are dead."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace

import asyncpg
import httpx
import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text

from chassis import runtime
from chassis.db import Database
from chassis.runtime import FIRST_RESTART_DELAY, HEALTHY_AFTER, LONGEST_RESTART_DELAY, Background, Heartbeat, Stop
from chassis.web import create_app

ADD = text("insert into crm.thing (id, rank) values (gen_random_uuid(), 1)")


class Script:
    """A loop that does what a test says."""

    def __init__(self, name: str, act: Callable[[Stop], Awaitable[None]], longest_silence: float = 60.0) -> None:
        self.name = name
        self.heartbeat = Heartbeat(longest_silence)
        self.starts = 0
        self._act = act

    async def run(self, stop: Stop) -> None:
        self.starts += 1
        await self._act(stop)


async def idle(stop: Stop) -> None:
    await stop.wait(3600)


def background(loops: Sequence[Script], grace: float = 5.0) -> Background:
    return Background(loops, CollectorRegistry(), grace)


class FakeTime:
    """Stands in for the module's clock and for waiting: delays are noted and take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.delays: list[float] = []
        monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: self.now))

        async def wait(stop: Stop, seconds: float) -> bool:
            self.delays.append(seconds)
            self.now += seconds
            await asyncio.sleep(0)
            return stop.requested

        monkeypatch.setattr(Stop, "wait", wait)


# --- restarts


async def test_a_loop_that_fails_is_started_again_after_growing_delays(monkeypatch: pytest.MonkeyPatch):
    fake = FakeTime(monkeypatch)

    async def fail(stop: Stop) -> None:
        if failing.starts == 9:
            stop.request()
        raise LookupError

    failing = Script("failing", fail)
    running = background([failing])
    running.start()
    await asyncio.gather(*running._tasks)
    assert fake.delays == [0.5, 1, 2, 4, 8, 15, 15, 15, 15]
    assert (FIRST_RESTART_DELAY, LONGEST_RESTART_DELAY) == (0.5, 15)
    assert running.registry.get_sample_value("pin_background_restarts_total", {"loop": "failing"}) == 9


async def test_the_delay_is_short_again_after_a_healthy_time(monkeypatch: pytest.MonkeyPatch):
    fake = FakeTime(monkeypatch)
    lifetimes = iter([0.0, 0.0, HEALTHY_AFTER + 1, 0.0, 0.0])

    async def fail(stop: Stop) -> None:
        lifetime = next(lifetimes, None)
        if lifetime is None:
            stop.request()
            return
        fake.now += lifetime
        raise LookupError

    running = background([Script("failing", fail)])
    running.start()
    await asyncio.gather(*running._tasks)
    assert fake.delays == [0.5, 1, 0.5, 1, 2]


async def test_a_loop_that_fails_takes_no_other_down(eventually: Callable):
    async def fail(_: Stop) -> None:
        raise LookupError

    steps: list[int] = []

    async def work(stop: Stop) -> None:
        while not await stop.wait(0.001):
            steps.append(1)

    failing, working = Script("failing", fail), Script("working", work)
    running = background([failing, working])
    running.start()
    await eventually(lambda: failing.starts >= 2)
    seen = len(steps)
    await eventually(lambda: len(steps) > seen)
    assert working.starts == 1
    await running.stop()


async def test_a_loop_that_ends_by_itself_or_is_cancelled_from_within_is_started_again(eventually: Callable):
    """Nothing but a stop ends a loop: one that returns early, or whose library cancels it, would be dead for ever."""

    async def return_early(_: Stop) -> None:
        return

    async def cancelled_inside(_: Stop) -> None:
        raise asyncio.CancelledError

    loops = [Script("early", return_early), Script("cancelled", cancelled_inside)]
    running = background(loops)
    running.start()
    await eventually(lambda: all(loop.starts >= 2 for loop in loops))
    await running.stop()
    for loop in loops:
        assert running.registry.get_sample_value("pin_background_restarts_total", {"loop": loop.name}) >= 1


async def test_every_loop_is_counted_from_zero():
    running = background([Script("one", idle), Script("two", idle)])
    running.start()
    for name in ("one", "two"):
        assert running.registry.get_sample_value("pin_background_restarts_total", {"loop": name}) == 0
    await running.stop()


# --- stopping


async def test_stop_waits_for_the_batch_in_hand(system: Database, admin: asyncpg.Connection):
    begun = asyncio.Event()

    async def work(stop: Stop) -> None:
        async with system.write() as session:
            await session.execute(ADD)
            begun.set()
            await stop.wait(3600)
            await session.execute(ADD)

    running = background([Script("working", work)])
    running.start()
    await begun.wait()
    await running.stop()
    assert await admin.fetchval("select count(*) from crm.thing") == 2


async def test_a_batch_that_outlasts_the_grace_is_cancelled_and_rolled_back_whole(
    system: Database, admin: asyncpg.Connection
):
    begun = asyncio.Event()

    async def work(_: Stop) -> None:
        async with system.write() as session:
            await session.execute(ADD)
            begun.set()
            await asyncio.Event().wait()

    running = background([Script("stubborn", work)], grace=0.05)
    running.start()
    await begun.wait()
    async with asyncio.timeout(5):
        await running.stop()
    assert await admin.fetchval("select count(*) from crm.thing") == 0
    assert all(task.done() for task in running._tasks)
    await system.ping()


async def test_a_loop_that_does_not_hear_its_cancellation_holds_the_process_up_for_seconds_only(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(runtime, "LAST_SECONDS", 0.05)
    begun, end = asyncio.Event(), asyncio.Event()

    async def deaf(_: Stop) -> None:
        begun.set()
        while not end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await end.wait()

    running = background([Script("deaf", deaf)], grace=0.01)
    running.start()
    await begun.wait()
    async with asyncio.timeout(5):
        await running.stop()
    end.set()
    await asyncio.wait(running._tasks)


async def test_stop_cuts_the_pause_before_a_restart_short():
    failed = asyncio.Event()

    async def fail(_: Stop) -> None:
        failed.set()
        raise LookupError

    running = background([Script("failing", fail)])
    running.start()
    await failed.wait()
    async with asyncio.timeout(0.4):
        await running.stop()


async def test_stopping_twice_or_before_the_start_is_harmless():
    await background([Script("idle", idle)]).stop()
    running = background([Script("idle", idle)])
    running.start()
    await running.stop()
    await running.stop()


async def test_a_stop_is_seen_by_who_waits_and_by_who_asks():
    stop = Stop()
    assert not await stop.wait(0)
    assert not await stop.wait(-5)
    waiting = asyncio.create_task(stop.wait(3600))
    stop.request()
    assert await waiting
    assert stop.requested
    assert await stop.wait(3600)


# --- life signs


async def test_liveness_names_the_loop_without_progress(monkeypatch: pytest.MonkeyPatch):
    now = 1000.0
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: now))
    loops = [Script("relay 0", idle, 60), Script("job moving", idle, 900)]
    running = background(loops)
    app = create_app(title="t", version="1", registry=running.registry, background=running)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        now += 60
        assert (await client.get("/health/live")).json() == {"status": "live"}
        now += 1
        answer = await client.get("/health/live")
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"] == "no progress: relay 0 for 61 s"
        now += 900
        assert (await client.get("/health/live")).json()["detail"] == (
            "no progress: job moving for 961 s, relay 0 for 961 s"
        )
        for loop in loops:
            loop.heartbeat.beat()
        assert (await client.get("/health/live")).status_code == 200
