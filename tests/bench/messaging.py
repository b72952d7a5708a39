"""The relay against the bare producer of the same library, and how long a committed event takes to a waiting
consumer."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import uuid4

import asyncpg
import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from prometheus_client import CollectorRegistry

from chassis.db import Database
from chassis.ids import new_id
from chassis.messaging import KafkaAddress, Producer
from chassis.outbox import Cause, Message, Outbox
from chassis.relay import Floor, Relay, RelayMetrics, Wakeup
from chassis.runtime import Stop
from crm.domain import DealTimelineEventType, StepOverdue
from crm.messages import to_message
from tests.bench.report import Figure

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TOPIC = "pin.crm.timeline-overdue.v1"
ROWS = 20_000
KEYS = [uuid4() for _ in range(1000)]
OUTBOX = Outbox("crm")


def overdue_message(number: int) -> Message:
    """Return one overdue event; a thousand keys take turns."""
    step = StepOverdue(KEYS[number % 1000], uuid4(), KEYS[0], DealTimelineEventType.DOCUMENT_REQUESTED, NOW, NOW)
    return to_message(step, NOW)


async def fill(database: Database, rows: int) -> None:
    """Put events into the outbox."""
    for start in range(0, rows, 1000):
        async with database.write() as session:
            batch = [overdue_message(start + n) for n in range(min(1000, rows - start))]
            await OUTBOX.emit(session, batch, Cause(str(uuid4())))


def relays(database: Database, address: KafkaAddress, wakeup: Wakeup, workers: int = 2) -> tuple[Producer, list[Relay]]:
    """Return a relay as crm wires it: two workers on one producer."""
    producer = Producer(address, client_id="bench")
    metrics = RelayMetrics(CollectorRegistry())
    floor = Floor("crm")
    made = [
        Relay(
            database,
            producer,
            schema="crm",
            wakeup=wakeup,
            metrics=metrics,
            relays=workers,
            interval=60.0,
            floor=floor,
        )
        for _ in range(workers)
    ]
    return producer, made


async def relay_once(database: Database, address: KafkaAddress, admin: "asyncpg.Connection[asyncpg.Record]") -> float:
    """Drain a full outbox; return rows per second."""
    await fill(database, ROWS)
    producer, workers = relays(database, address, Wakeup())
    await producer.connect()
    started = time.perf_counter()

    async def drain(relay: Relay) -> None:
        while (turn := await relay.run_once()).published or turn.more:
            pass

    await asyncio.gather(*(drain(worker) for worker in workers))
    seconds = time.perf_counter() - started
    assert await admin.fetchval("select count(*) from crm.outbox") == 0
    await producer.close()
    return ROWS / seconds


async def bare_once(records: list[tuple[bytes, bytes, list[tuple[str, bytes]]]], address: KafkaAddress) -> float:
    """Send the same records with the bare idempotent producer; return records per second."""
    producer = AIOKafkaProducer(
        bootstrap_servers=address.bootstrap, enable_idempotence=True, acks="all", linger_ms=5, max_batch_size=256 * 1024
    )
    await producer.start()
    started = time.perf_counter()
    waiting = [
        await producer.send(TOPIC, value, key=key, headers=headers, partition=None) for key, value, headers in records
    ]
    await asyncio.gather(*waiting)
    seconds = time.perf_counter() - started
    await producer.stop()
    return len(records) / seconds


async def throughput(database: Database, admin_url: str, address: KafkaAddress) -> list[Figure]:
    """Alternate relay and bare producer over the same records."""
    admin = await asyncpg.connect(admin_url)
    try:
        await fill(database, ROWS)
        rows = await admin.fetch("select message_key, payload, headers::text as headers from crm.outbox order by id")
        await admin.execute("delete from crm.outbox")
        records = [
            (r["message_key"].encode(), r["payload"], [(k, v.encode()) for k, v in orjson.loads(r["headers"]).items()])
            for r in rows
        ]
        ours: list[float] = []
        bare: list[float] = []
        for _ in range(4):
            ours.append(await relay_once(database, address, admin))
            bare.append(await bare_once(records, address))
    finally:
        await admin.close()
    mine, base = statistics.median(ours[1:]), statistics.median(bare[1:])
    return [
        Figure(
            "relay (outbox to acknowledged, order per key), records per second against the bare producer",
            ratio=mine / base,
            bar=0.55,
            aim=0.8,
            detail=f"{mine:.0f}/s against {base:.0f}/s",
        )
    ]


@asynccontextmanager
async def waiting_consumer(address: KafkaAddress) -> AsyncIterator[AIOKafkaConsumer]:
    """A consumer at the end of the topic, polling."""
    consumer = AIOKafkaConsumer(
        TOPIC, bootstrap_servers=address.bootstrap, auto_offset_reset="latest", fetch_max_wait_ms=500
    )
    await consumer.start()
    await consumer.seek_to_end()
    for partition in consumer.assignment():
        await consumer.position(partition)
    try:
        yield consumer
    finally:
        await consumer.stop()


async def latency(database: Database, address: KafkaAddress, wakeup: Wakeup, samples: int = 150) -> list[Figure]:
    """Compare commit -> consumer through a waiting relay with one commit plus one bare produce -> consumer."""
    producer, workers = relays(database, address, wakeup)
    stop = Stop()
    tasks = [asyncio.create_task(worker.run(stop)) for worker in workers]
    bare_producer = AIOKafkaProducer(bootstrap_servers=address.bootstrap, enable_idempotence=True, acks="all")
    await bare_producer.start()
    through: list[float] = []
    commits: list[float] = []
    bare: list[float] = []
    async with waiting_consumer(address) as consumer:
        for number in range(samples):
            started = time.perf_counter()
            async with database.write() as session:
                await OUTBOX.emit(session, [overdue_message(number)], Cause(str(new_id())))
            await consumer.getone()
            through.append(time.perf_counter() - started)
            commits.append(await _bare_commit(database, overdue_message(number)))
            started = time.perf_counter()
            await bare_producer.send_and_wait(TOPIC, b"{}", key=str(KEYS[number % 1000]).encode())
            await consumer.getone()
            bare.append(time.perf_counter() - started)
    stop.request()
    await asyncio.gather(*tasks)
    await bare_producer.stop()
    await producer.close()
    mine, base = statistics.median(through), statistics.median(commits) + statistics.median(bare)
    return [
        Figure(
            "idle latency, commit to consumer, p50 against one commit plus one bare produce and consume",
            ratio=mine / base,
            bar=3.0,
            lower_is_better=True,
            detail=f"{mine * 1000:.1f} ms against {base * 1000:.1f} ms; p99 {_p99(through) * 1000:.1f} ms",
        )
    ]


async def _bare_commit(database: Database, message: Message) -> float:
    """Return seconds of the same insert committed and deleted again, unseen by the relay."""
    connection = await asyncpg.connect(database.url)
    try:
        started = time.perf_counter()
        async with connection.transaction():
            await connection.execute(
                "insert into crm.audit_log (occurred_at, action, entity_type, entity_id, correlation_id, details)"
                " values ($1, 'bench', 'bench', $2, 'bench', '{}')",
                NOW,
                message.event_id,
            )
        return time.perf_counter() - started
    finally:
        await connection.close()


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]
