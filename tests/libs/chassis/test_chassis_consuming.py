"""What a consumer shows of itself, and that everything on a topic can be read again from its beginning."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from consumer_world import Desk, Note, notes_consumer, send_notes
from prometheus_client import CollectorRegistry

from chassis.clock import DatabaseClock
from chassis.consumers import Consumer, ConsumerLoop, ConsumerMetrics, Delivery, Handler
from chassis.consumers.handling import Handling
from chassis.consumers.lag import LagWatch
from chassis.db import Database
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker

pytestmark = pytest.mark.messaging


@asynccontextmanager
async def consuming(consumer: Consumer, system: Database, broker: TestBroker) -> AsyncIterator[CollectorRegistry]:
    registry, stop = CollectorRegistry(), Stop()
    handling = Handling(system, consumer, "crm", DatabaseClock(), ConsumerMetrics(registry))
    task = asyncio.create_task(ConsumerLoop(handling, broker.address).run(stop))
    try:
        yield registry
    finally:
        stop.request()
        await asyncio.wait_for(task, 20)


@pytest.mark.req("EVT-121", "EVT-124", "EVT-125")
async def test_poison_latency_age_and_lag_are_shown(
    system: Database, broker: TestBroker, topic: str, eventually: Callable
) -> None:
    desk = Desk()
    consumer = notes_consumer(topic, desk)
    send_notes(broker.running.bootstrap, topic, [("k", 1), ("k", 2)])
    send_notes(broker.running.bootstrap, topic, [("k", 3)], ce_contractversion="99")
    async with consuming(consumer, system, broker) as registry:

        def sample(name: str, **labels: str) -> float:
            labels = {"consumer": consumer.group, **labels}
            return registry.get_sample_value(f"pin_consumer_{name}", labels) or 0.0

        await eventually(lambda: sample("failures_total", kind="contract") == 1 and len(desk.calls) == 2)
        assert sample("dead_letters_total", disposition="quarantine") == 1
        assert sample("failures_total", kind="handler") == 0
        assert sample("batch_duration_seconds_count") >= 1
        assert sample("batch_duration_seconds_sum") > 0
        assert sample("record_age_seconds_count") == 2
    send_notes(broker.running.bootstrap, topic, [("k", number) for number in range(5)])
    seen = CollectorRegistry()
    await LagWatch(broker.address, seen).observe()
    assert seen.get_sample_value("pin_consumer_lag", {"group": consumer.group, "topic": topic}) == 5


@pytest.mark.req("EVT-108")
async def test_another_group_reads_the_same_events_again_from_the_beginning(
    system: Database, broker: TestBroker, topic: str, eventually: Callable
) -> None:
    ids = send_notes(broker.running.bootstrap, topic, [("k", number) for number in range(20)])
    for group in ("pin.crm.test-first", "pin.crm.test-rebuild"):
        read: list[tuple[object, int]] = []

        async def keep(_: object, delivery: Delivery[Note], into: list[tuple[object, int]] = read) -> None:
            into.append((delivery.envelope.event_id, delivery.payload.number))

        consumer = Consumer(f"{group}-{topic[-9:-3]}", [Handler(topic, "test.noted", Note.parse, keep)])
        async with consuming(consumer, system, broker):
            await eventually(lambda found=read: len(found) == 20, 40)
        assert read == [(event_id, number) for number, event_id in enumerate(ids)]
