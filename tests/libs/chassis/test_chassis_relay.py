"""The relay against Postgres and a broker: what it sends, what it never loses, and what it does when either is away."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import pairwise

import asyncpg
import orjson
import pytest
from kafka_proxy import PRODUCE, Fate, Request, kafka_proxy
from relay_scene import FILL, OUTBOX, Counting, Scene, drain, pending, port_of

from chassis import relay as relay_module
from chassis.db import Database, driver_connection
from chassis.messaging import BrokerUnavailable, KafkaAddress, Producer, Publication, Record, TopicSpec, create_topics
from chassis.outbox import Cause, Message, lane_of
from chassis.relay import FIRST_BACKOFF, LONGEST_BACKOFF, OutboxWatch
from chassis.runtime import Stop
from chassis.testing.kafka import Event
from chassis.testing.plugin import TestBroker
from chassis.testing.servers import EmbeddedBroker

pytestmark = pytest.mark.messaging

Connection = asyncpg.Connection
Note = Callable[..., Message]
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
NOWHERE = KafkaAddress("127.0.0.1:1")
UNKNOWN_ERROR = -1


# --- what is sent


async def test_a_row_arrives_with_key_headers_and_value_as_they_were_emitted(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    sent = note(topic, "сделка-1", 7, sequence=3)
    await scene.emit([sent])
    [row] = await admin.fetch("select payload, headers::text from crm.outbox")
    assert await drain(scene.relay(scene.producer(broker.address))) == [1]
    event = broker.expect(topic, "test.noted")
    assert (event.key, event.value, event.id) == ("сделка-1", row["payload"], str(sent.event_id))
    assert event.headers == {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": str(sent.event_id),
        "ce_source": "/pin/test",
        "ce_type": "test.noted",
        "ce_time": "2026-11-30T09:00:00Z",
        "ce_subject": "сделка-1",
        "ce_aggregatetype": "Note",
        "ce_contractversion": "1",
        "ce_eventclass": "domain",
        "ce_correlationid": "test",
        "ce_sequence": "3",
    }
    assert await pending(admin) == 0


async def test_rows_of_all_lanes_arrive_and_each_key_keeps_its_order(
    scene: Scene, broker: TestBroker, note: Note, admin: Connection, topic: str
):
    many = f"{topic}.many"
    await create_topics(broker.address, [TopicSpec(many, 6)])
    keys = [f"key-{n}" for n in range(150)]
    assert len({lane_of(key) for key in keys}) > 50
    await scene.emit([note(many, key, number) for number in range(10) for key in keys])
    producer = scene.producer(broker.address)
    await asyncio.gather(*(drain(scene.relay(producer, relays=4)) for _ in range(4)))
    with broker.reading(many, from_beginning=True) as reader:
        events = reader.until(lambda seen: len(seen) >= 1500)
    assert len(events) == 1500
    assert await pending(admin) == 0
    for key in keys:
        assert [event.payload["number"] for event in events if event.key == key] == list(range(10))


async def test_a_row_committed_late_with_a_lower_id_is_not_lost(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    relay = scene.relay(scene.producer(broker.address))
    async with scene.emitting.write() as slow:
        await OUTBOX.emit(slow, [note(topic, "same-lane", 1)], Cause("test"))
        await scene.emit([note(topic, "same-lane", 2)])
        assert await drain(relay) == [1]
    assert await drain(relay) == [1]
    with broker.reading(topic, from_beginning=True) as reader:
        events = reader.until(lambda seen: len(seen) >= 2)
    assert [event.payload["number"] for event in events] == [2, 1]
    assert await pending(admin) == 0


async def test_a_relay_takes_its_share_of_the_lanes_and_no_more(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    await scene.emit([note(topic, f"key-{n}", n) for n in range(400)])
    lanes = {row["lane"] for row in await admin.fetch("select distinct lane from crm.outbox")}
    assert len(lanes) == 64
    relay = scene.relay(scene.producer(broker.address), relays=4)
    assert (await relay.run_once()).more
    left = {row["lane"] for row in await admin.fetch("select distinct lane from crm.outbox")}
    assert len(lanes - left) == 16


async def test_lanes_that_another_relay_holds_are_left_to_it(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    await scene.emit([note(topic, "held", 1), note(topic, "free", 2)])
    assert lane_of("held") != lane_of("free")
    async with admin.transaction():
        await admin.execute("select pg_advisory_xact_lock(hashtext('crm.outbox'), $1)", lane_of("held"))
        relay = scene.relay(scene.producer(broker.address))
        async with asyncio.timeout(10):
            assert await drain(relay) == [1]
        assert await admin.fetchval("select message_key from crm.outbox") == "held"
    assert await drain(relay) == [1]


# --- cost


async def test_an_idle_turn_locks_nothing(scene: Scene, broker: TestBroker, topic: str, note: Note):
    locks = "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    relay = scene.relay(scene.producer(NOWHERE))

    async def taken() -> int:
        async with scene.database.write() as session:
            connection = await driver_connection(session)
            await connection.fetch(relay._sql["lock"], range(64), [0] * 64, 64)
            return await connection.fetchval(locks)

    assert await taken() == 0
    await scene.emit([note(topic, "one", 1), note(topic, "two", 2), note(topic, "one", 3)])
    assert await taken() == 2


async def test_a_turn_reads_few_pages_behind_many_parked_rows(scene: Scene, admin: Connection, topic: str):
    await admin.execute(FILL, topic, "parked", lane_of("parked"), 30_000, NOW)
    await admin.execute(FILL, topic, "parked", lane_of("parked"), 10, None)
    await admin.execute("analyze crm.outbox")
    relay = scene.relay(scene.producer(NOWHERE))
    for statement, arguments in (
        (relay._sql["lock"], (range(64), [0] * 64, 64)),
        (relay._sql["read"], ([lane_of("parked")], [0], 64)),
    ):
        plan = await admin.fetchval("explain (analyze, buffers, format json) " + statement, *arguments)
        root = orjson.loads(plan)[0]["Plan"]
        pages = root["Shared Hit Blocks"] + root["Shared Read Blocks"]
        assert pages < 400, statement


async def test_one_hot_lane_is_drained_in_growing_turns(
    scene: Scene, broker: TestBroker, topic: str, admin: Connection
):
    await admin.execute(FILL, topic, "hot", lane_of("hot"), 6000, None)
    turns = await drain(scene.relay(scene.producer(broker.address), relays=2))
    assert turns == [64, 4096, 1840]
    with broker.reading(topic, from_beginning=True) as reader:
        events = reader.until(lambda seen: len(seen) >= 6000)
    assert [int(event.value) for event in events] == list(range(1, 6001))


@pytest.mark.req("EVT-111")
async def test_turns_shrink_until_the_broker_acknowledges_them(
    scene: Scene, broker: TestBroker, topic: str, admin: Connection
):
    await admin.execute(FILL, topic, "slow", lane_of("slow"), 20, None)
    async with kafka_proxy(port_of(broker)) as proxy:
        proxy.judge = lambda request: request.refusal(UNKNOWN_ERROR) if _records(request) > 10 else Fate.PASS
        relay = scene.relay(scene.producer(KafkaAddress(proxy.bootstrap)))
        outcomes: list[int] = []
        while await pending(admin):
            try:
                outcomes.append((await relay.run_once()).published)
            except BrokerUnavailable:
                outcomes.append(0)
            assert len(outcomes) < 40, outcomes
    assert outcomes == [0, 10, 0, 10] or outcomes == [0, 10, 10]


def _records(request: Request) -> int:
    return request.frame.count(b"test.noted") if request.api == PRODUCE else 0


# --- waking up


async def test_a_local_commit_wakes_the_relay_at_once(scene: Scene, broker: TestBroker, topic: str, note: Note):
    stop = Stop()
    relay = scene.relay(scene.producer(broker.address), interval=60.0)
    with broker.reading(topic) as reader:
        running = asyncio.create_task(relay.run(stop))
        for number in range(3):
            await scene.emit([note(topic, "k", number)])
            await asyncio.to_thread(reader.until, lambda seen, number=number: len(seen) > number, 10)
    stop.request()
    async with asyncio.timeout(10):
        await running


@pytest.mark.parametrize("at_work", [0, 1])
async def test_a_commit_wakes_every_worker(scene: Scene, broker: TestBroker, topic: str, note: Note, at_work: int):
    stop = Stop()
    relays = [scene.relay(scene.producer(broker.address), relays=2, interval=60.0) for _ in range(2)]
    with broker.reading(topic) as reader:
        running = asyncio.create_task(relays[at_work].run(stop))
        for number in range(2):
            await scene.emit([note(topic, "k", number)])
            await asyncio.to_thread(reader.until, lambda seen, number=number: len(seen) > number, 10)
    stop.request()
    await running


async def test_a_commit_during_a_turn_is_found_by_the_worker_that_holds_its_lane(
    scene: Scene, broker: TestBroker, topic: str, note: Note
):
    entered, go_on = asyncio.Event(), asyncio.Event()

    class Slow(Producer):
        async def deliver(self, records: Sequence[Record]) -> Publication:
            entered.set()
            await go_on.wait()
            return await super().deliver(records)

    stop = Stop()
    producer = scene.producer(broker.address, Slow)
    relays = [scene.relay(producer, relays=2, interval=60.0) for _ in range(2)]
    with broker.reading(topic) as reader:
        running = [asyncio.create_task(relay.run(stop)) for relay in relays]
        await scene.emit([note(topic, "k", 1)])
        await entered.wait()
        await scene.emit([note(topic, "k", 2)])
        go_on.set()
        events = await asyncio.to_thread(reader.until, lambda seen: len(seen) >= 2, 10)
    assert [event.payload["number"] for event in events] == [1, 2]
    stop.request()
    await asyncio.gather(*running)


async def test_without_a_wake_up_the_relay_looks_again_after_its_interval(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection, eventually: Callable
):
    stop = Stop()
    running = asyncio.create_task(scene.relay(scene.producer(broker.address), interval=0.05).run(stop))
    async with scene.database.write() as session:
        await OUTBOX.emit(session, [note(topic, "k", 1)], Cause("test"))

    async def sent() -> bool:
        return await pending(admin) == 0

    await eventually(sent)
    stop.request()
    await running


async def test_stopping_lets_a_turn_in_hand_finish(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    stop = Stop()

    class Stopping(Producer):
        async def deliver(self, records: Sequence[Record]) -> Publication:
            stop.request()
            return await super().deliver(records)

    await scene.emit([note(topic, "k", 1)])
    await scene.relay(scene.producer(broker.address, Stopping)).run(stop)
    assert await pending(admin) == 0
    assert broker.expect(topic, "test.noted").payload == {"number": 1}


# --- the broker is away


async def test_while_the_broker_is_down_no_transaction_is_opened_and_nothing_is_lost(
    scene: Scene, topic: str, note: Note, admin: Connection
):
    await scene.emit([note(topic, "k", n) for n in range(5)])
    stop = Counting(lambda count: stop.request() if count == 20 else None)
    await scene.relay(scene.producer(NOWHERE)).run(stop)
    sessions = "select count(*) from pg_stat_activity where application_name = 'relay'"
    assert await admin.fetchval(sessions) == 0
    rows = await admin.fetch("select attempts, parked_at from crm.outbox order by id")
    assert [tuple(row) for row in rows] == [(0, None)] * 5
    assert scene.registry.get_sample_value("pin_outbox_turn_failures_total", {"reason": "BrokerUnavailable"}) == 20


async def test_pauses_grow_to_a_limit_with_jitter(scene: Scene):
    stop = Counting(lambda count: stop.request() if count == 12 else None)
    await scene.relay(scene.producer(NOWHERE)).run(stop)
    expected = [min(FIRST_BACKOFF * 2**n, LONGEST_BACKOFF) for n in range(12)]
    ratios = [wait / pause for wait, pause in zip(stop.waits, expected, strict=True)]
    assert all(0.5 <= ratio <= 1.5 for ratio in ratios)
    assert len(set(ratios)) > 6


async def test_rows_are_published_when_the_broker_is_back_and_the_next_pause_is_short_again(
    scene: Scene, own_broker: EmbeddedBroker, note: Note, admin: Connection, topic: str
):
    await create_topics(KafkaAddress(own_broker.bootstrap), [TopicSpec(topic, 1)])
    await scene.emit([note(topic, "k", n) for n in range(3)])
    own_broker.stop()

    async def at_wait(count: int) -> None:
        if count == 4:
            own_broker.resume()
        elif count == 5:
            own_broker.stop()
            producer._ack_timeout = 0.5
            await scene.emit([note(topic, "k", 3)])
        elif count == 7:
            stop.request()

    stop = Counting(at_wait)
    producer = scene.producer(KafkaAddress(own_broker.bootstrap))
    await scene.relay(producer, interval=33.0).run(stop)
    assert stop.waits[3] >= FIRST_BACKOFF * 8 * 0.5
    assert stop.waits[4] == 33.0, "it has published, and rests"
    assert FIRST_BACKOFF * 0.5 <= stop.waits[5] <= FIRST_BACKOFF * 1.5
    assert await admin.fetchval("select array_agg(payload) from crm.outbox") == [b'{"number":3}']


async def test_a_broker_that_hangs_holds_a_transaction_no_longer_than_the_acknowledgement_may_take(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    await scene.emit([note(topic, "k", 1)])
    async with kafka_proxy(port_of(broker)) as proxy:
        proxy.judge = lambda request: Fate.HANG if request.api == PRODUCE else Fate.PASS
        producer = scene.producer(KafkaAddress(proxy.bootstrap))
        relay = scene.relay(producer)
        await producer.connect()
        producer._ack_timeout = 0.3
        with pytest.raises(BrokerUnavailable):
            async with asyncio.timeout(5):
                await relay.run_once()
    locks = """
        select count(*) from pg_locks l join pg_database d on d.oid = l.database
        where l.locktype = 'advisory' and d.datname = current_database()
    """
    assert await admin.fetchval(locks) == 0
    assert await pending(admin) == 1
    assert await drain(scene.relay(scene.producer(broker.address))) == [1]


# --- the database is away


class Killing(Producer):
    """Ends the relay's connections once, after the broker has acknowledged and before the rows are deleted."""

    admin: Connection
    kills = 1

    async def deliver(self, records: Sequence[Record]) -> Publication:
        publication = await super().deliver(records)
        if self.kills:
            self.kills -= 1
            await self.admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'relay'"
            )
        return publication


@pytest.mark.req("EVT-030")
async def test_a_crash_between_acknowledgement_and_delete_sends_the_same_ids_again(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    await scene.emit([note(topic, "k", n) for n in range(3)])
    producer = scene.producer(broker.address, Killing)
    producer.admin = admin
    stop = Counting(lambda count: stop.request() if count == 2 else None)
    await scene.relay(producer).run(stop)
    assert await pending(admin) == 0
    with broker.reading(topic, from_beginning=True) as reader:
        events = reader.until(lambda seen: len(seen) >= 6)
    ids = [event.id for event in events]
    assert ids[:3] == ids[3:]
    assert len(set(ids)) == 3
    assert scene.registry.get_sample_value("pin_outbox_published_total") == 3


async def test_a_running_relay_outlives_the_end_of_all_its_connections(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection, eventually: Callable
):
    stop = Stop()
    producer = scene.producer(broker.address)
    running = [asyncio.create_task(scene.relay(producer, relays=2, interval=0.05).run(stop)) for _ in range(2)]
    with broker.reading(topic) as reader:
        for number in range(3):
            await admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name in ('relay', 'emitting')"
            )
            await scene.emit([note(topic, "k", number)])
            await asyncio.to_thread(reader.until, lambda seen, number=number: has(seen, number), 10)

    async def sent() -> bool:
        return await pending(admin) == 0

    await eventually(sent)
    assert not any(task.done() for task in running)
    stop.request()
    await asyncio.gather(*running)


def has(seen: list[Event], number: int) -> bool:
    return any(event.payload["number"] == number for event in seen)


async def test_an_error_in_the_relays_own_sql_is_not_waited_out(scene: Scene, broker: TestBroker):
    relay = scene.relay(scene.producer(broker.address))
    relay._sql["lock"] = "select no_such_column from crm.outbox where lane = $1 + $2"
    with pytest.raises(asyncpg.UndefinedColumnError):
        async with asyncio.timeout(5):
            await relay.run(Stop())


# --- figures


@pytest.mark.req("EVT-109")
async def test_the_watch_shows_age_and_number_of_unpublished_rows(
    scene: Scene, broker: TestBroker, topic: str, note: Note, admin: Connection
):
    watch = OutboxWatch(scene.database, "crm", scene.metrics)
    await watch.observe()
    assert scene.registry.get_sample_value("pin_outbox_oldest_age_seconds") == 0
    assert scene.registry.get_sample_value("pin_outbox_pending") == 0
    await scene.emit([note(topic, "k", n) for n in range(3)])
    await admin.execute(
        "update crm.outbox set created_at = created_at - interval '90 s' where id = (select min(id) from crm.outbox)"
    )
    await watch.observe()
    assert 90 <= scene.registry.get_sample_value("pin_outbox_oldest_age_seconds") < 120
    assert scene.registry.get_sample_value("pin_outbox_pending") == 3
    await drain(scene.relay(scene.producer(broker.address)))
    await watch.observe()
    assert scene.registry.get_sample_value("pin_outbox_oldest_age_seconds") == 0
    assert scene.registry.get_sample_value("pin_outbox_pending") == 0
    assert scene.registry.get_sample_value("pin_outbox_published_total") == 3
    assert scene.registry.get_sample_value("pin_outbox_turn_duration_seconds_count") == 1


async def test_the_watch_goes_on_when_the_database_was_away(scene: Scene, admin: Connection):
    killed: list[int] = []

    def at_wait(count: int) -> None:
        killed.append(count)
        if count == 3:
            stop.request()

    stop = Counting(at_wait)
    await OutboxWatch(Database("postgresql://nobody@127.0.0.1:1/none", application_name="x"), "crm", scene.metrics).run(
        stop
    )
    assert killed == [1, 2, 3]


async def test_the_heartbeat_beats_in_every_turn_and_while_it_waits_for_the_broker(scene: Scene):
    relay = scene.relay(scene.producer(NOWHERE))
    beats: list[float] = []

    def at_wait(count: int) -> None:
        beats.append(relay.heartbeat._last)
        if count == 3:
            stop.request()

    stop = Counting(at_wait)
    await relay.run(stop)
    assert all(a < b for a, b in pairwise(beats))


def test_the_longest_pause_is_shorter_than_the_silence_that_counts_as_dead():
    assert relay_module.LONGEST_BACKOFF * 1.5 + 10 < 60
