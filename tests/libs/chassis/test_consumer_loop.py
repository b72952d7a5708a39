"""The poll loop on a real broker: what is read, committed, read again, and survived."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from consumer_world import Desk, handling_of, letters, notes_consumer, send_notes, written

from chassis.consumers import ConsumerLoop
from chassis.db import Database
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker

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
