"""Parked keys: drained in order, never overtaken by live records, bounded, and let go with their last record."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta

import asyncpg
import pytest
from consumer_world import Desk, Note, Tape, handling_of, letters, notes_consumer, written

from chassis.clock import MovableClock
from chassis.consumers import Consumer, Handler, ParkedKeysLoop, Refused, SourceUnavailable, parking, store
from chassis.consumers.batches import Batches, Waiting
from chassis.consumers.handling import Handling
from chassis.db import Database
from chassis.messaging import Place
from chassis.runtime import Stop

TOPIC = "pin.test.notes.v1"
Connection = asyncpg.Connection


def fail() -> None:
    raise RuntimeError("no")


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def tape() -> Tape:
    return Tape(TOPIC)


@pytest.fixture
def handling(system: Database, desk: Desk, clock: MovableClock) -> Handling:
    return handling_of(system, notes_consumer(TOPIC, desk), clock)


@pytest.fixture
def batches(handling: Handling) -> Batches:
    return Batches(handling, pauses=(0.01,))


@pytest.fixture
def loop(handling: Handling) -> ParkedKeysLoop:
    return ParkedKeysLoop(handling)


@pytest.fixture
async def park(batches: Batches, desk: Desk, tape: Tape) -> Callable[..., Awaitable[None]]:
    """Parks the key `k` behind number 1, with more numbers behind it."""

    async def parked(*behind: int) -> None:
        desk.moods[1] = fail
        for number in (1, *behind):
            tape.note("k", number)
        assert not (await batches.take(tape.records, Stop())).behind

    return parked


async def drain(loop: ParkedKeysLoop) -> int:
    """Drain what is due; return how many records were tried."""
    tried = 0
    while await loop.drain_one():
        tried += 1
    return tried


async def parked_keys(admin: Connection) -> int:
    return await admin.fetchval("select count(*) from crm.parked_key")


@pytest.mark.req("EVT-117", "EVT-105")
async def test_a_key_is_drained_in_order_once_its_culprit_is_well(
    park: Callable, loop: ParkedKeysLoop, desk: Desk, clock: MovableClock, system: Database, admin: Connection
) -> None:
    await park(2, 3)
    assert await drain(loop) == 0  # not before it is due
    clock.advance(timedelta(seconds=11))
    desk.moods.clear()
    desk.calls.clear()
    assert await drain(loop) == 3
    assert desk.calls == [1, 2, 3]
    assert await written(system) == [("k", 1), ("k", 2), ("k", 3)]
    assert await letters(system, "resolution") == [("handled",)] * 3
    assert await parked_keys(admin) == 0


async def test_the_pauses_of_a_key_grow_to_half_an_hour_and_begin_anew_with_its_next_culprit(
    park: Callable, loop: ParkedKeysLoop, desk: Desk, clock: MovableClock, admin: Connection, system: Database
) -> None:
    await park(2)
    clock.advance(timedelta(seconds=11))
    waits = []
    for _ in range(10):
        assert await drain(loop) == 1
        due = await admin.fetchval("select next_attempt_at from crm.parked_key")
        waits.append((due - clock.instant).total_seconds())
        clock.move_to(due)
    assert waits[:3] == [20, 40, 80]
    assert waits[-1] == 1800
    desk.moods = {2: fail}
    assert await drain(loop) == 2
    due = await admin.fetchval("select next_attempt_at from crm.parked_key")
    assert due - clock.instant == timedelta(seconds=20)
    assert await letters(system) == [("exhausted", ""), ("exhausted", "")]
    assert await admin.fetchval("select count(*) from crm.outbox where type = 'message.quarantined'") == 2


@pytest.mark.req("EVT-105")
@pytest.mark.parametrize("kind", ["refused", "quarantine"])
async def test_what_turns_out_refused_or_unreadable_while_draining_lets_its_key_go(
    kind: str,
    park: Callable,
    loop: ParkedKeysLoop,
    desk: Desk,
    clock: MovableClock,
    system: Database,
    admin: Connection,
    batches: Batches,
    tape: Tape,
) -> None:
    await park(2, 3)

    def refuse() -> None:
        raise Refused("HOLD_MISMATCH", "no")

    desk.moods = {2: refuse}
    if kind == "quarantine":
        await admin.execute("update crm.dead_letter set value = 'x' where record_offset = 1")
    clock.advance(timedelta(seconds=11))
    await drain(loop)
    assert await written(system) == [("k", 1), ("k", 3)]
    assert [d for d, _ in await letters(system)] == ["exhausted", kind, "parked"]
    assert await parked_keys(admin) == 0
    events = await admin.fetch(
        "select convert_from(payload, 'utf8')::jsonb ->> 'disposition' from crm.outbox order by id"
    )
    assert [event[0] for event in events] == ["exhausted", kind]
    desk.calls.clear()
    if kind == "refused":  # reading the record again doesn't ask again
        await batches.take(tape.records, Stop())
        assert desk.calls == []


async def test_a_source_that_is_away_and_a_slow_handler_while_draining(
    park: Callable,
    loop: ParkedKeysLoop,
    desk: Desk,
    clock: MovableClock,
    system: Database,
    admin: Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await park(2)
    clock.advance(timedelta(seconds=11))

    def away() -> None:
        raise SourceUnavailable("directory")

    desk.moods = {1: away}
    with pytest.raises(Waiting):
        await loop.drain_one()
    assert await admin.fetchval("select attempts from crm.parked_key") == 0
    monkeypatch.setattr(parking, "RECORD_SECONDS", 0.1)
    desk.moods = {1: lambda: asyncio.Event().wait()}
    assert await asyncio.wait_for(loop.drain_one(), 5)
    assert await letters(system, "error_class, attempts") == [("HandlerTooSlow", 6), ("", 0)]


async def test_a_discarded_letter_is_passed_over_and_an_empty_key_let_go(
    park: Callable, loop: ParkedKeysLoop, desk: Desk, clock: MovableClock, system: Database, admin: Connection
) -> None:
    await park(2)
    await admin.execute("update crm.dead_letter set resolved_at = $1, resolution = 'discarded'", clock.instant)
    clock.advance(timedelta(seconds=11))
    desk.calls.clear()
    await drain(loop)
    assert desk.calls == []
    assert await parked_keys(admin) == 0


async def waits_for_a_lock(admin: Connection) -> bool:
    return await admin.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    )


@pytest.mark.req("EVT-033", "EVT-039")
class TestLiveAndDrain:
    async def test_a_live_batch_waits_for_the_drain_of_the_last_record_and_then_handles_its_own(
        self,
        park: Callable,
        loop: ParkedKeysLoop,
        batches: Batches,
        desk: Desk,
        tape: Tape,
        clock: MovableClock,
        system: Database,
        admin: Connection,
        eventually: Callable,
    ) -> None:
        await park()
        clock.advance(timedelta(seconds=11))
        go = asyncio.Event()
        desk.moods[1] = go.wait
        desk.calls.clear()
        draining = asyncio.create_task(loop.drain_one())
        await eventually(lambda: desk.calls == [1])
        tape.note("k", 2)
        live = asyncio.create_task(batches.take(tape.records[1:], Stop()))
        await eventually(lambda: waits_for_a_lock(admin))
        assert desk.calls == [1]
        go.set()
        await asyncio.gather(draining, live)
        assert await written(system) == [("k", 1), ("k", 2)]
        assert await parked_keys(admin) == 0

    async def test_a_live_batch_that_waited_for_a_failing_drain_puts_its_own_behind(
        self,
        park: Callable,
        loop: ParkedKeysLoop,
        batches: Batches,
        desk: Desk,
        tape: Tape,
        clock: MovableClock,
        system: Database,
        admin: Connection,
        eventually: Callable,
    ) -> None:
        await park()
        clock.advance(timedelta(seconds=11))
        go = asyncio.Event()

        async def fail_later() -> None:
            await go.wait()
            fail()

        desk.moods[1] = fail_later
        desk.calls.clear()
        draining = asyncio.create_task(loop.drain_one())
        await eventually(lambda: desk.calls == [1])
        tape.note("k", 2)
        live = asyncio.create_task(batches.take(tape.records[1:], Stop()))
        await eventually(lambda: waits_for_a_lock(admin))
        go.set()
        await asyncio.gather(draining, live)
        assert [kept for kept, _ in await letters(system)] == ["exhausted", "parked"]
        assert await written(system) == []

    async def test_a_drain_leaves_alone_a_key_that_a_live_batch_adds_to(
        self,
        park: Callable,
        loop: ParkedKeysLoop,
        batches: Batches,
        desk: Desk,
        tape: Tape,
        clock: MovableClock,
        system: Database,
        eventually: Callable,
    ) -> None:
        await park()
        clock.advance(timedelta(seconds=11))
        go = asyncio.Event()
        desk.moods = {9: go.wait}
        desk.calls.clear()
        tape.note("k", 2)
        tape.note("other", 9)
        live = asyncio.create_task(batches.take(tape.records[1:], Stop()))
        await eventually(lambda: desk.calls == [9])
        assert not await loop.drain_one()
        go.set()
        await live
        await drain(loop)
        assert [rank for key, rank in await written(system) if key == "k"] == [1, 2]

    async def test_under_load_nothing_overtakes_and_nothing_is_lost(
        self,
        loop: ParkedKeysLoop,
        batches: Batches,
        desk: Desk,
        tape: Tape,
        clock: MovableClock,
        system: Database,
        admin: Connection,
    ) -> None:
        """Every seventh record fails some times: keys are parked, drained and added to at the same time."""
        count, left = 120, dict[int, int]()

        def sometimes(number: int) -> Callable[[], None]:
            left[number] = 7

            def mood() -> None:
                left[number] -= 1
                if left[number] >= 0:
                    fail()

            return mood

        desk.moods = {number: sometimes(number) for number in range(0, count, 7)}
        for number in range(count):
            tape.note(f"key {number % 4}", number)
        done = asyncio.Event()

        async def live() -> None:
            for start in range(0, count, 12):
                assert not (await batches.take(tape.records[start : start + 12], Stop())).behind
            done.set()

        async def drains(one: ParkedKeysLoop) -> None:
            while not done.is_set() or await parked_keys_of(system):
                clock.advance(timedelta(minutes=40))
                if not await one.drain_one():
                    await asyncio.sleep(0)

        second = ParkedKeysLoop(batches._handling)
        async with asyncio.timeout(60):
            await asyncio.gather(live(), drains(loop), drains(second))
        assert sorted(rank for _, rank in await written(system)) == list(range(count))
        for key in range(4):
            calls = [number for number in desk.calls if number % 4 == key]
            final = [n for i, n in enumerate(calls) if n not in calls[i + 1 :]]
            assert final == sorted(final)
        assert not await admin.fetchval("select count(*) from crm.dead_letter where resolved_at is null")


async def parked_keys_of(system: Database) -> int:
    return [resolution for (resolution,) in await letters(system, "resolution")].count(None)


@pytest.mark.req("EVT-111", "EVT-120")
class TestBounds:
    async def test_a_full_key_stops_its_partition_alone_until_there_is_room(
        self,
        park: Callable,
        loop: ParkedKeysLoop,
        batches: Batches,
        desk: Desk,
        tape: Tape,
        clock: MovableClock,
        system: Database,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(store, "MOST_RECORDS_PER_KEY", 3)
        await park(2, 3)
        other = Tape(TOPIC, partition=1)
        tape.note("z", 10)
        tape.note("k", 4)
        tape.note("z", 11)
        other.note("k", 5)
        other.note("y", 12)
        progress = await batches.take([*tape.records[3:], other.records[1]], Stop())
        assert progress.commit == {Place(TOPIC, 0): 4, Place(TOPIC, 1): 2}
        assert progress.full == progress.behind == {Place(TOPIC, 0)}
        assert await written(system) == [("z", 10), ("y", 12)]
        clock.advance(timedelta(seconds=11))
        desk.moods.clear()
        await drain(loop)
        assert not (await batches.take(tape.records[4:], Stop())).behind
        assert [rank for key, rank in await written(system) if key == "k"] == [1, 2, 3, 4]

    async def test_too_many_keys_stop_the_partition_and_lose_nothing(
        self,
        batches: Batches,
        desk: Desk,
        tape: Tape,
        system: Database,
        admin: Connection,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(store, "MOST_PARKED_KEYS", 2)
        for number in range(4):
            desk.moods[number] = fail
            tape.note(f"key {number}", number)
        progress = await batches.take(tape.records, Stop())
        assert progress.full == {Place(TOPIC, 0)}
        assert progress.commit == {Place(TOPIC, 0): 2}
        assert await parked_keys(admin) == 2
        await admin.execute("delete from crm.parked_key")
        assert not (await batches.take(tape.records[2:], Stop())).behind
        assert len(await letters(system)) == 4


@pytest.mark.req("EVT-120", "EVT-123")
async def test_what_is_parked_is_shown(
    park: Callable, loop: ParkedKeysLoop, handling: Handling, clock: MovableClock
) -> None:
    await park(2, 3)
    clock.advance(timedelta(seconds=90))
    await loop.observe()
    group, metrics = handling.consumer.group, handling.metrics
    figures = [gauge.labels(group)._value.get() for gauge in (metrics.parked_keys, metrics.parked_records)]
    assert figures == [1, 3]
    assert metrics.oldest_parked.labels(group)._value.get() == pytest.approx(90)
    assert metrics.dead_letters.labels(group, "exhausted")._value.get() == 1
    assert metrics.dead_letters.labels(group, "parked")._value.get() == 2
    assert metrics.failures.labels(group, "handler")._value.get() == 5


async def test_a_parked_key_whose_handler_is_not_declared_here_waits(
    park: Callable, handling: Handling, desk: Desk, clock: MovableClock, system: Database, admin: Connection
) -> None:
    """Beside a process of another version, which knows the type, this one must not settle what it can't handle."""
    await park(2)
    older = Consumer(handling.consumer.group, [Handler(TOPIC, "test.other", Note.parse, desk.handle)])
    clock.advance(timedelta(minutes=5))
    assert await drain(ParkedKeysLoop(handling_of(system, older, clock))) == 1
    assert await letters(system, "disposition, error_class, resolution") == [
        ("exhausted", "HandlerMissing", None),
        ("parked", "", None),
    ]
    desk.moods.clear()
    clock.advance(timedelta(minutes=5))
    assert await drain(ParkedKeysLoop(handling)) == 2
    assert await written(system) == [("k", 1), ("k", 2)]
    assert await parked_keys(admin) == 0
