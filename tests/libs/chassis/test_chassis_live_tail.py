"""The tail of a real topic: from its end on, through the loss of every connection, and with word of what is gone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import orjson
import pytest
from kafka_proxy import Fate, kafka_proxy
from prometheus_client import CollectorRegistry

from chassis.live import LiveEvent, LiveTail, StreamUnavailable
from chassis.messaging import KafkaAddress, Producer, Received, Record
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker

pytestmark = pytest.mark.messaging


def read(record: Received) -> LiveEvent:
    return LiveEvent("all", "said", record.value or b"")


@asynccontextmanager
async def following(address: KafkaAddress, topic: str, begun: dict[int, int] | None = None) -> AsyncIterator[LiveTail]:
    live, stop = LiveTail(address, topic, read, CollectorRegistry()), Stop()
    live._next = dict(begun or {})
    running = asyncio.create_task(live.run(stop))
    yield live
    stop.request()
    async with asyncio.timeout(10):
        await running


async def say(broker: TestBroker, topic: str, *numbers: int) -> None:
    producer = Producer(broker.address, client_id="test")
    await producer.publish([Record(topic, b"key", orjson.dumps(number), []) for number in numbers])
    await producer.close()


async def test_what_comes_from_now_on_is_seen_through_the_loss_of_every_connection(
    broker: TestBroker, topic: str, eventually: Callable
):
    await say(broker, topic, 1, 2)
    async with (
        kafka_proxy(int(broker.running.bootstrap.rpartition(":")[2])) as proxy,
        following(KafkaAddress(proxy.bootstrap), topic) as live,
    ):
        await eventually(lambda: live.position() != "")
        with live.watching("me", "all", None) as watcher:
            seen = await watcher.next(0) or b""
            await say(broker, topic, 3)
            while b"data: 3" not in seen:
                seen += await watcher.next(10) or b""
            proxy.judge = lambda _: Fate.CUT
            await proxy.close()
            await say(broker, topic, 4, 5)
            proxy.judge = lambda _: Fate.PASS
            while b"data: 5" not in seen:
                seen += await watcher.next(10) or b""
    said = [line for line in seen.decode().splitlines() if line.startswith("data")]
    assert said == ["data: 3", "data: 4", "data: 5"]
    assert b"resync" not in seen


async def test_positions_that_are_gone_let_all_read_anew(broker: TestBroker, topic: str, eventually: Callable):
    await say(broker, topic, 1)
    async with following(broker.address, topic) as probe:
        await eventually(lambda: probe.position() != "")
        partitions = len(probe._next)
    gone = dict.fromkeys(range(partitions), 1_000_000)
    async with following(broker.address, topic, gone) as live:
        with live.watching("me", "all", None) as watcher:
            seen = b""
            while b"event: resync" not in seen:
                seen += await watcher.next(10) or b""
            await say(broker, topic, 2)
            while b"data: 2" not in seen:
                seen += await watcher.next(10) or b""
    assert "1000000" not in live.position()


async def test_without_its_topic_nothing_is_promised(broker: TestBroker, eventually: Callable):
    async with following(broker.address, "no.such.topic") as live:
        await eventually(lambda: live.heartbeat.alive)
        with pytest.raises(StreamUnavailable):
            live.check("me")
