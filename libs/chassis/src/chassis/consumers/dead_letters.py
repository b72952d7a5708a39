"""Dead letters for the person on call: list, show, retry, discard; every act is audited.

A retry only asks: the process that consumes does it, a parked key's records in their order. Lock order: the key's row
in parked_key first, as everywhere.
"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import Audit, AuditRecord
from chassis.consumers.store import record_of
from chassis.db import driver_connection

COLUMNS: Final = (
    "id, consumer, topic, partition, record_offset, recorded_at, message_key, event_id, type, disposition, error_class,"
    " error_code, error, attempts, first_failed_at, last_failed_at, retry_requested_at, resolved_at, resolution"
)
MOST_AT_ONCE: Final = 10_000
"""Letters that one retry by filter takes; the answer's count says whether there were more."""


class DeadLetterNotFound(Exception):
    """There is no dead letter with this id."""


class DeadLetterResolved(Exception):
    """The dead letter has been handled or discarded already."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which dead letters are meant; None means any.

    Attributes:
        resolved: whether it has been handled or discarded.
    """

    id: UUID | None = None
    consumer: str | None = None
    topic: str | None = None
    type: str | None = None
    disposition: str | None = None
    error_code: str | None = None
    resolved: bool = False

    def arguments(self) -> tuple[Any, ...]:
        """Return the values of the placeholders $1 to $7."""
        return (self.id, self.consumer, self.topic, self.type, self.disposition, self.error_code, self.resolved)


@dataclass(frozen=True, slots=True)
class By:
    """Who acts, when, under which correlation id."""

    actor: str
    now: datetime
    correlation_id: str


_MATCHES = """
($1::uuid is null or id = $1) and ($2::text is null or consumer = $2) and ($3::text is null or topic = $3)
and ($4::text is null or type = $4) and ($5::text is null or disposition = $5)
and ($6::text is null or error_code = $6) and (resolved_at is not null) = $7::boolean
"""
_LIST = f"""
select {COLUMNS} from {{schema}}.dead_letter
where {_MATCHES} and ($8::uuid is null or id > $8) order by id limit $9
"""
_COUNT = f"select count(*) from (select from {{schema}}.dead_letter where {_MATCHES} limit $8) as matching"
_GET = f"select {COLUMNS}, headers, value, parking_key from {{schema}}.dead_letter where id = $1"
_MATCHING = f"""
select id, consumer, topic, disposition, parking_key from {{schema}}.dead_letter where {_MATCHES} order by id limit $8
"""
_ASK = """
update {schema}.dead_letter set retry_requested_at = $2
where id = any($1::uuid[]) and resolved_at is null and disposition in ('quarantine', 'refused')
"""
_HURRY = """
update {schema}.parked_key k set next_attempt_at = $3 where (consumer, parking_key) in (
  select consumer, parking_key from {schema}.parked_key
  where (consumer, parking_key) in (select * from unnest($1::text[], $2::bytea[]))
  order by consumer, parking_key for update
)
"""
_LOCK_KEY = "select from {schema}.parked_key where consumer = $1 and parking_key = $2 for update"
_DISCARD = """
update {schema}.dead_letter set resolved_at = $2, resolution = 'discarded', retry_requested_at = null
where id = $1 and resolved_at is null
"""
_MARK = """
insert into {schema}.inbox (consumer, event_id, received_at) values ($1, $2, $3) on conflict do nothing
"""
_SETTLE_KEY = """
delete from {schema}.parked_key k where consumer = $1 and parking_key = $2 and not exists (
  select from {schema}.dead_letter d where d.consumer = k.consumer and d.parking_key = k.parking_key
  and resolved_at is null and disposition in ('exhausted', 'parked')
)
"""


class DeadLetters:
    """The dead letters of one service.

    Args:
        schema: the service's schema.
    """

    def __init__(self, schema: str) -> None:
        self._audit = Audit(schema)
        self._sql = {
            name: statement.format(schema=schema)
            for name, statement in {
                "list": _LIST,
                "count": _COUNT,
                "get": _GET,
                "matching": _MATCHING,
                "ask": _ASK,
                "hurry": _HURRY,
                "lock key": _LOCK_KEY,
                "discard": _DISCARD,
                "mark": _MARK,
                "settle key": _SETTLE_KEY,
            }.items()
        }

    async def find(
        self, session: AsyncSession, matching: Filter, *, limit: int, after: UUID | None = None
    ) -> list[dict[str, Any]]:
        """Return dead letters without their records, oldest first, after the given one."""
        connection = await driver_connection(session)
        rows = await connection.fetch(self._sql["list"], *matching.arguments(), after, limit)
        return [_shown(row) for row in rows]

    async def count(self, session: AsyncSession, matching: Filter) -> int:
        """Return how many match, counted up to MOST_AT_ONCE."""
        connection = await driver_connection(session)
        return int(await connection.fetchval(self._sql["count"], *matching.arguments(), MOST_AT_ONCE))

    async def get(self, session: AsyncSession, letter_id: UUID) -> dict[str, Any]:
        """Return one dead letter with its record: value and headers in base64, byte for byte.

        Raises:
            DeadLetterNotFound: there is none.
        """
        row = await self._row(session, letter_id)
        record = record_of(row)
        headers = [(name, _encoded(value)) for name, value in record.headers]
        return _shown(row) | {"value": _encoded(record.value), "headers": headers}

    async def retry(self, session: AsyncSession, matching: Filter, by: By) -> int:
        """Ask for a retry of all that match, MOST_AT_ONCE at most; return how many that are.

        A parked key is retried as a whole, from its first record.

        Raises:
            DeadLetterNotFound, DeadLetterResolved: an id was given, and it is unknown or settled.
        """
        connection = await driver_connection(session)
        rows = await connection.fetch(self._sql["matching"], *matching.arguments(), MOST_AT_ONCE)
        if matching.id is not None and not rows:
            await self._unresolved(session, matching.id)
        parked = [row for row in rows if row["disposition"] in ("exhausted", "parked")]
        keys = sorted({(row["consumer"], row["parking_key"]) for row in parked})
        await connection.execute(self._sql["hurry"], [c for c, _ in keys], [k for _, k in keys], by.now)
        await connection.execute(self._sql["ask"], [row["id"] for row in rows], by.now)
        await self._record(session, "dead-letter.retry-requested", rows, {}, by)
        return len(rows)

    async def discard(self, session: AsyncSession, letter_id: UUID, reason: str, by: By) -> None:
        """Settle a dead letter without handling it; what waits behind it in its key goes on.

        Raises:
            DeadLetterNotFound, DeadLetterResolved: it is unknown, or settled already.
            ValueError: no reason is given.
        """
        if not reason.strip():
            raise ValueError("a dead letter is discarded for a reason")
        connection = await driver_connection(session)
        row = await self._unresolved(session, letter_id)
        place = (row["consumer"], row["parking_key"])
        await connection.execute(self._sql["lock key"], *place)
        if await connection.execute(self._sql["discard"], letter_id, by.now) != "UPDATE 1":
            raise DeadLetterResolved(f"dead letter {letter_id} is settled")
        if row["event_id"] is not None:
            await connection.execute(self._sql["mark"], row["consumer"], row["event_id"], by.now)
        await connection.execute(self._sql["settle key"], *place)
        if row["disposition"] in ("exhausted", "parked"):
            await connection.execute(self._sql["hurry"], [place[0]], [place[1]], by.now)
        await self._record(session, "dead-letter.discarded", [row], {"reason": reason}, by)

    async def _row(self, session: AsyncSession, letter_id: UUID) -> asyncpg.Record:
        row = await (await driver_connection(session)).fetchrow(self._sql["get"], letter_id)
        if row is None:
            raise DeadLetterNotFound(f"no dead letter {letter_id}")
        return row

    async def _unresolved(self, session: AsyncSession, letter_id: UUID) -> asyncpg.Record:
        row = await self._row(session, letter_id)
        if row["resolved_at"] is not None:
            raise DeadLetterResolved(f"dead letter {letter_id} is settled: {row['resolution']}")
        return row

    async def _record(
        self, session: AsyncSession, action: str, rows: list[asyncpg.Record], details: Mapping[str, Any], by: By
    ) -> None:
        records = [
            AuditRecord(
                action, "dead-letter", row["id"], None, {"consumer": row["consumer"], "topic": row["topic"], **details}
            )
            for row in rows
        ]
        await self._audit.record(session, records, occurred_at=by.now, actor=by.actor, correlation_id=by.correlation_id)


def _encoded(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _shown(row: asyncpg.Record) -> dict[str, Any]:
    """Return a row as people see it; a key that is not text is shown in base64."""
    names = [name.strip() for name in COLUMNS.split(",")]
    shown = {name: row[name] for name in names}
    key: bytes | None = row["message_key"]
    if key is not None:
        try:
            shown["message_key"] = key.decode()
        except UnicodeDecodeError:
            shown["message_key"] = f"base64:{base64.b64encode(key).decode()}"
    return shown
