"""The relay: takes committed outbox rows to Kafka, in id order per lane, and deletes what was acknowledged.

A turn is one transaction: lock free lanes (advisory, so that the lock ends with the transaction), read their oldest
rows, send, wait for every acknowledgement, delete, commit. If anything fails the rows stay and are sent again with
the same `ce_id`. No transaction is open while the broker can't be reached.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chassis.db import DATABASE_ERRORS, Database, driver_connection, is_infrastructure
from chassis.messaging import BrokerUnavailable, Producer, Record
from chassis.outbox import LANES
from chassis.runtime import Heartbeat, Stop
from chassis.tracing import is_tracing, sending

ROWS_PER_TURN: Final = 4096
ROWS_PER_LANE: Final = 64
FIRST_BACKOFF: Final = 0.2
LONGEST_BACKOFF: Final = 10.0
_TROUBLE: tuple[type[Exception], ...] = (BrokerUnavailable, *DATABASE_ERRORS)
log = structlog.get_logger(__name__)

_LOCK_LANES = """
select lane from (
  select (s + $2) % {lanes} as lane from generate_series(0, {lanes} - 1) as s
  where exists (select from {schema}.outbox where lane = (s + $2) % {lanes} and parked_at is null) offset 0
) as busy
where pg_try_advisory_xact_lock(hashtext('{schema}.outbox'), busy.lane)
limit $1
"""
_READ = """
select o.id, o.topic, o.message_key, o.payload, o.headers::text as headers, o.lane
from unnest($1::smallint[]) as l(lane)
cross join lateral (
  select id, topic, message_key, payload, headers, lane from {schema}.outbox
  where lane = l.lane and parked_at is null order by id limit $2
) as o
"""
_DELETE = "delete from {schema}.outbox where id = any($1::bigint[])"
_AGE = (
    "select coalesce(extract(epoch from clock_timestamp() - min(created_at)), 0)::float8 as age, count(*) as pending"
    " from (select created_at from {schema}.outbox where parked_at is null limit 100000) as o"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did: rows published, and whether a lane may hold more."""

    published: int
    more: bool


class Wakeup:
    """Wakes every relay worker of a process when a commit put rows into the outbox."""

    def __init__(self) -> None:
        self._events: list[asyncio.Event] = []

    def subscribe(self) -> asyncio.Event:
        """Return an event that is set at every wake-up; its holder clears it."""
        event = asyncio.Event()
        self._events.append(event)
        return event

    def set(self) -> None:
        """Wake all workers; one that is busy looks again when it is done."""
        for event in self._events:
            event.set()


class RelayMetrics:
    """What a relay exports; one instance per process and registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.published = Counter("pin_outbox_published_total", "Outbox rows acknowledged.", registry=registry)
        self.failures = Counter("pin_outbox_turn_failures_total", "Turns rolled back.", ["reason"], registry=registry)
        self.oldest = Gauge("pin_outbox_oldest_age_seconds", "Age of the oldest unpublished row.", registry=registry)
        self.pending = Gauge("pin_outbox_pending", "Unpublished rows (counted up to 100000).", registry=registry)
        self.turn_seconds = Histogram(
            "pin_outbox_turn_duration_seconds",
            "Duration of a turn that published something.",
            registry=registry,
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10),
        )


class Relay:
    """One worker of a relay; several, in one process or many, share the lanes.

    Args:
        database: the service's database under its system role.
        producer: where the rows go; workers of one process may share it.
        schema: the service's schema.
        wakeup: set by local commits.
        metrics: shared by the workers of a process.
        relays: how many workers there are in all; each takes at most its share of the 64 lanes.
        interval: seconds between looks when nothing wakes the worker.
        name: the worker's name in logs and health.
    """

    def __init__(
        self,
        database: Database,
        producer: Producer,
        *,
        schema: str,
        wakeup: Wakeup,
        metrics: RelayMetrics,
        relays: int = 1,
        interval: float = 1.0,
        name: str = "relay",
    ) -> None:
        self.name = name
        self.heartbeat = Heartbeat(longest_silence=max(60.0, interval * 3))
        self._database = database
        self._producer = producer
        self._woken = wakeup.subscribe()
        self._metrics = metrics
        self._interval = interval
        self._lanes = math.ceil(LANES / relays)
        self._per_lane = ROWS_PER_LANE
        self._per_turn = ROWS_PER_TURN
        self._sql = {
            "lock": _LOCK_LANES.format(schema=schema, lanes=LANES),
            "read": _READ.format(schema=schema),
            "delete": _DELETE.format(schema=schema),
        }

    async def run(self, stop: Stop) -> None:
        """Publish until stopped; connection trouble is waited out with growing, jittered pauses."""
        backoff = FIRST_BACKOFF
        while not stop.requested:
            self.heartbeat.beat()
            try:
                turn = await self.run_once()
            except _TROUBLE as error:
                if not isinstance(error, BrokerUnavailable) and not is_infrastructure(error):
                    raise
                self._metrics.failures.labels(type(error).__name__).inc()
                log.warning("relay waits", relay=self.name, reason=str(error)[:300], backoff=backoff)
                await stop.wait(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
                backoff = min(backoff * 2, LONGEST_BACKOFF)
                continue
            backoff = FIRST_BACKOFF
            if not turn.more and not stop.requested:
                await self._rest(stop)

    async def run_once(self) -> Turn:
        """Do one turn.

        Returns:
            How many rows were published.

        Raises:
            BrokerUnavailable: nothing was deleted; rows may have arrived and will be sent again.
            sqlalchemy.exc.DBAPIError: the database failed; likewise.
        """
        await self._producer.connect()
        async with self._database.write() as session:
            connection = await driver_connection(session)
            self._woken.clear()
            start = random.randrange(LANES)  # noqa: S311 - spreads workers over lanes
            most = min(self._lanes, self._per_turn)
            lanes = [row["lane"] for row in await connection.fetch(self._sql["lock"], most, start)]
            per_lane = min(self._per_lane, self._per_turn // max(len(lanes), 1))
            rows = await connection.fetch(self._sql["read"], lanes, per_lane) if lanes else []
            if not rows:
                self._per_lane = ROWS_PER_LANE
                return Turn(published=0, more=False)
            with self._metrics.turn_seconds.time():
                await self._publish(rows)
                await connection.execute(self._sql["delete"], [row["id"] for row in rows])
        self._metrics.published.inc(len(rows))
        more_in_lanes = self._balance(rows, per_lane)
        return Turn(len(rows), more=more_in_lanes or len(lanes) == most)

    async def _publish(self, rows: Sequence[asyncpg.Record]) -> None:
        """Send rows; turns shrink while they are too large to be acknowledged in time, or they would fail for ever."""
        try:
            with sending([orjson.loads(row["headers"]) for row in rows] if is_tracing() else []):
                await self._producer.publish([_record(row) for row in rows])
        except BrokerUnavailable:
            self._per_turn = max(1, len(rows) // 2)
            raise
        self._per_turn = min(ROWS_PER_TURN, self._per_turn * 2)

    def _balance(self, rows: Sequence[asyncpg.Record], per_lane: int) -> bool:
        """Set next turn's rows per lane so that a turn stays near ROWS_PER_TURN; tell whether a lane may hold more."""
        counts: dict[int, int] = {}
        for row in rows:
            counts[row["lane"]] = counts.get(row["lane"], 0) + 1
        full = sum(count == per_lane for count in counts.values())
        self._per_lane = max(ROWS_PER_LANE, ROWS_PER_TURN // full) if full else ROWS_PER_LANE
        return full > 0

    async def _rest(self, stop: Stop) -> None:
        woken = asyncio.ensure_future(self._woken.wait())
        halted = asyncio.ensure_future(stop.wait(self._interval))
        try:
            await asyncio.wait((woken, halted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            halted.cancel()


class OutboxWatch:
    """Keeps the figures of an outbox fresh: the age of its oldest unpublished row, and how many there are.

    Args:
        database: the service's database under its system role.
        schema: the service's schema.
        metrics: where the figures go.
        interval: seconds between looks.
    """

    name = "outbox watch"

    def __init__(self, database: Database, schema: str, metrics: RelayMetrics, interval: float = 5.0) -> None:
        self.heartbeat = Heartbeat(longest_silence=max(60.0, interval * 6))
        self._database = database
        self._metrics = metrics
        self._interval = interval
        self._sql = _AGE.format(schema=schema)

    async def run(self, stop: Stop) -> None:
        """Look until stopped; a database that is away leaves the last figures standing."""
        while not stop.requested:
            self.heartbeat.beat()
            try:
                await self.observe()
            except DATABASE_ERRORS as error:
                if not is_infrastructure(error):
                    raise
                log.warning("outbox not observed", reason=str(error)[:300])
            await stop.wait(self._interval)

    async def observe(self) -> None:
        """Look once."""
        async with self._database.read() as session:
            row = await (await driver_connection(session)).fetchrow(self._sql)
        if row is not None:
            self._metrics.oldest.set(row["age"])
            self._metrics.pending.set(row["pending"])


def _record(row: asyncpg.Record) -> Record:
    headers: dict[str, Any] = orjson.loads(row["headers"])
    return Record(
        topic=row["topic"],
        key=row["message_key"].encode(),
        value=row["payload"],
        headers=[(name, value.encode()) for name, value in headers.items()],
    )
