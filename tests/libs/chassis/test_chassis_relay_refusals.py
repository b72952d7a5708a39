"""Rows that the broker refuses: counted, parked with their key, never in the way of others, never overtaken."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import timedelta

import asyncpg
import orjson
import pytest
from kafka_proxy import PRODUCE, Fate, KafkaProxy, Request, kafka_proxy
from relay_scene import FILL, OUTBOX, Connection, Counting, Scene, drain, pending, port_of

from chassis.clock import MovableClock
from chassis.db import driver_connection
from chassis.messaging import (
    BrokerUnavailable,
    KafkaAddress,
    Producer,
    Publication,
    Record,
    RecordRefused,
    TopicSpec,
    create_topics,
)
from chassis.outbox import Cause, Message, lane_of
from chassis.relay import NotParked, OutboxWatch, Relay
from chassis.runtime import Stop
from chassis.testing.kafka import Event
from chassis.testing.plugin import TestBroker

pytestmark = pytest.mark.messaging

Note = Callable[..., Message]
TOO_LARGE = 10
TOPIC_AUTHORISATION = 29
POLICY = 44
NOT_ENOUGH_REPLICAS = 19
UNKNOWN_ERROR = -1
BAD = "bad-key"
SAME_LANE = next(f"other-{n}" for n in range(1000) if lane_of(f"other-{n}") == lane_of(BAD))


@pytest.fixture
async def proxy(broker: TestBroker) -> AsyncIterator[KafkaProxy]:
    async with kafka_proxy(port_of(broker)) as running:
        yield running


@pytest.fixture
def relay(scene: Scene, proxy: KafkaProxy, clock: MovableClock) -> Relay:
    """A relay behind the proxy, whose clock the test moves."""
    return scene.relay(scene.producer(KafkaAddress(proxy.bootstrap)), clock=clock)


def refusing(code: int, marker: str = BAD) -> Callable[[Request], Fate | bytes]:
    """Refuse every request that holds a record with a marker."""

    def judge(request: Request) -> Fate | bytes:
        bad = request.api == PRODUCE and marker.encode() in request.frame
        return request.refusal(code) if bad else Fate.PASS

    return judge


def retry_now(relay: Relay) -> None:
    """Let the next turn look at once for keys that are due, and for what the floor says."""
    relay._retried = relay._floor._looked = -1000.0


async def try_again(relay: Relay, clock: MovableClock, seconds: float) -> None:
    clock.advance(timedelta(seconds=seconds))
    retry_now(relay)
    await relay.run_once()


async def state(admin: Connection) -> list[tuple[str, int, bool]]:
    rows = await admin.fetch("select message_key, attempts, parked_at is not null from crm.outbox order by id")
    return [tuple(row) for row in rows]


async def parked_keys(admin: Connection) -> dict[str, object]:
    rows = await admin.fetch("select message_key, next_attempt_at from crm.outbox_parked_key")
    return {row["message_key"]: row["next_attempt_at"] for row in rows}


def arrived(broker: TestBroker, topic: str, count: int) -> list[Event]:
    with broker.reading(topic, from_beginning=True) as reader:
        return reader.until(lambda seen: len(seen) >= count)


def numbers(events: list[Event], key: str) -> list[int]:
    return [event.payload["number"] for event in events if event.key == key]


# --- one bad row


@pytest.mark.req("EVT-105", "EVT-110", "EVT-118")
async def test_a_row_that_is_too_large_parks_its_key_at_once_and_all_others_arrive(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection, proxy: KafkaProxy, relay: Relay
):
    proxy.judge = refusing(TOO_LARGE)
    messages = [note(topic, f"key-{n}", n) for n in range(200)]
    messages[100:100] = [note(topic, BAD, n) for n in range(3)]
    messages += [note(topic, SAME_LANE, n) for n in range(5)]
    await scene.emit(messages)
    turn = await relay.run_once()
    assert (turn.published, turn.refused, turn.trouble) == (205, 1, None)
    assert await state(admin) == [(BAD, 1, True), (BAD, 0, True), (BAD, 0, True)]
    assert await parked_keys(admin) == {BAD: None}
    assert proxy.requests[PRODUCE] < 40, "the culprit is found by halves"
    events = arrived(broker, topic, 205)
    assert numbers(events, SAME_LANE) == list(range(5))
    assert numbers(events, BAD) == []


@pytest.mark.req("EVT-105")
async def test_a_parked_key_is_not_overtaken_by_what_is_emitted_or_committed_later_and_goes_on_in_order(
    scene: Scene,
    broker: TestBroker,
    topic: str,
    note: Note,
    admin: Connection,
    proxy: KafkaProxy,
    relay: Relay,
    clock: MovableClock,
):
    proxy.judge = refusing(TOO_LARGE)
    async with scene.emitting.write() as slow:
        await scene.emit([note(topic, BAD, 0), note(topic, BAD, 1)])
        await OUTBOX.emit(slow, [note(topic, BAD, 2)], Cause("test"))
        await drain(relay)
    await scene.emit([note(topic, BAD, 3), note(topic, SAME_LANE, 9)])
    proxy.judge = lambda _: Fate.PASS
    assert sum(await drain(relay)) == 1, "the other key of the lane"
    assert [held for _, _, held in await state(admin)] == [True] * 4
    async with scene.database.write() as session:
        assert await relay.parking.unpark(session, BAD, at=clock.instant, actor="ann", reason="mended") == 4
    await scene.emit([note(topic, BAD, 4)])
    assert sum(await drain(relay)) == 5
    assert numbers(arrived(broker, topic, 6), BAD) == list(range(5))
    assert await parked_keys(admin) == {}
    [row] = await admin.fetch("select action, actor, details->>'reason' as reason from crm.audit_log")
    assert tuple(row) == ("outbox.unparked", "ann", "mended")


@pytest.mark.req("EVT-117", "EVT-118")
async def test_a_refusal_that_may_pass_is_tried_five_times_by_the_clock_and_then_waits_for_an_operator(
    scene: Scene, topic: str, note: Note, admin: Connection, proxy: KafkaProxy, relay: Relay, clock: MovableClock
):
    proxy.judge = refusing(POLICY)
    await scene.emit([note(topic, BAD, 0), note(topic, BAD, 1)])
    await relay.run_once()
    for attempt, seconds in enumerate((1, 3, 9, 27), start=1):
        due = clock.instant + timedelta(seconds=seconds)
        assert await parked_keys(admin) == {BAD: due}
        before = proxy.requests[PRODUCE]
        await try_again(relay, clock, seconds - 0.01)
        assert proxy.requests[PRODUCE] == before, "not before its time"
        assert (await state(admin))[0] == (BAD, attempt, True)
        await try_again(relay, clock, 0.01)
    assert await state(admin) == [(BAD, 5, True), (BAD, 0, True)]
    assert await parked_keys(admin) == {BAD: None}
    before = proxy.requests[PRODUCE]
    await try_again(relay, clock, 86_400)
    assert proxy.requests[PRODUCE] == before
    assert scene.registry.get_sample_value("pin_outbox_refused_total", {"topic": topic}) == 5


@pytest.mark.req("EVT-117")
async def test_a_row_that_passes_at_a_later_attempt_lets_its_key_go_in_order(
    scene: Scene,
    broker: TestBroker,
    topic: str,
    note: Note,
    admin: Connection,
    proxy: KafkaProxy,
    relay: Relay,
    clock: MovableClock,
):
    proxy.judge = refusing(POLICY)
    await scene.emit([note(topic, BAD, n) for n in range(3)])
    await relay.run_once()
    await try_again(relay, clock, 1)
    await scene.emit([note(topic, BAD, 3)])
    await drain(relay)
    proxy.judge = lambda _: Fate.PASS
    await try_again(relay, clock, 3)
    await drain(relay)
    assert (await pending(admin), await parked_keys(admin)) == (0, {})
    assert numbers(arrived(broker, topic, 4), BAD) == list(range(4))


@pytest.mark.parametrize("code", [UNKNOWN_ERROR, NOT_ENOUGH_REPLICAS])
async def test_an_outage_spends_no_attempt_of_a_row_that_waits_for_its_next_one(
    scene: Scene,
    topic: str,
    note: Note,
    admin: Connection,
    proxy: KafkaProxy,
    relay: Relay,
    clock: MovableClock,
    code: int,
):
    proxy.judge = refusing(POLICY)
    await scene.emit([note(topic, BAD, 0)])
    await relay.run_once()
    scene.producers[0]._ack_timeout = 0.5
    for _ in range(3):
        proxy.judge = refusing(code)
        await try_again(relay, clock, 100)
    assert await state(admin) == [(BAD, 1, True)]
    assert len(await parked_keys(admin)) == 1


async def test_a_whole_topic_that_is_refused_is_asked_about_once(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection, proxy: KafkaProxy, relay: Relay
):
    proxy.judge = refusing(TOPIC_AUTHORISATION, topic)
    await scene.emit([note(topic, f"key-{n % 50}", n) for n in range(100)])
    turn = await relay.run_once()
    assert (turn.published, turn.refused, turn.trouble) == (0, 50, None)
    assert [attempts for _, attempts, _ in await state(admin)] == [1] * 50 + [0] * 50
    assert len(await parked_keys(admin)) == 50
    assert proxy.requests[PRODUCE] == 1


async def test_a_record_that_no_broker_would_take_is_refused_unasked_and_those_before_it_arrive(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    await scene.emit([note(topic, BAD, n) for n in range(3)])
    await admin.execute(
        "update crm.outbox set payload = convert_to(repeat('x', 2000000), 'UTF8') where id = (select min(id) + 1 from"
        " crm.outbox)"
    )
    relay = scene.relay(scene.producer(broker.address))
    turn = await relay.run_once()
    assert (turn.published, turn.refused) == (1, 1)
    assert await state(admin) == [(BAD, 1, True), (BAD, 0, True)]
    assert numbers(arrived(broker, topic, 1), BAD) == [0]


# --- no tight loop


@pytest.mark.parametrize("code", [TOO_LARGE, POLICY, TOPIC_AUTHORISATION, UNKNOWN_ERROR])
async def test_a_broker_that_refuses_everything_is_asked_a_bounded_number_of_times(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection, proxy: KafkaProxy, code: int
):
    proxy.judge = refusing(code, "test.noted")
    await scene.emit([note(topic, f"key-{n}", n) for n in range(500)])
    relay = scene.relay(scene.producer(KafkaAddress(proxy.bootstrap)), interval=0.05)
    stop = Stop()
    running = asyncio.create_task(relay.run(stop))
    await stop.wait(3)
    stop.request()
    await running
    assert 1 <= proxy.requests[PRODUCE] < 200
    assert await pending(admin) == 500


async def test_pauses_grow_while_rows_are_refused_and_are_short_again_after_a_success(
    scene: Scene, topic: str, note: Note, proxy: KafkaProxy, relay: Relay
):
    proxy.judge = refusing(POLICY)

    async def at_wait(count: int) -> None:
        if count == 4:
            proxy.judge = lambda _: Fate.PASS
        elif count == 5:
            proxy.judge = refusing(POLICY)
        elif count == 6:
            stop.request()
        await scene.emit([note(topic, f"{BAD}-{count}", count)])

    stop = Counting(at_wait)
    await scene.emit([note(topic, BAD, 0)])
    relay._interval = 0.01
    await relay.run(stop)
    assert [0.5 <= wait / pause <= 1.5 for wait, pause in zip(stop.waits[:4], (0.2, 0.4, 0.8, 1.6), strict=True)]
    assert stop.waits[3] > 0.7
    assert min(stop.waits[4:]) <= 0.3


# --- cost


async def pages(connection: Connection, statement: str, *arguments: object) -> int:
    plan = await connection.fetchval("explain (analyze, buffers, format json) " + statement, *arguments)
    root = orjson.loads(plan)[0]["Plan"]
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "not marked row by row"])
async def test_a_claim_reads_few_pages_with_a_hundred_thousand_rows_of_parked_keys(
    scene: Scene, topic: str, admin: Connection, relay: Relay, clock: MovableClock, marked: bool
):
    await admin.execute(FILL, topic, BAD, lane_of(BAD), 100_000, clock.instant if marked else None)
    await admin.execute(FILL, topic, SAME_LANE, lane_of(SAME_LANE), 64, None)
    await admin.execute("insert into crm.outbox_parked_key values ($1, $2, $3, 'x', null)", BAD, topic, clock.instant)
    await admin.execute("analyze crm.outbox")
    assert await pages(admin, relay._sql["lock"], range(64), [0] * 64, 64) < 400
    assert await pages(admin, relay._sql["read"], [lane_of(BAD)], [0], 64) < 400
    assert await pages(admin, relay._floor._first_ids, range(64), [0] * 64) < 800


async def test_unmarked_rows_of_a_parked_key_are_taken_out_of_the_way_in_bounded_turns(
    scene: Scene, broker: TestBroker, topic: str, admin: Connection, relay: Relay, clock: MovableClock
):
    await admin.execute(FILL, topic, BAD, lane_of(BAD), 10_000, None)
    await admin.execute(FILL, topic, SAME_LANE, lane_of(SAME_LANE), 3, None)
    await admin.execute("insert into crm.outbox_parked_key values ($1, $2, $3, 'x', null)", BAD, topic, clock.instant)
    most = 0
    unmarked = "select count(*) from crm.outbox where parked_at is null"
    before = await admin.fetchval(unmarked)
    while before:
        await relay.run_once()
        after = await admin.fetchval(unmarked)
        most, before = max(most, before - after), after
    assert most <= 4096
    assert await pending(admin) == 10_000
    assert [int(event.value) for event in arrived(broker, topic, 3)] == [1, 2, 3]


# --- what an operator does


class Held(Producer):
    """Waits in the middle of a turn until it is told to go on."""

    entered: asyncio.Event
    go_on: asyncio.Event

    async def deliver(self, records: list) -> Publication:
        self.entered.set()
        await self.go_on.wait()
        return await super().deliver(records)


async def test_unparking_waits_for_the_turn_that_holds_the_keys_lane(
    scene: Scene,
    broker: TestBroker,
    topic: str,
    note: Note,
    admin: Connection,
    proxy: KafkaProxy,
    relay: Relay,
    clock: MovableClock,
    eventually: Callable,
):
    proxy.judge = refusing(TOO_LARGE)
    await scene.emit([note(topic, BAD, 0), note(topic, BAD, 1)])
    await relay.run_once()
    await scene.emit([note(topic, BAD, 2), note(topic, SAME_LANE, 0)])
    producer = scene.producer(broker.address, Held)
    producer.entered, producer.go_on = asyncio.Event(), asyncio.Event()
    turn = asyncio.create_task(scene.relay(producer).run_once())
    await producer.entered.wait()

    async def unpark() -> int:
        async with scene.emitting.write() as session:
            return await relay.parking.unpark(session, BAD, at=clock.instant, actor=None)

    unparking = asyncio.create_task(unpark())

    async def waits() -> bool:
        return await admin.fetchval("select count(*) from pg_locks where locktype = 'advisory' and not granted") == 1

    await eventually(waits)
    producer.go_on.set()
    await turn
    assert await unparking == 3, "the row that the turn found behind the parked one is let go too"
    await drain(scene.relay(scene.producer(broker.address)))
    assert numbers(arrived(broker, topic, 4), BAD) == [0, 1, 2]


@pytest.mark.req("EVT-105")
async def test_a_discarded_row_is_never_sent_and_those_behind_it_are(
    scene: Scene,
    broker: TestBroker,
    topic: str,
    note: Note,
    admin: Connection,
    proxy: KafkaProxy,
    relay: Relay,
    clock: MovableClock,
):
    proxy.judge = refusing(TOO_LARGE)
    sent = [note(topic, BAD, n) for n in range(3)]
    await scene.emit(sent)
    await relay.run_once()
    proxy.judge = lambda _: Fate.PASS
    async with scene.database.write() as session:
        [key] = await relay.parking.parked(session)
        assert (key.key, key.topic, key.rows, key.attempts, key.event_id) == (BAD, topic, 3, 1, sent[0].event_id)
        assert "larger" in key.reason
        with pytest.raises(ValueError, match="reason"):
            await relay.parking.discard(session, key.first_id, at=clock.instant, actor="ann", reason=" ")
        assert (
            await relay.parking.discard(session, key.first_id, at=clock.instant, actor="ann", reason="garbage") == BAD
        )
    await drain(relay)
    assert numbers(arrived(broker, topic, 2), BAD) == [1, 2]
    [row] = await admin.fetch("select action, entity_id, details->>'reason' as reason from crm.audit_log")
    assert tuple(row) == ("outbox.discarded", sent[0].event_id, "garbage")


async def test_discarding_one_of_two_refused_rows_keeps_the_key_parked(
    scene: Scene, topic: str, note: Note, admin: Connection, relay: Relay, clock: MovableClock
):
    await admin.execute(FILL, topic, BAD, lane_of(BAD), 3, clock.instant)
    await admin.execute("update crm.outbox set attempts = 1 where id < (select max(id) from crm.outbox)")
    await admin.execute("insert into crm.outbox_parked_key values ($1, $2, $3, 'x', null)", BAD, topic, clock.instant)
    ids = [row["id"] for row in await admin.fetch("select id from crm.outbox order by id")]
    for row_id, left in ((ids[0], 1), (ids[1], 0)):
        async with scene.database.write() as session:
            await relay.parking.discard(session, row_id, at=clock.instant, actor=None, reason="garbage")
        assert len(await parked_keys(admin)) == left
    assert await state(admin) == [(BAD, 0, False)]


async def test_what_is_not_parked_can_be_neither_unparked_nor_discarded(
    scene: Scene, topic: str, note: Note, admin: Connection, relay: Relay, clock: MovableClock
):
    await scene.emit([note(topic, "well", 1)])
    row_id = await admin.fetchval("select id from crm.outbox")
    async with scene.database.write() as session:
        with pytest.raises(NotParked):
            await relay.parking.unpark(session, "well", at=clock.instant, actor=None)
        with pytest.raises(NotParked):
            await relay.parking.discard(session, row_id, at=clock.instant, actor=None, reason="x")
    assert await pending(admin) == 1
    assert await admin.fetchval("select count(*) from crm.audit_log") == 0


@pytest.mark.req("EVT-120", "EVT-122", "EVT-123")
async def test_the_watch_shows_parked_rows_and_keys_and_the_age_of_the_oldest(
    scene: Scene, topic: str, note: Note, admin: Connection, proxy: KafkaProxy, relay: Relay
):
    proxy.judge = refusing(POLICY)
    await scene.emit([note(topic, f"{BAD}-{n % 2}", n) for n in range(6)] + [note(topic, "well", 1)])
    while await admin.fetchval("select count(*) from crm.outbox where parked_at is null"):
        await relay.run_once()
    await admin.execute(
        "update crm.outbox_parked_key set next_attempt_at = null, parked_at = clock_timestamp() - interval '70 s'"
        " where message_key = $1",
        f"{BAD}-0",
    )
    await OutboxWatch(scene.database, "crm", scene.metrics).observe()

    def value(name: str) -> float | None:
        return scene.registry.get_sample_value(f"pin_outbox_{name}")

    assert (value("parked_rows"), value("parked_keys"), value("retrying_keys"), value("pending")) == (6, 1, 1, 0)
    assert value("oldest_parked_age_seconds") >= 70
    assert (value("attempts_total"), value("published_total")) == (7, 1)


# --- on Apache Kafka


def needs_apache(broker: TestBroker) -> None:
    if broker.running.kind == "embedded":
        pytest.skip("the embedded broker has no limits of topics and creates topics by itself")


async def test_a_topics_own_limit_parks_the_record_and_batches_adapt_to_it(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    needs_apache(broker)
    narrow = f"{topic}.narrow"
    await create_topics(broker.address, [TopicSpec(narrow, 1, config={"max.message.bytes": "20000"})])
    await admin.execute(FILL, narrow, "many", lane_of("many"), 1000, None)
    await scene.emit([note(narrow, BAD, 0)])
    await admin.execute(
        "update crm.outbox set payload = convert_to(repeat('x', 30000), 'UTF8') where message_key = $1", BAD
    )
    relay = scene.relay(scene.producer(broker.address))
    await drain(relay)
    assert await parked_keys(admin) == {BAD: None}
    assert await pending(admin) == 1
    events = arrived(broker, narrow, 1000)
    assert [int(event.value) for event in events if event.key == "many"] == list(range(1, 1001))


async def test_a_topic_that_is_missing_is_waited_for_and_loses_nothing(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection, clock: MovableClock
):
    needs_apache(broker)
    missing = f"{topic}.missing"
    await scene.emit([note(missing, "k", 1), note(missing, "k", 2), note(topic, "k2", 1)])
    relay = scene.relay(scene.producer(broker.address), clock=clock)
    turn = await relay.run_once()
    assert (turn.published, turn.refused) == (1, 1)
    assert await parked_keys(admin) == {"k": clock.instant + timedelta(seconds=1)}
    await create_topics(broker.address, [TopicSpec(missing, 1)])
    scene.producers[0]._missing.clear()
    await try_again(relay, clock, 1)
    await drain(relay)
    assert await pending(admin) == 0
    assert numbers(arrived(broker, missing, 2), "k") == [1, 2]


async def test_a_parked_key_of_the_outbox_is_unknown_to_the_apis_role(scene: Scene, opened: Callable, scratch: object):
    async with opened(scratch.api_url).read() as session:
        connection = await driver_connection(session)
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("select 1 from crm.outbox_parked_key")


class Leaderless(Producer):
    """Refuses one topic's records, and then knows nothing of them any more, as if its partition had lost its leader."""

    refusing = True

    async def deliver(self, records: Sequence[Record]) -> Publication:
        publication = Publication()
        for at, record in enumerate(records):
            if record.topic != "pin.test.leaderless.v1":
                publication.acknowledged.add(at)
            elif self.refusing:
                publication.refused[at] = RecordRefused(record, "no such topic", final=False)
            else:
                publication.trouble = BrokerUnavailable("no leader")
        return publication


async def test_a_refused_row_whose_partition_is_away_keeps_nobody_waiting(
    scene: Scene, broker: TestBroker, admin: Connection, note: Note, clock: MovableClock
) -> None:
    producer = scene.producer(broker.address, Leaderless)
    relay = scene.relay(producer, clock=clock)
    await scene.emit([note("pin.test.leaderless.v1", BAD, 1)])
    await relay.run_once()
    producer.refusing = False
    await scene.emit([note("pin.test.other.v1", "good", 1)])
    await try_again(relay, clock, 2)
    assert await state(admin) == [(BAD, 1, True)]
    producer.refusing = True
    await try_again(relay, clock, 2)
    assert await state(admin) == [(BAD, 1, True)], "not asked again so soon"
    await try_again(relay, clock, 30)
    assert await state(admin) == [(BAD, 2, True)]
