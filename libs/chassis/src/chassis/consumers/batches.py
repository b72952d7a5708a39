"""A batch of records: whole if possible, otherwise one by one until the culprits are found.

Each key's records are handled in order. A record that fails holds up its key only: the others go on while it is tried
again, and after the last attempt its key is parked and what comes behind it is put there too.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, repeat
from typing import Final

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers.declaration import Refused
from chassis.consumers.faults import Fault, ParkingFull, must_wait
from chassis.consumers.handling import Handling, Item, unparsable
from chassis.consumers.store import parking_key
from chassis.db import DATABASE_ERRORS
from chassis.messaging import Place, Received
from chassis.runtime import Stop

ATTEMPTS: Final = 5
PAUSES: Final = (0.5, 1.5, 3.0, 5.0)
"""Seconds between the attempts: five of them take about ten seconds."""

BATCH_SECONDS: Final = 20.0
RECORD_SECONDS: Final = 15.0
"""Time limits of a transaction; below what the group waits for a member before it gives its partitions away."""

LONGEST_ONE_BY_ONE: Final = 120.0
"""Seconds after which what is still unresolved is read again, so that the group never takes us for dead."""

FIRST_RETRY: Final = timedelta(seconds=10)
log = structlog.get_logger(__name__)


class Waiting(Exception):
    """Something that every record needs is away; nothing was counted against any of them."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch came.

    Attributes:
        commit: per partition, the offset of the next record to read.
        behind: partitions whose last records are unresolved and have to be read again.
        full: those of them where nothing more can be parked.
    """

    commit: dict[Place, int]
    behind: frozenset[Place] = frozenset()
    full: frozenset[Place] = frozenset()


class Batches:
    """Takes batches of one consumer through.

    Args:
        handling: of that consumer.
        pauses: seconds between the rounds of attempts.
    """

    def __init__(self, handling: Handling, pauses: Sequence[float] = PAUSES) -> None:
        self._handling = handling
        self._pauses = pauses
        self._metrics = handling.metrics
        self._group = handling.consumer.group
        self._tried: dict[tuple[Place, int], tuple[int, datetime | None]] = {}

    async def take(self, records: Sequence[Received], stop: Stop) -> Progress:
        """Handle a batch; every record is handled, set aside, or reported as unresolved.

        Args:
            records: each partition's in the order of offsets.
            stop: looked at between attempts; once requested, what has not been resolved is left unresolved.

        Raises:
            Waiting: the database or a source is away; what was handled before is in the inbox.
        """
        items = [self._read(record) for record in records]
        ignored = sum(item.handler is None and item.problem is None for item in items)
        try:
            with self._metrics.seconds.labels(self._group).time():
                self._handling.count(await self._handling.transact(items, BATCH_SECONDS))
        except Exception as error:
            await self._wait_if_away(error)
            log.warning("batch failed, one by one", consumer=self._group, records=len(items), **_shown(Fault.of(error)))
            self._metrics.batches.labels(self._group, "one_by_one").inc()
            unresolved, full = await self._one_by_one(items, stop)
        else:
            self._metrics.batches.labels(self._group, "whole").inc()
            unresolved, full = [], set()
            for item in items if self._tried else ():
                self._tried.pop((item.record.place, item.record.offset), None)
        self._metrics.ignored.labels(self._group).inc(ignored)
        return _progress(records, unresolved, full)

    def _read(self, record: Received) -> Item:
        """Read a record; what failed in an earlier batch, and was left there, has not lost its count."""
        try:
            item = self._handling.read(record)
        except Exception as error:
            # A parser that raises what no parser should would stop the partition for ever.
            log.error("parser failed", consumer=self._group, topic=record.topic, **_shown(Fault.of(error)))  # noqa: TRY400 - no values
            item = Item(record, parking_key(record), problem=unparsable(error))
        item.attempts, item.first_failed_at = self._tried.get((record.place, record.offset), (0, None))
        return item

    async def _one_by_one(self, items: Sequence[Item], stop: Stop) -> tuple[list[Item], set[Place]]:
        """Go round the records until none is left; return the unresolved ones, and the partitions that are full."""
        deadline = time.monotonic() + LONGEST_ONE_BY_ONE
        left, full = list(items), set[Place]()
        for pause in chain(self._pauses, repeat(self._pauses[-1])):
            left = await self._round(left, full, deadline, stop)
            waiting = [item for item in left if item.record.place not in full]
            if not waiting or time.monotonic() > deadline or await stop.wait(pause):
                break
            self._metrics.retries.labels(self._group).inc(len({item.key for item in waiting}))
        return left, full

    async def _round(self, items: Sequence[Item], full: set[Place], deadline: float, stop: Stop) -> list[Item]:
        """Try each key's first items; those that have failed least come first, lest slow ones starve the others."""
        left: list[Item] = []
        held_up: set[bytes] = set()
        tried: dict[bytes, int] = {}
        for item in items:
            tried.setdefault(item.key, item.attempts)
        for item in sorted(items, key=lambda item: tried[item.key]):
            late = time.monotonic() > deadline or stop.requested
            if late or item.key in held_up or item.record.place in full:
                left.append(item)
                continue
            try:
                resolved = await self._attempt(item)
            except ParkingFull as error:
                log.warning("nothing more can be parked", consumer=self._group, reason=str(error))
                full.add(item.record.place)
                resolved = False
            if resolved:
                self._tried.pop((item.record.place, item.record.offset), None)
            else:
                held_up.add(item.key)
                left.append(item)
        return left

    async def _attempt(self, item: Item) -> bool:
        try:
            self._handling.count(await self._handling.transact([item], RECORD_SECONDS))
        except ParkingFull:
            raise
        except Refused as refusal:
            return await self._refused(item, refusal)
        except Exception as error:
            await self._wait_if_away(error)
            return await self._failed(item, error)
        return True

    async def _refused(self, item: Item, refusal: Refused) -> bool:
        try:
            await self._set_aside(item, refusal)
        except Waiting:
            raise
        except Exception as error:
            await self._wait_if_away(error)
            return await self._failed(item, error)
        return True

    async def _failed(self, item: Item, error: Exception) -> bool:
        self._metrics.failures.labels(self._group, "handler").inc()
        item.attempts += 1
        fault = Fault.of(error)
        log.warning("handler failed", consumer=self._group, attempt=item.attempts, **_identity(item), **_shown(fault))
        async with self._transaction() as session:
            now = await self._handling.clock.now(session)
            item.first_failed_at = item.first_failed_at or now
            self._tried[item.record.place, item.record.offset] = (item.attempts, item.first_failed_at)
            if item.attempts < ATTEMPTS:
                return False
            letter = self._handling.letter(item, fault, "exhausted", now)
            await self._handling.store.park(session, letter, now + FIRST_RETRY)
        self._metrics.dead_letters.labels(self._group, "exhausted").inc()
        log.error("key parked", consumer=self._group, error_class=fault.error_class, **_identity(item))
        return True

    async def _set_aside(self, item: Item, refusal: Refused) -> None:
        """Keep a refused record, and note it as handled, so that reading it again doesn't ask again."""
        self._metrics.failures.labels(self._group, "contract").inc()
        async with self._transaction() as session:
            now = await self._handling.clock.now(session)
            if item.envelope is not None:
                await self._handling.store.mark_handled(session, [item.envelope], now)
            letter = self._handling.letter(item, Fault.of(refusal), "refused", now)
            await self._handling.store.set_aside(session, letter)
            if refusal.instead is not None:
                await refusal.instead(session)
        self._metrics.dead_letters.labels(self._group, "refused").inc()
        log.warning("message refused", consumer=self._group, code=refusal.code, **_identity(item))

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncSession]:
        """A write session for our own tables; what it raises (ParkingFull apart) means that the database is away."""
        try:
            async with self._handling.database.write() as session:
                yield session
        except DATABASE_ERRORS as error:
            await self._wait_if_away(error)
            raise

    async def _wait_if_away(self, error: Exception) -> None:
        if await must_wait(error, self._handling.database):
            self._metrics.failures.labels(self._group, "infrastructure").inc()
            raise Waiting(
                f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            ) from error


def _progress(records: Sequence[Received], unresolved: Sequence[Item], full: set[Place]) -> Progress:
    commit = {record.place: record.offset + 1 for record in records}
    behind: set[Place] = set()
    for item in unresolved:
        commit[item.record.place] = min(commit[item.record.place], item.record.offset)
        behind.add(item.record.place)
    return Progress(commit, frozenset(behind), frozenset(full & behind))


def _identity(item: Item) -> dict[str, object]:
    record = item.record
    event_id = str(item.envelope.event_id) if item.envelope else None
    return {"topic": record.topic, "partition": record.partition, "offset": record.offset, "event_id": event_id}


def _shown(fault: Fault) -> dict[str, str]:
    return {"error_class": fault.error_class, "error_code": fault.code, "error": fault.text}
