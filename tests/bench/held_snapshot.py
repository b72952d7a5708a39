"""The relay while another session holds a snapshot, which keeps deleted rows in the indexes; and behind parked rows.

HELD_SECONDS says for how long (120 in the official run); rows go through all the while.
"""

import asyncio
import os
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


async def _rate(database: Database, workers: list[Relay], seconds: float) -> tuple[float, int]:
    """Fill and drain again and again; return rows per second of draining in the last quarter, and rows in all."""
    started = time.perf_counter()
    rates: list[tuple[float, float]] = []

    async def drain(relay: Relay) -> None:
        while (turn := await relay.run_once()).published or turn.more:
            pass

    while time.perf_counter() - started < seconds or len(rates) < 4:
        await fill(database, ROWS)
        began = time.perf_counter()
        await asyncio.gather(*(drain(worker) for worker in workers))
        rates.append((began - started, ROWS / (time.perf_counter() - began)))
    last = [rate for _, rate in rates[-max(1, len(rates) // 4) :]]
    return len(last) / sum(1 / rate for rate in last), len(rates) * ROWS


async def held_snapshot(database: Database, admin_url: str, address: KafkaAddress) -> list[Figure]:
    """Compare throughput at the end of a held snapshot with throughput without one, before it and after it."""
    producer, workers = relays(database, address, Wakeup())
    await producer.connect()
    admin = await asyncpg.connect(admin_url)
    try:
        await _rate(database, workers, 0)
        before, _ = await _rate(database, workers, HELD_SECONDS / 4)
        async with admin.transaction(isolation="repeatable_read"):
            await admin.fetchval("select count(*) from crm.outbox")
            during, rows = await _rate(database, workers, HELD_SECONDS)
        await admin.execute("vacuum crm.outbox")
        after, _ = await _rate(database, workers, HELD_SECONDS / 4)
    finally:
        await admin.close()
        await producer.close()
    base = (before + after) / 2
    return [
        Figure(
            f"relay while a snapshot is held ({HELD_SECONDS:.0f} s), throughput at its end against without",
            ratio=during / base,
            bar=0.8,
            detail=f"{during:.0f}/s against {before:.0f}/s before and {after:.0f}/s after; {rows} rows meanwhile",
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
