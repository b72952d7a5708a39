"""The poll loop on a real broker: what is read, committed, read again, and survived."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

import orjson
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from confluent_kafka import Producer as ForeignProducer
from consumer_world import (
    NOTED,
    Desk,
    Note,
    envelope_headers,
    handling_of,
    letters,
    notes_consumer,
    send_notes,
    written,
)
from prometheus_client import CollectorRegistry

from chassis.consumers import Consumer, ConsumerLoop, Handler
from chassis.consumers import loop as loop_module
from chassis.consumers.lag import LagWatch
from chassis.db import Database
from chassis.messaging import GroupReader, KafkaAddress, Received, TopicSpec, create_topics
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker
from chassis.testing.servers import EmbeddedBroker

pytestmark = pytest.mark.messaging


@asynccontextmanager
async def running(loop: ConsumerLoop) -> AsyncIterator[asyncio.Task]:
    stop = Stop()
    task = asyncio.create_task(loop.run(stop))
    try:
        yield task
    finally:
        stop.request()
        await asyncio.wait_for(task, 20)


async def test_records_are_handled_once_and_in_the_order_of_their_key(
    system: Database, broker: TestBroker, topic: str, eventually: Callable
) -> None:
    desk = Desk()
    loop = ConsumerLoop(handling_of(system, notes_consumer(topic, desk)), broker.address)
    send_notes(broker.running.bootstrap, topic, [(f"key {n % 3}", n) for n in range(300)])
    async with running(loop):
        await eventually(lambda: len(desk.calls) >= 300)
    assert sorted(rank for _, rank in await written(system)) == list(range(300))
    for key in ("key 0", "key 1", "key 2"):
        ranks = [rank for note, rank in await written(system) if note == key]
        assert ranks == sorted(ranks)
    assert await letters(system) == []


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
async def test_what_a_foreign_producer_compresses_is_read(
    system: Database, broker: TestBroker, topic: str, eventually: Callable, codec: str
) -> None:
    """Whoever can't decompress a batch reads it again for ever, and nothing behind it."""
    desk = Desk()
    loop = ConsumerLoop(handling_of(system, notes_consumer(topic, desk)), broker.address)
    producer = ForeignProducer(
        {"bootstrap.servers": broker.running.bootstrap, "compression.type": codec, "linger.ms": 50}
    )
    for number in range(20):
        value = orjson.dumps({"number": number, "key": "k" * 200})
        producer.produce(topic, key=b"k", value=value, headers=envelope_headers())
    assert producer.flush(20) == 0
    async with running(loop):
        await eventually(lambda: desk.calls == list(range(20)))


async def test_what_a_foreign_producer_takes_back_has_no_effect(
    system: Database, broker: TestBroker, topic: str, eventually: Callable
) -> None:
    if broker.running.kind == "embedded":
        pytest.skip("the embedded broker keeps no marks of transactions")
    desk = Desk()
    loop = ConsumerLoop(handling_of(system, notes_consumer(topic, desk)), broker.address)
    producer = ForeignProducer({"bootstrap.servers": broker.running.bootstrap, "transactional.id": topic})
    producer.init_transactions(20)
    keep, take_back = producer.commit_transaction, producer.abort_transaction
    for number, end in enumerate((keep, take_back, keep)):
        producer.begin_transaction()
        value = orjson.dumps({"number": number, "key": "k"})
        producer.produce(topic, key=b"k", value=value, headers=envelope_headers())
        producer.flush(20)
        end(20)
    async with running(loop):
        await eventually(lambda: 2 in desk.calls)
    assert desk.calls == [0, 2]


@pytest.mark.xfail(strict=True, reason="the client library decodes the names of headers strictly")
async def test_a_header_name_that_is_not_utf8_stops_nobody(
    system: Database, broker: TestBroker, topic: str, eventually: Callable
) -> None:
    class Bytes(str):
        def encode(self, *_: object) -> bytes:
            return b"\xff"

    desk = Desk()
    producer = AIOKafkaProducer(bootstrap_servers=broker.running.bootstrap)
    await producer.start()
    batch = producer.create_batch()
    batch._builder = _DefaultRecordBatchBuilderPy(2, 0, 0, -1, -1, -1, 10_000)
    batch.append(timestamp=0, key=b"bad", value=b"{}", headers=[(Bytes("x"), b"")])
    await (await producer.send_batch(batch, topic, partition=0))
    await producer.stop()
    send_notes(broker.running.bootstrap, topic, [("k", 1)])
    async with running(ConsumerLoop(handling_of(system, notes_consumer(topic, desk)), broker.address)) as task:
        await eventually(lambda: desk.calls == [1] or task.done())
        assert desk.calls == [1]


@pytest.mark.req("EVT-026", "EVT-027", "EVT-033")
async def test_killed_between_database_and_offset_a_record_is_read_again_and_has_one_effect(
    system: Database, broker: TestBroker, topic: str, eventually: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk()
    consumer = notes_consumer(topic, desk)
    send_notes(broker.running.bootstrap, topic, [("k", n) for n in range(20)])
    with monkeypatch.context() as patched:

        async def killed(*_: object) -> bool:
            raise asyncio.CancelledError

        patched.setattr(GroupReader, "acknowledge", killed)
        first = asyncio.create_task(ConsumerLoop(handling_of(system, consumer), broker.address).run(Stop()))
        await asyncio.wait([first], timeout=30)
        assert first.cancelled()
    handled = len(desk.calls)
    assert handled > 0
    handling = handling_of(system, consumer)
    async with running(ConsumerLoop(handling, broker.address)):
        duplicates = handling.metrics.duplicates.labels(consumer.group)._value
        await eventually(lambda: len(desk.calls) == 20 and duplicates.get() >= handled)
    assert await written(system) == [("k", n) for n in range(20)]


@pytest.mark.req("EVT-027", "EVT-129")
async def test_members_come_and_go_and_nothing_is_lost_doubled_or_out_of_order(
    system: Database, broker: TestBroker, eventually: Callable
) -> None:
    if broker.running.kind == "embedded":
        pytest.skip("the embedded broker hangs in some rebalances")
    topic = f"pin.test.{uuid4().hex[:12]}.v1"
    await create_topics(broker.address, [TopicSpec(topic, 4)])
    desk = Desk()
    consumer = notes_consumer(topic, desk, batch_size=7)
    first = ConsumerLoop(handling_of(system, consumer), broker.address)
    second = ConsumerLoop(handling_of(system, consumer), broker.address)
    send_notes(broker.running.bootstrap, topic, [(f"key {n % 8}", n) for n in range(200)])
    async with running(first):
        await eventually(lambda: len(desk.calls) > 20)
        async with running(second):
            send_notes(broker.running.bootstrap, topic, [(f"key {n % 8}", n) for n in range(200, 400)])
            await eventually(lambda: len(desk.calls) >= 400, seconds=40)
        send_notes(broker.running.bootstrap, topic, [(f"key {n % 8}", n) for n in range(400, 480)])
        await eventually(lambda: len(desk.calls) >= 480, seconds=40)
    rows = await written(system)
    assert sorted(rank for _, rank in rows) == list(range(480))
    for key in range(8):
        ranks = [n for n in desk.calls if n % 8 == key]
        assert ranks == sorted(ranks)
    assert await letters(system) == []


@pytest.mark.req("EVT-110", "EVT-111")
async def test_a_broker_that_was_away_is_read_again_and_stopping_leaves_no_task(
    system: Database, own_broker: EmbeddedBroker, eventually: Callable
) -> None:
    address = KafkaAddress(own_broker.bootstrap)
    topic = "pin.test.away.v1"
    await create_topics(address, [TopicSpec(topic, 1)])
    desk = Desk()
    before = asyncio.all_tasks()
    async with running(ConsumerLoop(handling_of(system, notes_consumer(topic, desk)), address)) as task:
        send_notes(own_broker.bootstrap, topic, [("k", 1)])
        await eventually(lambda: desk.calls == [1])
        own_broker.stop()
        await asyncio.wait([task], timeout=3)
        assert not task.done()
        own_broker.resume()
        send_notes(own_broker.bootstrap, topic, [("k", 2)])
        await eventually(lambda: 2 in desk.calls, seconds=60)
    assert await written(system) == [("k", 1), ("k", 2)]
    await eventually(lambda: asyncio.all_tasks() <= before)


async def test_a_missing_topic_starves_nobody_and_is_read_when_it_comes(
    system: Database, broker: TestBroker, topic: str, eventually: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LOOK_FOR_TOPICS", 1.0)
    late, desk = f"pin.test.{uuid4().hex[:12]}.v1", Desk()
    handlers = [Handler(name, NOTED, Note.parse, desk.handle) for name in (topic, late)]
    consumer = Consumer(f"pin.crm.test-{uuid4().hex[:8]}", handlers)
    send_notes(broker.running.bootstrap, topic, [("k", 1)])
    async with running(ConsumerLoop(handling_of(system, consumer), broker.address)):
        await eventually(lambda: desk.calls == [1])
        await create_topics(broker.address, [TopicSpec(late, 1)])
        send_notes(broker.running.bootstrap, late, [("k", 2)])
        await eventually(lambda: desk.calls == [1, 2], seconds=30)


async def test_a_member_that_gets_nothing_though_records_wait_is_replaced(
    system: Database, broker: TestBroker, topic: str, eventually: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "LONGEST_STALL", 1.5)
    polled, deaf = GroupReader.poll, []

    async def hears_nothing(self: GroupReader, seconds: float, limit: int) -> list[Received]:
        if not deaf:
            deaf.append(self)
        if self in deaf:
            await Stop().wait(0.1)
            return []
        return await polled(self, seconds, limit)

    monkeypatch.setattr(GroupReader, "poll", hears_nothing)
    desk = Desk()
    send_notes(broker.running.bootstrap, topic, [("k", 1)])
    async with running(ConsumerLoop(handling_of(system, notes_consumer(topic, desk)), broker.address)):
        await eventually(lambda: desk.calls == [1], seconds=40)


@pytest.mark.req("EVT-121", "EVT-127")
async def test_the_lag_of_a_dead_consumer_is_seen_by_another_process(
    system: Database, broker: TestBroker, topic: str, eventually: Callable
) -> None:
    desk = Desk()
    consumer = notes_consumer(topic, desk)
    send_notes(broker.running.bootstrap, topic, [("k", n) for n in range(3)])
    async with running(ConsumerLoop(handling_of(system, consumer), broker.address)):
        await eventually(lambda: len(desk.calls) == 3)
    send_notes(broker.running.bootstrap, topic, [("k", n) for n in range(5)])
    registry = CollectorRegistry()
    await LagWatch(broker.address, registry).observe()
    assert registry.get_sample_value("pin_consumer_lag", {"group": consumer.group, "topic": topic}) == 5


async def test_the_lag_of_a_consumer_that_never_came_counts_from_the_beginning(broker: TestBroker, topic: str) -> None:
    consumer = notes_consumer(topic, Desk())
    send_notes(broker.running.bootstrap, topic, [("k", n) for n in range(4)])
    registry = CollectorRegistry()
    await LagWatch(broker.address, registry, [consumer]).observe()
    assert registry.get_sample_value("pin_consumer_lag", {"group": consumer.group, "topic": topic}) == 4
