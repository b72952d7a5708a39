"""The relay while another session holds a snapshot, which keeps deleted rows in the indexes; and behind parked rows.

HELD_SECONDS says for how long (120 in the official run); rows go through all the while.
"""

import asyncio
import os
import statistics
import time

import asyncpg
import orjson

from chassis.db import Database
from chassis.messaging import KafkaAddress
from chassis.outbox import lane_of
from chassis.relay import Relay, Wakeup
from tests.bench.messaging import TOPIC, fill, relays
from tests.bench.report import Figure

Connection = asyncpg.Connection
HELD_SECONDS = float(os.environ.get("HELD_SECONDS", "20"))
ROWS = 10_000
BATCH = 4096
PARKED = """
insert into crm.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
                        occurred_at)
select gen_random_uuid(), 'Note', $1, 'x', 'x', '{}', $2, $1, $3, '2026-11-30' from generate_series(1, 100000)
"""


async def _drain_once(database: Database, workers: list[Relay]) -> float:
    """Fill the outbox and drain it; return the seconds of draining."""

    async def drain(relay: Relay) -> None:
        while (turn := await relay.run_once()).published or turn.more:
            pass

    await fill(database, ROWS)
    began = time.perf_counter()
    await asyncio.gather(*(drain(worker) for worker in workers))
    return time.perf_counter() - began


async def held_snapshot(held: Database, free: Database, admin_url: str, address: KafkaAddress) -> list[Figure]:
    """Let two databases take turns, one under a held snapshot, and compare the last third of their turns.

    Taking turns, both see the same load of the machine; a snapshot keeps nothing alive in another database.
    """
    producers = [relays(database, address, Wakeup()) for database in (held, free)]
    pairs = [(database, workers) for database, (_, workers) in zip((held, free), producers, strict=True)]
    for producer, _ in producers:
        await producer.connect()
    admin = await asyncpg.connect(admin_url)
    seconds: list[list[float]] = [[], []]
    try:
        for database, workers in pairs:
            await _drain_once(database, workers)
        async with admin.transaction(isolation="repeatable_read"):
            await admin.fetchval("select count(*) from crm.outbox")
            until = time.perf_counter() + HELD_SECONDS
            while time.perf_counter() < until or len(seconds[0]) < 6:
                for taken, (database, workers) in zip(seconds, pairs, strict=True):
                    taken.append(await _drain_once(database, workers))
    finally:
        await admin.close()
        for producer, _ in producers:
            await producer.close()
    last = max(2, len(seconds[0]) // 3)
    with_it, without = (ROWS / statistics.median(taken[-last:]) for taken in seconds)
    return [
        Figure(
            f"relay while a snapshot is held ({HELD_SECONDS:.0f} s), throughput at its end against without",
            ratio=with_it / without,
            bar=0.8,
            detail=f"{with_it:.0f}/s against {without:.0f}/s; {len(seconds[0]) * ROWS} rows meanwhile",
        )
    ]


async def behind_parked_rows(database: Database, admin_url: str) -> list[Figure]:
    """Count the pages of a claim with 100,000 rows of a parked key that are not marked, against an empty outbox."""
    admin = await asyncpg.connect(admin_url)
    try:
        await fill(database, BATCH)
        await admin.execute("analyze crm.outbox")
        alone = await _pages(database, admin)
        await admin.execute("delete from crm.outbox")
        await admin.execute("vacuum crm.outbox")
        await admin.execute(PARKED, "parked", TOPIC, lane_of("parked"))
        await admin.execute("insert into crm.outbox_parked_key values ('parked', $1, '2026-11-30', 'x', null)", TOPIC)
        await fill(database, BATCH)
        await admin.execute("analyze crm.outbox")
        behind = await _pages(database, admin)
    finally:
        await admin.close()
    return [
        Figure(
            "claim behind 100000 unmarked rows of a parked key, pages read against a claim without them",
            ratio=behind / alone,
            bar=2.0,
            lower_is_better=True,
            detail=f"{behind} pages against {alone}",
        )
    ]


async def _pages(database: Database, admin: "Connection[asyncpg.Record]") -> int:
    relay = relays(database, KafkaAddress("127.0.0.1:1"), Wakeup(), 1)[1][0]
    total = 0
    for statement, arguments in (
        (relay._sql["lock"], (range(64), [0] * 64, 64)),
        (relay._sql["read"], (range(64), [0] * 64, 64)),
    ):
        plan = await admin.fetchval("explain (analyze, buffers, format json) " + statement, *arguments)
        root = orjson.loads(plan)[0]["Plan"]
        total += root["Shared Hit Blocks"] + root["Shared Read Blocks"]
    return total
