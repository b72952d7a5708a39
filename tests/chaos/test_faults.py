"""Every kind of fault, under load, in a seeded order; after each: nothing lost, nothing doubled, every key in order.

CHAOS_FAULTS says how many (`make chaos` does a long run) and CHAOS_ONLY which kinds; a failing run prints its seed,
which CHAOS_SEED repeats.
"""

import asyncio
import os
from collections import defaultdict
from pathlib import Path
from uuid import UUID

import pytest

from chassis.ids import derived_event_id
from chassis.runtime import Stop
from chassis.testing.kafka import Event, RunningBroker, TopicReader, cache_folder
from chassis.testing.servers import EmbeddedPostgres
from tests.chaos.harness import OUT, WRITERS, Platform, prepare, seeded
from tests.chaos.ledger import BOOKED, GROUP
from tests.libs.chassis.kafka_proxy import kafka_proxy

FAULTS = int(os.environ.get("CHAOS_FAULTS") or (9 if os.environ.get("PIN_KAFKA") else 4))
ONLY = os.environ.get("CHAOS_ONLY", "")
DURABLE = {"fsync": "off", "synchronous_commit": "on"}
"""A commit survives the server's crash, though not the machine's."""

pytestmark = [pytest.mark.chaos, pytest.mark.messaging, pytest.mark.xdist_group("chaos")]


@pytest.mark.req("EVT-026", "EVT-027", "EVT-028", "EVT-031", "EVT-033", "EVT-110")
async def test_nothing_is_lost_doubled_or_reordered_whatever_fails(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    root = pytestconfig.rootpath
    postgres = EmbeddedPostgres.start(tmp_path / "postgres", settings=DURABLE)
    broker = RunningBroker.start(tmp_path / "broker", cache_folder(root))
    try:
        with seeded() as chance:
            source, ledger = await prepare(root, tmp_path, postgres, broker.bootstrap)
            async with kafka_proxy(int(broker.bootstrap.rpartition(":")[2])) as proxy:
                platform = Platform(root, tmp_path, chance, postgres, broker, proxy, source, ledger)
                await _hurt_it(platform)
    finally:
        broker.stop()
        postgres.stop()


async def _hurt_it(platform: Platform) -> None:
    stopping = Stop()
    platform.start()
    try:
        writers = [asyncio.create_task(platform.write(stopping, number)) for number in range(WRITERS)]
        await platform.hurt(_nothing)
        todo = []
        for _ in range(FAULTS):
            if not todo:
                kinds = [fault for fault in platform.faults() if fault.__name__ in (ONLY or fault.__name__)]
                todo = platform.random.sample(kinds, len(kinds))
            await platform.hurt(todo.pop())
        stopping.request()
        await asyncio.gather(*writers)
        await platform.hurt(_nothing)
        await _check_bookings(platform)
    finally:
        stopping.request()
        platform.end()


async def _nothing() -> float:
    return 60.0


async def _check_bookings(platform: Platform) -> None:
    """What the ledger announced: one id per note, derived from its cause, and in order once repeats are left out."""
    written = await platform.written()
    assert await platform.booked() == written
    reader = TopicReader(platform.broker.bootstrap, [OUT])
    expected = await platform.event_ids()
    derived = {str(derived_event_id(event_id, BOOKED, 0, GROUP)) for event_id in map(UUID, expected)}

    def all_there(events: list[Event]) -> bool:
        return derived <= {event.id for event in events}

    events = await asyncio.to_thread(reader.until, all_there, 60)
    reader.close()
    assert {event.id for event in events} == derived, "handling twice gives the same ids"
    first: dict[str, Event] = {}
    numbers = defaultdict(list)
    for event in events:
        if event.id not in first:
            first[event.id] = event
            numbers[event.key].append(event.payload["number"])
    out_of_order = sum(found != sorted(found) for found in numbers.values())
    assert out_of_order == 0
    print(platform.report())
    print(
        f"{len(platform.outcomes) - 2} faults, {platform.restarts} processes replaced, {written} notes written,"
        f" {written} booked (0 lost, 0 doubled, 0 out of order), {len(events)} records announced,"
        f" {len(events) - len(first)} of them repeated with the same id"
    )
