"""The relay's workers: rows leave the outbox when they are acknowledged, in id order per lane, and not before.

A turn is one transaction: lock free lanes (advisory, so that the lock ends with the transaction), read their oldest
rows, send, wait for every acknowledgement, delete, commit. What was not acknowledged stays and is sent again with the
same `ce_id`. No transaction is open while the broker can't be reached.
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
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock, DatabaseClock
from chassis.db import DATABASE_ERRORS, Database, driver_connection, is_infrastructure
from chassis.messaging import BrokerUnavailable, Producer, Publication, Record
from chassis.outbox import LANES
from chassis.relay.arrivals import Arrivals
from chassis.relay.floor import Floor
from chassis.relay.parking import Parking
from chassis.relay.watch import RelayMetrics
from chassis.runtime import Heartbeat, Stop
from chassis.tracing import is_tracing, sending

ROWS_PER_TURN: Final = 4096
ROWS_PER_LANE: Final = 64
FIRST_BACKOFF: Final = 0.2
LONGEST_BACKOFF: Final = 10.0
RETRY_LOOK: Final = 0.5
"""Seconds between looks for refused rows whose next attempt is due, while there are any."""
_TROUBLE: tuple[type[Exception], ...] = (BrokerUnavailable, *DATABASE_ERRORS)
log = structlog.get_logger(__name__)

# A scalar subquery stays a probe of the index per lane; EXISTS may become a join that reads the whole table. The bounds
# are written so that only the index on (lane, id) gives the order: with `lane = ... order by id` the planner may walk
# the primary key past a hundred thousand rows of other lanes.
_LOCK_LANES = """
select busy.lane from (
  select l.lane from unnest($1::smallint[], $2::bigint[]) as l(lane, floor)
  where (select true from {schema}.outbox as o
         where (o.lane, o.id) >= (l.lane, l.floor) and o.lane <= l.lane and o.parked_at is null
         order by o.lane, o.id limit 1) offset 0
) as busy
where pg_try_advisory_xact_lock(hashtext('{schema}.outbox'), busy.lane)
limit $3
"""
# Rows of parked keys are read too, and then taken out of the index: passing over them would cost every later claim.
_READ = """
select o.id, o.topic, o.message_key, o.payload, o.headers, o.lane, o.attempts,
  (select true from {schema}.outbox_parked_key as k where k.message_key = o.message_key limit 1) as held
from unnest($1::smallint[], $2::bigint[]) as l(lane, floor)
cross join lateral (
  select i.id, i.topic, i.message_key, i.payload, i.headers::text as headers, i.lane, i.attempts
  from {schema}.outbox as i
  where (i.lane, i.id) >= (l.lane, l.floor) and i.lane <= l.lane and i.parked_at is null
  order by i.lane, i.id limit $3
) as o
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did: rows published and refused, whether a lane may hold more, and what kept rows back."""

    published: int
    more: bool
    refused: int = 0
    trouble: BrokerUnavailable | None = None

    @property
    def stalled(self) -> bool:
        """Whether to pause before the next turn, lest it be a tight loop."""
        return self.trouble is not None or (self.refused > 0 and not self.published)


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
        floor: shared by the workers of a process; one of its own if None.
        clock: when refused rows are tried again.
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
        floor: Floor | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.heartbeat = Heartbeat(longest_silence=max(60.0, interval * 3))
        self.parking = Parking(schema)
        self._arrivals = Arrivals(schema, metrics.lags)
        self._database = database
        self._producer = producer
        self._woken = wakeup.subscribe()
        self._metrics = metrics
        self._interval = interval
        self._floor = floor or Floor(schema)
        self._clock = clock or DatabaseClock()
        self._lanes = math.ceil(LANES / relays)
        self._per_lane = ROWS_PER_LANE
        self._per_turn = ROWS_PER_TURN
        self._retried = -RETRY_LOOK
        self._sql = {
            "lock": _LOCK_LANES.format(schema=schema),
            "read": _READ.format(schema=schema),
        }

    async def run(self, stop: Stop) -> None:
        """Publish until stopped; trouble is waited out with growing, jittered pauses."""
        backoff = FIRST_BACKOFF
        while not stop.requested:
            self.heartbeat.beat()
            try:
                turn = await self.run_once()
                trouble: Exception | None = turn.trouble
            except _TROUBLE as error:
                if not isinstance(error, BrokerUnavailable) and not is_infrastructure(error):
                    raise
                turn, trouble = Turn(0, more=False), error
            if trouble is None and not turn.stalled:
                backoff = FIRST_BACKOFF
                if not turn.more and not stop.requested:
                    await self._rest(stop)
                continue
            reason = type(trouble).__name__ if trouble else "RecordRefused"
            self._metrics.failures.labels(reason).inc()
            log.warning("relay waits", relay=self.name, reason=str(trouble or reason)[:300], backoff=backoff)
            await stop.wait(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
            backoff = min(backoff * 2, LONGEST_BACKOFF)

    async def run_once(self) -> Turn:
        """Do one turn.

        Returns:
            How many rows were published and refused.

        Raises:
            BrokerUnavailable: nothing was deleted; rows may have arrived and will be sent again.
            sqlalchemy.exc.DBAPIError: the database failed; likewise.
        """
        await self._producer.connect()
        await self._retry_due()
        async with self._database.write() as session:
            connection = await driver_connection(session)
            self._woken.clear()
            await self._look(connection)
            lanes, per_lane, most = await self._lock_lanes(connection)
            rows = await self._read(connection, lanes, per_lane) if lanes else []
            if not rows:
                self._per_lane = ROWS_PER_LANE
                return Turn(published=0, more=False)
            free = [row for row in rows if not row["held"]]
            if len(free) < len(rows):
                held = [row["id"] for row in rows if row["held"]]
                await self.parking.hold(connection, held, await self._clock.now(session))
            with self._metrics.turn_seconds.time():
                publication = await self._deliver(free)
                await self._settle(session, free, publication)
        published, refused = len(publication.acknowledged), len(publication.refused)
        self._metrics.published.inc(published)
        more_in_lanes = self._balance(rows, per_lane)
        return Turn(published, more_in_lanes or len(lanes) == most, refused, publication.trouble)

    async def _look(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        before = self._floor.breaches
        await self._floor.look(connection)
        self._metrics.floor_breaches.inc(self._floor.breaches - before)

    async def _lock_lanes(self, connection: "asyncpg.Connection[asyncpg.Record]") -> tuple[list[int], int, int]:
        """Hold free lanes that have rows; return them, how many rows to read of each, and how many were wanted."""
        start = random.randrange(LANES)  # noqa: S311 - spreads workers over lanes
        most = min(self._lanes, self._per_turn)
        order = [*range(start, LANES), *range(start)]
        floors = [self._floor.ids[lane] for lane in order]
        lanes = [row["lane"] for row in await connection.fetch(self._sql["lock"], order, floors, most)]
        return lanes, min(self._per_lane, self._per_turn // max(len(lanes), 1)), most

    async def _read(
        self, connection: "asyncpg.Connection[asyncpg.Record]", lanes: Sequence[int], per_lane: int
    ) -> list[asyncpg.Record]:
        floors = [self._floor.ids[lane] for lane in lanes]
        rows = await connection.fetch(self._sql["read"], lanes, floors, per_lane)
        self._floor.note(max((row["id"] for row in rows), default=0))
        return rows

    async def _deliver(self, rows: Sequence[asyncpg.Record]) -> Publication:
        """Send rows; turns shrink while none of them is acknowledged in time, or they would fail for ever."""
        self._metrics.attempts.inc(len(rows))
        publication = await self._send(rows)
        if publication.trouble is None:
            self._per_turn = min(ROWS_PER_TURN, self._per_turn * 2)
        elif not publication.acknowledged and not publication.refused:
            self._per_turn = max(1, len(rows) // 2)
            raise publication.trouble
        return publication

    async def _settle(self, session: AsyncSession, rows: Sequence[asyncpg.Record], publication: Publication) -> None:
        """Delete what has arrived; park what was refused, and what stands behind it."""
        connection = await driver_connection(session)
        if publication.refused:
            now = await self._clock.now(session)
            refused = [(rows[at], publication.refused[at]) for at in sorted(publication.refused)]
            keys = {row["message_key"] for row, _ in refused}
            unsent = set(range(len(rows))) - publication.acknowledged - publication.refused.keys()
            await self.parking.hold(
                connection, [rows[at]["id"] for at in unsent if rows[at]["message_key"] in keys], now
            )
            await self.parking.refuse(connection, refused, now)
            self._count_refusals(refused)
        done = publication.acknowledged
        gone = [row["id"] for row in rows] if len(done) == len(rows) else [rows[at]["id"] for at in done]
        await self._arrivals.delete(connection, gone)

    def _count_refusals(self, refused: Sequence[tuple[asyncpg.Record, Exception]]) -> None:
        for row, _ in refused:
            self._metrics.refused.labels(row["topic"]).inc()
        self._floor.retrying = True
        row, why = refused[0]
        log.error("outbox rows refused", rows=len(refused), first=row["id"], reason=str(why)[:300])

    async def _send(self, rows: Sequence[asyncpg.Record]) -> Publication:
        with sending([orjson.loads(row["headers"]) for row in rows] if is_tracing() else []):
            return await self._producer.deliver([_record(row) for row in rows])

    async def _retry_due(self) -> None:
        """Send the first row of every key whose next attempt is due; a key whose row arrives is let go."""
        now = asyncio.get_running_loop().time()
        if not self._floor.retrying or now - self._retried < RETRY_LOOK:
            return
        self._retried = now
        async with self._database.write() as session:
            connection = await driver_connection(session)
            instant = await self._clock.now(session)
            due = await self.parking.due_rows(connection, instant)
            rows = [row for row in due if row["id"] is not None]
            done: set[int] = set()
            if rows:
                self._metrics.attempts.inc(len(rows))
                publication = await self._send(rows)
                done = publication.acknowledged
                unknown = set(range(len(rows))) - done - publication.refused.keys()
                # A partition that is away must not keep the turn, and so every other key, waiting again and again.
                await self.parking.postpone(connection, [rows[at]["message_key"] for at in unknown], instant)
                if publication.trouble is not None:
                    log.warning("refused rows wait", rows=len(unknown), reason=str(publication.trouble)[:300])
                refused = [(rows[at], publication.refused[at]) for at in sorted(publication.refused)]
                await self.parking.refuse(connection, refused, instant)
                if refused:
                    self._count_refusals(refused)
                await self._arrivals.delete(connection, [rows[at]["id"] for at in done])
            free = [row["message_key"] for row in due if row["id"] is None]
            await self.parking.release(connection, free + [rows[at]["message_key"] for at in done])
        self._metrics.published.inc(len(done))

    def _balance(self, rows: Sequence[asyncpg.Record], per_lane: int) -> bool:
        """Set next turn's rows per lane so that a turn stays near ROWS_PER_TURN; tell whether a lane may hold more."""
        counts: dict[int, int] = {}
        for row in rows:
            counts[row["lane"]] = counts.get(row["lane"], 0) + 1
        full = sum(count == per_lane for count in counts.values())
        self._per_lane = max(ROWS_PER_LANE, ROWS_PER_TURN // full) if full else ROWS_PER_LANE
        return full > 0

    async def _rest(self, stop: Stop) -> None:
        interval = min(self._interval, RETRY_LOOK) if self._floor.retrying else self._interval
        woken = asyncio.ensure_future(self._woken.wait())
        halted = asyncio.ensure_future(stop.wait(interval))
        try:
            await asyncio.wait((woken, halted), return_when=asyncio.FIRST_COMPLETED)
        finally:
            woken.cancel()
            halted.cancel()


def _record(row: asyncpg.Record) -> Record:
    headers: dict[str, Any] = orjson.loads(row["headers"])
    return Record(
        topic=row["topic"],
        key=row["message_key"].encode(),
        value=row["payload"],
        headers=[(name, value.encode()) for name, value in headers.items()],
    )
