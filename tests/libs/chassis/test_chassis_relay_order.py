"""A hundred events of one key through ten relays and a jittery network; and without lanes, to see the test fail."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import pytest
from kafka_proxy import kafka_proxy
from prometheus_client import CollectorRegistry

from chassis.db import Database, driver_connection
from chassis.messaging import KafkaAddress, Producer
from chassis.outbox import Cause, Message, Outbox
from chassis.relay import Relay, RelayMetrics, Wakeup
from chassis.relay.worker import _record
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker, TestDatabase

pytestmark = pytest.mark.messaging

EVENTS = 100
RELAYS = 10
JITTER = 0.05
OUTBOX = Outbox("crm")
Opened = Callable[..., Database]
Note = Callable[..., Message]
Loop = Callable[[Database, Producer, Stop], Coroutine[Any, Any, None]]


async def through(
    loop: Loop, broker: TestBroker, opened: Opened, url: str, emit: Callable[[], Coroutine[Any, Any, None]], topic: str
) -> list[int]:
    """Run ten relays, each with connections and jitter of its own; return the numbers in order of arrival."""
    stop = Stop()
    async with AsyncExitStack() as stack:
        running: list[asyncio.Task[None]] = []
        for number in range(RELAYS):
            proxy = await stack.enter_async_context(kafka_proxy(int(broker.running.bootstrap.rpartition(":")[2])))
            proxy.delay = JITTER
            proxy.chance.seed(number)
            producer = Producer(KafkaAddress(proxy.bootstrap), client_id=f"relay-{number}")
            stack.push_async_callback(producer.close)
            database = opened(url, pool_size=1)
            running.append(asyncio.create_task(loop(database, producer, stop)))
        await emit()
        with broker.reading(topic, from_beginning=True) as reader:
            await asyncio.to_thread(
                reader.until, lambda seen: len({event.payload["number"] for event in seen}) == EVENTS, 30
            )
        stop.request()
        await asyncio.gather(*running)
    return [event.payload["number"] for event in reader.seen]


async def test_a_hundred_events_of_one_key_arrive_in_order_through_ten_relays(
    scratch: TestDatabase, opened: Opened, broker: TestBroker, topic: str, note: Note
):
    wakeup = Wakeup()
    emitting = opened(scratch.system_url, on_commit=wakeup.set)

    async def emit() -> None:
        for first in range(0, EVENTS, 4):
            async with emitting.write() as session:
                messages = [note(topic, "deal-1", number) for number in range(first, first + 4)]
                await OUTBOX.emit(session, messages, Cause("test"))

    async def with_lanes(database: Database, producer: Producer, stop: Stop) -> None:
        metrics = RelayMetrics(CollectorRegistry())
        relay = Relay(database, producer, schema="crm", wakeup=wakeup, metrics=metrics, relays=RELAYS, interval=0.05)
        await relay.run(stop)

    arrived = await through(with_lanes, broker, opened, scratch.system_url, emit, topic)
    assert arrived == list(range(EVENTS))


async def test_a_relay_without_lanes_sends_the_same_events_out_of_order(
    scratch: TestDatabase, opened: Opened, broker: TestBroker, topic: str, note: Note
):
    """The counter-example: rows claimed by SKIP LOCKED alone. It shows that the test above can fail."""
    emitting = opened(scratch.system_url)

    async def emit() -> None:
        async with emitting.write() as session:
            await OUTBOX.emit(session, [note(topic, "deal-1", number) for number in range(EVENTS)], Cause("test"))

    arrived = await through(_without_lanes, broker, opened, scratch.system_url, emit, topic)
    assert sorted(arrived) == list(range(EVENTS))
    assert arrived != list(range(EVENTS))


async def _without_lanes(database: Database, producer: Producer, stop: Stop) -> None:
    columns = "id, topic, message_key, payload, headers::text as headers"
    claim = f"select {columns} from crm.outbox order by id limit 5 for update skip locked"
    while not stop.requested:
        await producer.connect()
        async with database.write() as session:
            connection = await driver_connection(session)
            rows = await connection.fetch(claim)
            if rows:
                await producer.publish([_record(row) for row in rows])
                await connection.execute("delete from crm.outbox where id = any($1)", [row["id"] for row in rows])
        if not rows:
            await stop.wait(0.05)
