"""A consumer of numbered notes that fails on purpose, and a foreign producer that writes whatever it is told."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import orjson
from confluent_kafka import Producer as ForeignProducer
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock, DatabaseClock
from chassis.consumers import Consumer, ConsumerMetrics, Delivery, Handler
from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.db import Database, driver_connection
from chassis.messaging import Received

NOTED = "test.noted"


@dataclass(frozen=True)
class Note:
    """What the handler understands of a payload."""

    number: int
    key: str

    @classmethod
    def parse(cls, value: Any) -> "Note":
        return cls(int(value["number"]), str(value["key"]))


@dataclass
class Desk:
    """Where the handler writes, and what it is told to do first.

    `moods` maps a number to a function that raises, waits or returns.
    """

    moods: dict[int, Callable[[], Any]] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)

    async def handle(self, session: AsyncSession, delivery: Delivery[Note]) -> None:
        self.calls.append(delivery.payload.number)
        mood = self.moods.get(delivery.payload.number)
        if mood is not None:
            answer = mood()
            if asyncio.iscoroutine(answer):
                await answer
        await _write(session, delivery.payload.number, delivery.payload.key)

    @staticmethod
    def noting(note: str) -> Callable[[AsyncSession], Awaitable[None]]:
        """Return what writes a note of its own."""

        async def write(session: AsyncSession) -> None:
            await _write(session, 0, note)

        return write


async def _write(session: AsyncSession, rank: int, note: str) -> None:
    connection = await driver_connection(session)
    await connection.execute("insert into crm.thing (id, rank, note) values ($1, $2, $3)", uuid4(), rank, note)


def notes_consumer(topic: str, desk: Desk, **fields: Any) -> Consumer:
    """Return a consumer of one topic."""
    group = f"pin.crm.test-{uuid4().hex[:8]}"
    return Consumer(group, [Handler(topic, NOTED, Note.parse, desk.handle)], **fields)


def handling_of(database: Database, consumer: Consumer, clock: Clock | None = None) -> Handling:
    """Return a consumer's handling on a database."""
    return Handling(database, consumer, "crm", clock or DatabaseClock(), ConsumerMetrics(CollectorRegistry()))


def envelope_headers(event_id: UUID | None = None, **changes: str | None) -> list[tuple[str, bytes]]:
    """Return the headers of a note; a change to None leaves one out."""
    headers: dict[str, str | None] = {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": str(event_id or uuid4()),
        "ce_source": "/pin/test",
        "ce_type": NOTED,
        "ce_time": "2026-11-30T09:00:00Z",
        "ce_subject": "subject",
        "ce_aggregatetype": "Note",
        "ce_contractversion": "1",
        "ce_correlationid": "request-1",
        "ce_eventclass": "domain",
    }
    headers.update(changes)
    return [(name, value.encode()) for name, value in headers.items() if value is not None]


@dataclass
class Tape:
    """Records of one partition, as the broker would give them."""

    topic: str
    partition: int = 0
    records: list[Received] = field(default_factory=list)

    def note(self, key: str, number: int, event_id: UUID | None = None, **headers: str | None) -> Received:
        """Append a note."""
        value = orjson.dumps({"number": number, "key": key})
        return self.raw(key.encode(), value, envelope_headers(event_id, **headers))

    def raw(self, key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> Received:
        """Append any record."""
        stamp = int(datetime.now(UTC).timestamp() * 1000)
        record = Received(self.topic, self.partition, len(self.records), stamp, key, value, tuple(headers))
        self.records.append(record)
        return record


def send_notes(bootstrap: str, topic: str, notes: Sequence[tuple[str, int]], **headers: str | None) -> list[UUID]:
    """Send notes with librdkafka; return their event ids."""
    producer = ForeignProducer({"bootstrap.servers": bootstrap, "partitioner": "murmur2_random", "linger.ms": 5})
    ids = [uuid4() for _ in notes]
    for event_id, (key, number) in zip(ids, notes, strict=True):
        value = orjson.dumps({"number": number, "key": key})
        producer.produce(topic, key=key.encode(), value=value, headers=envelope_headers(event_id, **headers))
        producer.poll(0)
    assert producer.flush(20) == 0
    return ids


async def written(database: Database) -> list[tuple[str, int]]:
    """Return what the handler wrote, in the order of keys and writing."""
    async with database.read() as session:
        rows = await session.execute(text("select note, rank from crm.thing order by ctid"))
        return [(row.note, row.rank) for row in rows]


async def letters(database: Database, columns: str = "disposition, error_code") -> list[tuple[Any, ...]]:
    """Return the dead letters, in order."""
    async with database.read() as session:
        rows = await session.execute(text(f"select {columns} from crm.dead_letter order by position"))
        return [tuple(row) for row in rows]


def batches_of(handling: Handling) -> Batches:
    """Return the batches of a handling."""
    return Batches(handling)
