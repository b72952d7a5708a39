"""Parked keys, and dead letters that somebody asked to retry: outside the poll loop, each key in order.

Live handling and this loop lock the same row of parked_key, and a key is unparked in the transaction that handles its
last record: no record can slip in between.
"""

import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import asyncpg
import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers.batches import FIRST_RETRY, RECORD_SECONDS, Waiting
from chassis.consumers.declaration import Refused
from chassis.consumers.envelope import Unreadable
from chassis.consumers.faults import Fault, HandlerMissing, must_wait
from chassis.consumers.handling import Handling
from chassis.consumers.store import Disposition, record_of
from chassis.db import driver_connection
from chassis.runtime import Heartbeat, Stop

LONGEST_RETRY: Final = timedelta(minutes=30)
LOOK_SECONDS: Final = 1.0
OBSERVE_SECONDS: Final = 5.0
WAIT_SECONDS: Final = 5.0
log = structlog.get_logger(__name__)

_DUE_KEY = """
select parking_key, attempts from {schema}.parked_key where consumer = $1 and next_attempt_at <= $2
order by next_attempt_at limit 1 for update skip locked
"""
_OF_KEY = """
select * from {schema}.dead_letter where consumer = $1 and parking_key = $2 and resolved_at is null
and disposition in ('exhausted', 'parked') order by position limit 1 for update
"""
_MORE_OF_KEY = """
select exists (select from {schema}.dead_letter where consumer = $1 and parking_key = $2 and resolved_at is null
and disposition in ('exhausted', 'parked'))
"""
_REQUESTED = """
select * from {schema}.dead_letter where consumer = $1 and retry_requested_at is not null and resolved_at is null
and disposition in ('quarantine', 'refused') order by position limit 1 for update skip locked
"""
_RESOLVE = """
update {schema}.dead_letter set resolved_at = $2, resolution = $3, retry_requested_at = null where id = $1
"""
_FAILED_AGAIN = """
update {schema}.dead_letter set attempts = attempts + 1, last_failed_at = $2, error_class = $3, error_code = $4,
  error = $5, disposition = $6, retry_requested_at = null where id = $1 and resolved_at is null
returning disposition
"""
_PROGRESS = """
update {schema}.parked_key set attempts = 0 where consumer = $1 and parking_key = $2 and attempts > 0
"""
_POSTPONE = """
update {schema}.parked_key set attempts = attempts + 1, next_attempt_at = $3 where consumer = $1 and parking_key = $2
"""
_UNPARK = "delete from {schema}.parked_key where consumer = $1 and parking_key = $2"
_FIGURES = """
select count(*) as keys, min(parked_at) as oldest,
  (select count(*) from {schema}.dead_letter where consumer = $1 and resolved_at is null
   and disposition in ('exhausted', 'parked')) as records
from {schema}.parked_key where consumer = $1
"""


@dataclass(slots=True)
class _Attempt:
    """The letter that one attempt is about; filled in as soon as it is known."""

    row: asyncpg.Record | None = None
    key_attempts: int | None = None


class ParkedKeysLoop:
    """Retries one consumer's parked keys with backoff, and the dead letters that were asked for.

    Args:
        handling: of the consumer.
    """

    def __init__(self, handling: Handling) -> None:
        self.name = f"parked keys {handling.consumer.group}"
        self.heartbeat = Heartbeat(longest_silence=120.0)
        self._handling = handling
        self._group = handling.consumer.group
        schema = handling.store.schema
        self._sql = {
            name: text.format(schema=schema)
            for name, text in {
                "due": _DUE_KEY,
                "of key": _OF_KEY,
                "more": _MORE_OF_KEY,
                "requested": _REQUESTED,
                "resolve": _RESOLVE,
                "failed": _FAILED_AGAIN,
                "postpone": _POSTPONE,
                "unpark": _UNPARK,
                "progress": _PROGRESS,
                "figures": _FIGURES,
            }.items()
        }

    async def run(self, stop: Stop) -> None:
        """Retry what is due until stopped; a database or source that is away is waited for."""
        look_again = 0.0
        while not stop.requested:
            self.heartbeat.beat()
            try:
                worked = await self.drain_one()
                if time.monotonic() >= look_again:
                    await self.observe()
                    look_again = time.monotonic() + OBSERVE_SECONDS
            except Exception as error:
                if not isinstance(error, Waiting) and not await must_wait(error, self._handling.database):
                    raise
                log.warning("parked keys wait", consumer=self._group, reason=str(error)[:300])
                await stop.wait(WAIT_SECONDS)
            else:
                if not worked:
                    await stop.wait(LOOK_SECONDS)

    async def drain_one(self) -> bool:
        """Retry the next record that is due, a parked key's before a requested one.

        Returns:
            Whether there was one.

        Raises:
            Waiting: the database or a source is away; nothing was counted.
        """
        attempt = _Attempt()
        try:
            async with self._handling.transaction(RECORD_SECONDS) as session:
                now = await self._handling.clock.now(session)
                found = await self._key(session, attempt, now) or await self._request(session, attempt, now)
        except Exception as error:
            if attempt.row is None or await must_wait(error, self._handling.database):
                raise Waiting(type(error).__name__) from error
            await self._note_failure(attempt, attempt.row, error)
            return True
        return found

    async def observe(self) -> None:
        """Bring the figures of what is parked up to date."""
        async with self._handling.database.read() as session:
            now = await self._handling.clock.now(session)
            figures = await (await driver_connection(session)).fetchrow(self._sql["figures"], self._group)
        if figures is not None:
            age = (now - figures["oldest"]).total_seconds() if figures["oldest"] else 0.0
            self._handling.metrics.parked_keys.labels(self._group).set(figures["keys"])
            self._handling.metrics.parked_records.labels(self._group).set(figures["records"])
            self._handling.metrics.oldest_parked.labels(self._group).set(age)

    async def _key(self, session: AsyncSession, attempt: _Attempt, now: datetime) -> bool:
        connection = await driver_connection(session)
        due = await connection.fetchrow(self._sql["due"], self._group, now)
        if due is None:
            return False
        key = due["parking_key"]
        row = await connection.fetchrow(self._sql["of key"], self._group, key)
        if row is not None:
            attempt.row, attempt.key_attempts = row, due["attempts"]
            await self._handle(session, row, now)
        if not await connection.fetchval(self._sql["more"], self._group, key):
            await connection.execute(self._sql["unpark"], self._group, key)
            log.info("key unparked", consumer=self._group)
        else:
            await connection.execute(self._sql["progress"], self._group, key)
        return True

    async def _request(self, session: AsyncSession, attempt: _Attempt, now: datetime) -> bool:
        row = await (await driver_connection(session)).fetchrow(self._sql["requested"], self._group)
        if row is None:
            return False
        attempt.row = row
        await self._handle(session, row, now)
        return True

    async def _handle(self, session: AsyncSession, row: asyncpg.Record, now: datetime) -> None:
        item = self._handling.read(record_of(row))
        if item.problem is not None:
            raise item.problem
        if item.envelope is None:
            raise HandlerMissing
        fresh = await self._handling.store.mark_handled(session, [item.envelope], now)
        # A refused message is in the inbox though it had no effect: whoever asks to retry it wants one.
        wanted = fresh or row["disposition"] == "refused"
        if wanted:
            await self._handling.invoke(session, [item], now)
        resolution = "handled" if wanted else "duplicate"
        await (await driver_connection(session)).execute(self._sql["resolve"], row["id"], now, resolution)

    async def _note_failure(self, attempt: _Attempt, row: asyncpg.Record, error: Exception) -> None:
        fault = Fault.of(error)
        disposition = _disposition(row["disposition"], error)
        log.warning(
            "retry failed",
            consumer=self._group,
            dead_letter=str(row["id"]),
            disposition=disposition,
            error_class=fault.error_class,
            error_code=fault.code,
            error=fault.text,
        )
        async with self._handling.database.write() as session:
            now = await self._handling.clock.now(session)
            connection = await driver_connection(session)
            if attempt.key_attempts is not None and disposition == "exhausted":
                wait = min(FIRST_RETRY * 2 ** min(attempt.key_attempts + 1, 20), LONGEST_RETRY)
                await connection.execute(self._sql["postpone"], self._group, row["parking_key"], now + wait)
            told = (fault.error_class, fault.code, fault.text)
            if not await connection.fetchval(self._sql["failed"], row["id"], now, *told, disposition):
                return
            if disposition != row["disposition"]:
                await self._announce(session, row, fault, disposition, now)
                if isinstance(error, Refused) and error.instead is not None:
                    await error.instead(session)

    async def _announce(
        self, session: AsyncSession, row: asyncpg.Record, fault: Fault, disposition: Disposition, now: datetime
    ) -> None:
        """Tell of a letter whose disposition changed; a refused one counts as handled from now on."""
        self._handling.metrics.dead_letters.labels(self._group, disposition).inc()
        item = self._handling.read(record_of(row))
        if disposition == "refused" and item.envelope is not None:
            await self._handling.store.mark_handled(session, [item.envelope], now)
        letter = self._handling.letter(item, fault, disposition, now)
        await self._handling.store.announce(session, row["id"], letter)


def _disposition(before: Disposition, error: Exception) -> Disposition:
    """Return what a letter is after it failed once more; refused and unreadable ones let their key go on."""
    if isinstance(error, Refused):
        return "refused"
    if isinstance(error, Unreadable):
        return "quarantine"
    return "exhausted" if before == "parked" else before
