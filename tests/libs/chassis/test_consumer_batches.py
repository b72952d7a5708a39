"""Batches on Postgres: once in effect, in the order of each key, and nothing counted that isn't owed."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from consumer_world import Desk, Note, Tape, handling_of, letters, notes_consumer, written
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers import Consumer, Delivery, Handler, Refused, SourceUnavailable
from chassis.consumers import batches as batches_module
from chassis.consumers.batches import PAUSES, Batches, Progress, Waiting
from chassis.consumers.handling import Handling
from chassis.db import Database, driver_connection
from chassis.ids import derived_event_id
from chassis.messaging import Place
from chassis.outbox import EventType, Message, Outbox
from chassis.runtime import Stop

TOPIC = "pin.test.notes.v1"
ECHOED = EventType("pin.test.echo.v1", "test.echoed", "/pin/crm", "Echo", "domain")
Connection = asyncpg.Connection


class Moods:
    """Makes moods that count how often they were asked."""

    @staticmethod
    def failing(times: int, error: Callable[[], BaseException] = lambda: RuntimeError("no")) -> Callable[[], Any]:
        left = [times]

        def mood() -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise error()

        return mood

    @staticmethod
    def always(error: Callable[[], BaseException]) -> Callable[[], Any]:
        return Moods.failing(10**6, error)


class CountingStop(Stop):
    """Notes the pauses, and takes none."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    async def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        return self.requested


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def tape() -> Tape:
    return Tape(TOPIC)


@pytest.fixture
def handling(system: Database, desk: Desk) -> Handling:
    return handling_of(system, notes_consumer(TOPIC, desk))


@pytest.fixture
def batches(handling: Handling) -> Batches:
    return Batches(handling, pauses=(0.01,) * 4)


async def take(batches: Batches, tape: Tape, start: int = 0) -> Progress:
    return await batches.take(tape.records[start:], Stop())


async def again_until_done(batches: Batches, tape: Tape, seconds: float = 30) -> None:
    """Do what the loop does: read again after a wait."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                assert not (await take(batches, tape)).behind
            except Waiting:
                await Stop().wait(0.05)
            else:
                return


@pytest.mark.req("EVT-026", "EVT-027", "EVT-028", "EVT-030", "EVT-033")
class TestDuplicates:
    async def test_within_a_batch_and_across_batches(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database
    ) -> None:
        event = uuid4()
        for _ in range(3):
            tape.note("k", 1, event)
        await take(batches, tape)
        tape.note("k", 1, event)
        await take(batches, tape)
        assert await written(system) == [("k", 1)]
        assert desk.calls == [1]
        assert batches._metrics.duplicates.labels(batches._group)._value.get() == 2 + 4

    async def test_across_a_restart(self, handling: Handling, desk: Desk, tape: Tape, system: Database) -> None:
        tape.note("k", 1)
        for _ in range(2):
            await take(Batches(handling_of(system, handling.consumer)), tape)
        assert desk.calls == [1]

    async def test_another_group_and_a_replay_are_independent(self, desk: Desk, tape: Tape, system: Database) -> None:
        event, replay = uuid4(), str(uuid4())
        tape.note("k", 1, event)
        tape.note("k", 1, event, ce_replayid=replay)
        tape.note("k", 1, event, ce_replayid=replay)
        first, second = notes_consumer(TOPIC, desk), notes_consumer(TOPIC, desk)
        await take(Batches(handling_of(system, first)), tape)
        assert desk.calls == [1, 1]
        await take(Batches(handling_of(system, second)), tape)
        assert desk.calls == [1] * 4

    async def test_a_failed_message_is_not_taken_for_its_own_duplicate(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database
    ) -> None:
        desk.moods[1] = Moods.failing(1)
        tape.note("k", 1)
        assert not (await take(batches, tape)).behind
        assert await written(system) == [("k", 1)]


@pytest.mark.req("EVT-117", "EVT-118", "OPS-153", "OPS-153c")
class TestHandlerFailures:
    async def test_five_attempts_then_the_key_is_parked_and_others_flow_meanwhile(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database, admin: Connection
    ) -> None:
        desk.moods[2] = Moods.always(lambda: RuntimeError("no"))
        for key, number in (("a", 1), ("bad", 2), ("bad", 3), ("b", 4), ("a", 5), ("bad", 6)):
            tape.note(key, number)
        assert (await take(batches, tape)).commit == {Place(TOPIC, 0): 6}
        assert desk.calls.count(2) == 1 + 5  # the whole batch, then five by itself
        assert desk.calls.index(5) < [i for i, n in enumerate(desk.calls) if n == 2][2]
        assert await written(system) == [("a", 1), ("b", 4), ("a", 5)]
        rows = await admin.fetch("select disposition, attempts, record_offset from crm.dead_letter order by position")
        assert [tuple(row) for row in rows] == [("exhausted", 5, 1), ("parked", 0, 2), ("parked", 0, 5)]
        assert await admin.fetchval("select count(*) from crm.parked_key") == 1
        assert await admin.fetchval("select count(*) from crm.outbox where type = 'message.quarantined'") == 1
        tape.note("bad", 7)
        tape.note("b", 8)
        await take(batches, tape, 6)
        assert [kept for kept, _ in await letters(system)] == ["exhausted", "parked", "parked", "parked"]
        assert (await written(system))[-1] == ("b", 8)

    def test_the_five_attempts_take_about_ten_seconds(self) -> None:
        assert len(PAUSES) == batches_module.ATTEMPTS - 1
        assert 9 <= sum(PAUSES) <= 11

    async def test_a_handler_that_succeeds_at_the_third_attempt(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database
    ) -> None:
        desk.moods[1] = Moods.failing(3)  # the batch and two by itself
        desk.moods[2] = Moods.always(lambda: RuntimeError("no"))
        for number in (1, 2, 3):
            tape.note("k", number)
        assert not (await take(batches, tape)).behind
        assert await written(system) == [("k", 1)]
        assert [kept for kept, _ in await letters(system)] == ["exhausted", "parked"]

    async def test_a_hundred_culprits_take_about_as_long_as_one(
        self, handling: Handling, desk: Desk, tape: Tape, system: Database
    ) -> None:
        batches, stop = Batches(handling), CountingStop()
        for number in range(110):
            tape.note(f"key {number}", number)
            if number < 100:
                desk.moods[number] = Moods.always(lambda: RuntimeError("no"))
        assert not (await batches.take(tape.records, stop)).behind
        assert stop.waited == list(PAUSES)  # one after the other they would wait 100 times as long
        assert len(await letters(system)) == 100
        assert len(await written(system)) == 10

    async def test_a_key_that_another_member_has_parked_is_no_error(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database, admin: Connection
    ) -> None:
        group = batches._group

        async def parked_meanwhile() -> None:
            await admin.execute(
                "insert into crm.parked_key values ($1, $2, now(), 3, now()) on conflict do nothing", group, b"k"
            )
            raise RuntimeError("no")

        desk.moods[1] = parked_meanwhile
        batches_alone = Batches(batches._handling, pauses=(0.01,))
        tape.note("k", 1)
        async with system.write() as session:
            letter_of = batches._handling.read(tape.records[0])
            now = await batches._handling.clock.now(session)
            fault = batches_module.Fault.of(RuntimeError("no"))
            await batches._handling.store.park(
                session, batches._handling.letter(letter_of, fault, "exhausted", now), now
            )
            await batches._handling.store.park(
                session, batches._handling.letter(letter_of, fault, "exhausted", now), now
            )
        assert not (await take(batches_alone, tape)).behind
        assert len(await letters(system)) == 1

    async def test_a_slow_handler_is_cut_off_and_counted(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches_module, "BATCH_SECONDS", 0.4)
        monkeypatch.setattr(batches_module, "RECORD_SECONDS", 0.2)
        desk.moods[1] = lambda: asyncio.Event().wait()
        tape.note("slow", 1)
        tape.note("k", 2)
        assert not (await take(batches, tape)).behind
        assert await written(system) == [("k", 2)]
        assert await letters(system, "disposition, error_class, attempts") == [("exhausted", "HandlerTooSlow", 5)]

    async def test_more_slow_handlers_than_the_time_allows_are_parked_all_the_same(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Attempts are not forgotten when the batch is read again; else they'd start anew for ever."""
        monkeypatch.setattr(batches_module, "BATCH_SECONDS", 0.1)
        monkeypatch.setattr(batches_module, "RECORD_SECONDS", 0.1)
        monkeypatch.setattr(batches_module, "LONGEST_ONE_BY_ONE", 0.35)
        for number in range(6):
            desk.moods[number] = lambda: asyncio.Event().wait()
            tape.note(f"slow {number}", number)
        tape.note("k", 7)
        turns = 0
        while (await take(batches, tape)).behind:
            turns += 1
            assert turns < 40
        assert turns > 3
        assert await written(system) == [("k", 7)]
        assert len(await letters(system)) == 6
        assert batches._tried == {}

    @pytest.mark.parametrize("error", [OSError, TimeoutError, asyncio.CancelledError, asyncpg.InterfaceError])
    async def test_its_own_error_that_looks_like_a_broken_connection_is_counted(
        self, error: type[BaseException], batches: Batches, desk: Desk, tape: Tape, system: Database
    ) -> None:
        desk.moods[1] = Moods.always(lambda: error("mine"))
        tape.note("bad", 1)
        tape.note("k", 2)
        assert not (await take(batches, tape)).behind
        assert await written(system) == [("k", 2)]
        assert [kept for kept, _ in await letters(system)] == ["exhausted"]

    @pytest.mark.parametrize(
        ("statement", "sqlstate"),
        [
            ("set local statement_timeout = 50; select pg_sleep(30)", "57014"),
            ("insert into crm.thing (id, rank, worth) values (gen_random_uuid(), 1, -1)", "23514"),
            ("select 1 / 0", "22012"),
            ("select * from crm.no_such_table", "42P01"),
        ],
    )
    async def test_an_error_of_its_statement_is_counted(
        self, statement: str, sqlstate: str, tape: Tape, system: Database
    ) -> None:
        async def run(session: AsyncSession, delivery: Delivery[Note]) -> None:
            if delivery.payload.number == 1:
                await (await driver_connection(session)).execute(statement)

        tape.note("bad", 1)
        tape.note("k", 2)
        consumer = Consumer("pin.crm.statement", [Handler(TOPIC, "test.noted", Note.parse, run)])
        assert not (await take(Batches(handling_of(system, consumer), pauses=(0.01,)), tape)).behind
        assert await letters(system) == [("exhausted", sqlstate)]

    async def test_a_violation_that_shows_at_the_flush_finds_its_culprit(self, tape: Tape, system: Database) -> None:
        """Gathered writes go out once for the batch: the error names no message."""

        async def emit(session: AsyncSession, delivery: Delivery[Note]) -> None:
            when = delivery.envelope.occurred_at
            topic = None if delivery.payload.number == 3 else ECHOED.topic
            event = EventType(topic or "\\N", ECHOED.type, ECHOED.source, ECHOED.aggregate_type, ECHOED.event_class)
            await Outbox("crm").emit(session, [Message(event, delivery.key, {}, when)], delivery.cause)

        for number in range(6):
            tape.note(f"key {number % 3}", number)
        consumer = Consumer("pin.crm.flush", [Handler(TOPIC, "test.noted", Note.parse, emit)])
        assert not (await take(Batches(handling_of(system, consumer), pauses=(0.01,)), tape)).behind
        assert await letters(system, "disposition, error_code, record_offset") == [("exhausted", "23502", 3)]

    async def test_stopping_in_a_pause_is_prompt_and_leaves_the_rest_to_be_read_again(
        self, handling: Handling, desk: Desk, tape: Tape, eventually: Callable
    ) -> None:
        desk.moods[2] = Moods.always(lambda: RuntimeError("no"))
        for number in (1, 2, 3):
            tape.note("k" if number == 2 else "other", number)
        stop, batches = Stop(), Batches(handling, pauses=(60.0,) * 4)
        before = asyncio.all_tasks()
        task = asyncio.create_task(batches.take(tape.records, stop))
        await eventually(lambda: desk.calls.count(3) == 1)
        stop.request()
        progress = await asyncio.wait_for(task, 2)
        assert progress.commit == {Place(TOPIC, 0): 1}
        assert progress.behind == {Place(TOPIC, 0)}
        assert asyncio.all_tasks() == before


@pytest.mark.req("EVT-110", "EVT-118")
async def test_a_refusal_is_kept_at_once_and_its_key_flows(
    batches: Batches, desk: Desk, tape: Tape, system: Database, admin: Connection
) -> None:
    desk.moods[1] = Moods.always(lambda: Refused("HOLD_MISMATCH", "the hold is another's"))
    for number in (1, 2):
        tape.note("k", number)
    for _ in range(2):
        assert not (await take(batches, tape)).behind
    assert await letters(system, "disposition, error_code, attempts") == [("refused", "HOLD_MISMATCH", 1)]
    assert desk.calls.count(1) == 2  # in the batch, and by itself; not at the redelivery
    assert await written(system) == [("k", 2)]
    assert await admin.fetchval("select count(*) from crm.outbox") == 1


async def test_what_a_refusal_does_instead_is_done_once_and_what_the_handler_did_is_not(
    batches: Batches, desk: Desk, tape: Tape, system: Database
) -> None:
    desk.moods[1] = Moods.always(lambda: Refused("HOLD_MISMATCH", "no", desk.noting("told")))
    for number in (1, 2):
        tape.note("k", number)
    for _ in range(2):
        assert not (await take(batches, tape)).behind
    assert await written(system) == [("told", 0), ("k", 2)]
    assert await letters(system) == [("refused", "HOLD_MISMATCH")]


async def test_a_refusal_whose_instead_fails_is_tried_again_and_parks_its_key(
    batches: Batches, desk: Desk, tape: Tape, system: Database
) -> None:
    async def fail(_: AsyncSession) -> None:
        raise LookupError

    desk.moods[1] = Moods.always(lambda: Refused("HOLD_MISMATCH", "no", fail))
    for key, number in (("k", 1), ("other", 2)):
        tape.note(key, number)
    await again_until_done(batches, tape)
    assert await letters(system, "disposition, error_class") == [("exhausted", "LookupError")]
    assert await written(system) == [("other", 2)]


@pytest.mark.req("EVT-110", "EVT-111")
class TestInfrastructure:
    async def test_a_source_that_is_away_counts_against_nobody(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database
    ) -> None:
        desk.moods[2] = Moods.failing(12, lambda: SourceUnavailable("directory"))
        for number in range(5):
            tape.note("k", number)
        await again_until_done(batches, tape)
        assert await written(system) == [("k", number) for number in range(5)]
        assert await letters(system) == []
        assert batches._metrics.failures.labels(batches._group, "handler")._value.get() == 0

    async def test_every_backend_terminated_within_a_batch(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database, admin: Connection
    ) -> None:
        left = [8]

        async def terminate() -> None:
            left[0] -= 1
            if left[0] >= 0:
                await admin.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where usename = 'crm_system' and datname = current_database()"
                )

        desk.moods[3] = terminate
        desk.moods[2] = Moods.failing(1)
        for number in range(6):
            tape.note(f"key {number % 2}", number)
        await again_until_done(batches, tape)
        assert sorted(rank for _, rank in await written(system)) == list(range(6))
        assert await letters(system) == []
        assert batches._metrics.failures.labels(batches._group, "handler")._value.get() <= 1

    async def test_a_deadlock_waits_and_is_not_counted(
        self, batches: Batches, desk: Desk, tape: Tape, system: Database, admin: Connection, connect: Callable
    ) -> None:
        desk.moods[1] = Moods.failing(7, lambda: asyncpg.DeadlockDetectedError("deadlock detected"))
        tape.note("k", 1)
        await again_until_done(batches, tape)
        assert await written(system) == [("k", 1)]
        assert batches._metrics.failures.labels(batches._group, "handler")._value.get() == 0
        assert batches._metrics.failures.labels(batches._group, "infrastructure")._value.get() == 7


@pytest.mark.req("EVT-107", "EVT-126", "EVT-033")
async def test_what_a_handler_emits_has_the_same_ids_whenever_it_is_handled(
    tape: Tape, system: Database, admin: Connection
) -> None:
    async def echo(session: AsyncSession, delivery: Delivery[Note]) -> None:
        when = delivery.envelope.occurred_at
        twice = [Message(ECHOED, delivery.key, {"n": n}, when) for n in range(2)]
        await Outbox("crm").emit(session, twice, delivery.cause)

    first, second = uuid4(), uuid4()
    tape.note("k", 1, first)
    tape.note("k", 2, second, ce_correlationid=None)
    seen = []
    for _ in ("live", "rebuilt"):
        consumer = Consumer("pin.crm.echo", [Handler(TOPIC, "test.noted", Note.parse, echo)])
        await take(Batches(handling_of(system, consumer)), tape)
        rows = await admin.fetch(
            "select event_id, headers::jsonb ->> 'ce_correlationid' as correlation,"
            " headers::jsonb ->> 'ce_causationid' as causation from crm.outbox order by id"
        )
        seen.append([tuple(map(str, row)) for row in rows])
        await admin.execute("delete from crm.outbox")
        await admin.execute("delete from crm.inbox")
    assert seen[0] == seen[1]
    assert seen[0] == [
        (str(derived_event_id(cause, ECHOED.type, n, "pin.crm.echo")), correlation, str(cause))
        for cause, correlation in ((first, "request-1"), (second, str(second)))
        for n in range(2)
    ]


async def test_a_handler_that_swallows_a_database_error_loses_no_event(system: Database, tape: Tape, admin: Connection):
    """The server would roll the batch back at commit, and its offsets would be committed all the same."""

    async def handle(session: AsyncSession, delivery: Delivery[Note]) -> None:
        connection = await driver_connection(session)
        with contextlib.suppress(asyncpg.CheckViolationError):
            worth = -1 if delivery.payload.number == 2 else 1
            await connection.execute("insert into crm.thing (id, rank, worth) values ($1, 1, $2)", uuid4(), worth)

    tape.note("a", 1)
    tape.note("b", 2)
    consumer = Consumer("pin.crm.swallowing", [Handler(TOPIC, "test.noted", Note.parse, handle)])
    await Batches(handling_of(system, consumer), pauses=(0.01,)).take(tape.records, Stop())
    assert await admin.fetchval("select count(*) from crm.thing") == 1
    assert await letters(system) == [("exhausted", "25P02")]


async def test_an_event_that_a_savepoint_undoes_is_not_published(system: Database, tape: Tape, admin: Connection):
    async def handle(session: AsyncSession, delivery: Delivery[Note]) -> None:
        with contextlib.suppress(LookupError):
            async with session.begin_nested():
                message = Message(ECHOED, "k", {"n": delivery.payload.number}, delivery.now)
                await Outbox("crm").emit(session, [message], delivery.cause)
                if delivery.payload.number == 2:
                    raise LookupError

    for number in (1, 2, 3):
        tape.note("k", number)
    consumer = Consumer("pin.crm.careful", [Handler(TOPIC, "test.noted", Note.parse, handle)])
    await Batches(handling_of(system, consumer)).take(tape.records, Stop())
    assert [row[0] for row in await admin.fetch("select payload from crm.outbox order by id")] == [
        b'{"n":1}',
        b'{"n":3}',
    ]


async def test_what_two_groups_emit_for_one_cause_has_two_ids(system: Database, tape: Tape, admin: Connection):
    """A reader that knows the first one's id would take the second for a duplicate."""

    async def handle(session: AsyncSession, delivery: Delivery[Note]) -> None:
        await Outbox("crm").emit(session, [Message(ECHOED, "k", {}, delivery.now)], delivery.cause)

    tape.note("k", 1)
    for group in ("pin.crm.one", "pin.crm.other"):
        consumer = Consumer(group, [Handler(TOPIC, "test.noted", Note.parse, handle)])
        await Batches(handling_of(system, consumer)).take(tape.records, Stop())
    assert await admin.fetchval("select count(distinct event_id) from crm.outbox") == 2
