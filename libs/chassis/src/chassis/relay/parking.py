"""Refused rows: a key whose row was refused waits as a whole, so that nothing of it overtakes; all other keys flow.

A key has an entry in `outbox_parked_key` from the first refusal on: with an instant of the next attempt while
attempts are left, without one when an operator has to act. Whoever parks or unparks holds the key's lane, as a relay's
turn does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import Audit, AuditRecord
from chassis.db import driver_connection, mark_emitted
from chassis.messaging import RecordRefused
from chassis.outbox import lane_of

MOST_ATTEMPTS: Final = 5
FIRST_RETRY: Final = 1.0
RETRY_FACTOR: Final = 3
"""Attempts are 1, 3, 9 and 27 s apart: a topic that is being made or a right that is being given comes in time."""

KEYS_AT_ONCE: Final = 64
AFTER_TROUBLE: Final = 30.0
"""Seconds until the next attempt of a key that the broker neither took nor refused; no attempt is spent."""

_HOLD = "update {schema}.outbox set parked_at = $2 where id = any($1::bigint[])"
_COUNT = "update {schema}.outbox set attempts = attempts + 1, parked_at = $2 where id = any($1::bigint[])"
_PARK = """
insert into {schema}.outbox_parked_key as k (message_key, topic, parked_at, reason, next_attempt_at)
select p.message_key, p.topic, $2, p.reason, p.next_attempt_at
from unnest($1::text[], $3::text[], $4::text[], $5::timestamptz[]) as p(message_key, topic, reason, next_attempt_at)
on conflict (message_key) do update
set topic = excluded.topic, reason = excluded.reason, next_attempt_at = excluded.next_attempt_at
"""
_DUE = """
select message_key from {schema}.outbox_parked_key where next_attempt_at <= $1 order by next_attempt_at limit $2
"""
_TRY_LANES = """
select l.lane from unnest($1::smallint[]) as l(lane)
where pg_try_advisory_xact_lock(hashtext('{schema}.outbox'), l.lane)
"""
_LANE = "select pg_advisory_xact_lock(hashtext('{schema}.outbox'), $1)"
# Bounds in place of an equality, so that only the index on (message_key, id) gives the order (see worker.py).
_FIRST_ROWS = """
select k.message_key, o.id, o.topic, o.payload, o.headers, o.lane, o.attempts
from {schema}.outbox_parked_key as k left join lateral (
  select i.id, i.topic, i.payload, i.headers::text as headers, i.lane, i.attempts from {schema}.outbox as i
  where i.message_key >= k.message_key and i.message_key <= k.message_key and i.parked_at is not null
  order by i.message_key, i.id limit 1
) as o on true
where k.message_key = any($1::text[]) and k.next_attempt_at <= $2
"""
_POSTPONE = "update {schema}.outbox_parked_key set next_attempt_at = $2 where message_key = any($1::text[])"
_FORGET = "delete from {schema}.outbox_parked_key where message_key = any($1::text[])"
_RELEASE = """
with held as (
  select id from {schema}.outbox where message_key = any($1::text[]) and parked_at is not null order by id for update
)
update {schema}.outbox as o set parked_at = null, attempts = 0 from held where o.id = held.id
"""
_LIST = """
select k.message_key, k.topic, k.parked_at, k.reason, k.next_attempt_at, o.id, o.event_id, o.tenant_id, o.attempts,
  (select count(*) from {schema}.outbox as i where i.message_key = k.message_key and i.parked_at is not null) as rows
from {schema}.outbox_parked_key as k left join lateral (
  select i.id, i.event_id, i.tenant_id, i.attempts from {schema}.outbox as i
  where i.message_key >= k.message_key and i.message_key <= k.message_key and i.parked_at is not null
  order by i.message_key, i.id limit 1
) as o on true
where $1::text is null or k.message_key = $1 order by k.parked_at, k.message_key limit $2
"""
_FIND = "select message_key, lane from {schema}.outbox where id = $1 and parked_at is not null"
_DISCARD = """
delete from {schema}.outbox where id = $1 and parked_at is not null
returning event_id, tenant_id, type, topic, attempts
"""
_STILL_REFUSED = """
select exists (
  select from {schema}.outbox where message_key = $1 and parked_at is not null and attempts > 0 order by id
)
"""
_STATEMENTS = {
    "hold": _HOLD, "count": _COUNT, "postpone": _POSTPONE, "park": _PARK, "due": _DUE, "try lanes": _TRY_LANES,
    "lane": _LANE, "first rows": _FIRST_ROWS, "forget": _FORGET, "release": _RELEASE, "list": _LIST, "find": _FIND,
    "discard": _DISCARD, "still refused": _STILL_REFUSED,
}  # fmt: skip


class NotParked(LookupError):
    """There is no parked key or row of that name."""


@dataclass(frozen=True, slots=True)
class ParkedKey:
    """A key that waits.

    Attributes:
        key: the message key.
        topic: topic of the refused row.
        parked_at: since when.
        reason: why its first row was refused.
        next_attempt_at: when it is tried again; None if an operator has to act.
        first_id: id of its first row; None if it has none.
        event_id: `ce_id` of that row.
        tenant_id: its tenant.
        attempts: how often the row was refused.
        rows: how many rows wait; later ones may not be counted yet.
    """

    key: str
    topic: str
    parked_at: datetime
    reason: str
    next_attempt_at: datetime | None
    first_id: int | None
    event_id: UUID | None
    tenant_id: UUID | None
    attempts: int | None
    rows: int


class Parking:
    """The parked keys of one service's outbox.

    Args:
        schema: the service's schema; the sessions are of its system role.
        most_attempts: refusals of a row after which its key waits for an operator.
    """

    def __init__(self, schema: str, most_attempts: int = MOST_ATTEMPTS) -> None:
        self._most_attempts = most_attempts
        self._audit = Audit(schema)
        self._sql = {name: statement.format(schema=schema) for name, statement in _STATEMENTS.items()}

    # --- what a relay does in its turn, with the lane in its hands

    async def hold(self, connection: "asyncpg.Connection[asyncpg.Record]", ids: Sequence[int], at: datetime) -> None:
        """Take rows of a parked key out of the claim's sight."""
        if ids:
            await connection.execute(self._sql["hold"], ids, at)

    async def refuse(
        self,
        connection: "asyncpg.Connection[asyncpg.Record]",
        rows: Sequence[tuple[asyncpg.Record, RecordRefused]],
        at: datetime,
    ) -> None:
        """Count a refusal of each row and park its key: until the next attempt, or for an operator."""
        if not rows:
            return
        await connection.execute(self._sql["count"], [row["id"] for row, _ in rows], at)
        keys = {row["message_key"]: (row, refusal) for row, refusal in reversed(rows)}
        await connection.execute(
            self._sql["park"],
            list(keys),
            at,
            [row["topic"] for row, _ in keys.values()],
            [refusal.reason for _, refusal in keys.values()],
            [self._next_attempt(row["attempts"] + 1, refusal, at) for row, refusal in keys.values()],
        )

    async def due_rows(self, connection: "asyncpg.Connection[asyncpg.Record]", now: datetime) -> list[asyncpg.Record]:
        """Return the first row of each key whose next attempt is due and whose lane is free, and hold these lanes."""
        due = [row["message_key"] for row in await connection.fetch(self._sql["due"], now, KEYS_AT_ONCE)]
        if not due:
            return []
        lanes = await connection.fetch(self._sql["try lanes"], sorted({lane_of(key) for key in due}))
        ours = {row["lane"] for row in lanes}
        return await connection.fetch(self._sql["first rows"], [key for key in due if lane_of(key) in ours], now)

    async def postpone(
        self, connection: "asyncpg.Connection[asyncpg.Record]", keys: Sequence[str], now: datetime
    ) -> None:
        """Try keys again later, of which nothing is known after trouble; nothing is counted against them."""
        if keys:
            await connection.execute(self._sql["postpone"], keys, now + timedelta(seconds=AFTER_TROUBLE))

    async def release(self, connection: "asyncpg.Connection[asyncpg.Record]", keys: Sequence[str]) -> int:
        """Let keys go, all rows of each at once; return how many rows were let go."""
        if not keys:
            return 0
        await connection.execute(self._sql["forget"], keys)
        status: str = await connection.execute(self._sql["release"], keys)
        return int(status.rpartition(" ")[2])

    def _next_attempt(self, attempts: int, refusal: RecordRefused, at: datetime) -> datetime | None:
        if refusal.final or attempts >= self._most_attempts:
            return None
        return at + timedelta(seconds=FIRST_RETRY * RETRY_FACTOR ** (attempts - 1))

    # --- what an operator does

    async def parked(self, session: AsyncSession, limit: int = 100) -> list[ParkedKey]:
        """Return the keys that wait, those that have waited longest first."""
        connection = await driver_connection(session)
        return [_parked_key(row) for row in await connection.fetch(self._sql["list"], None, limit)]

    async def unpark(
        self, session: AsyncSession, key: str, *, at: datetime, actor: str | None, reason: str = ""
    ) -> int:
        """Let a key go: its rows are sent again in id order, before all later ones; audited.

        Args:
            session: an open write session; waits for the turn of a relay that holds the key's lane.
            key: the message key.
            at: now.
            actor: who does it.
            reason: why, for the audit.

        Returns:
            How many rows were let go.

        Raises:
            NotParked: the key isn't parked.
        """
        connection = await driver_connection(session)
        await connection.execute(self._sql["lane"], lane_of(key))
        found = await connection.fetch(self._sql["list"], key, 1)
        if not found:
            raise NotParked(f"key {key!r} is not parked")
        rows = await self.release(connection, [key])
        mark_emitted(session)
        event_id, tenant_id = found[0]["event_id"], found[0]["tenant_id"]
        details = {"key": key, "rows": rows, "refused": found[0]["reason"], "reason": reason}
        await self._record(session, "outbox.unparked", event_id or UUID(int=0), tenant_id, details, at, actor)
        return rows

    async def discard(self, session: AsyncSession, row_id: int, *, at: datetime, actor: str | None, reason: str) -> str:
        """Delete a parked row, which then is never sent; lets its key go if no other row of it was refused; audited.

        Args:
            session: an open write session; waits for the turn of a relay that holds the key's lane.
            row_id: the row's id.
            at: now.
            actor: who does it.
            reason: why, for the audit.

        Returns:
            The row's message key.

        Raises:
            NotParked: no parked row has that id.
            ValueError: no reason is given.
        """
        if not reason.strip():
            raise ValueError("a row is discarded for a reason")
        connection = await driver_connection(session)
        found = await connection.fetchrow(self._sql["find"], row_id)
        if found is None:
            raise NotParked(f"no parked row {row_id}")
        key: str = found["message_key"]
        await connection.execute(self._sql["lane"], found["lane"])
        gone = await connection.fetchrow(self._sql["discard"], row_id)
        if gone is None:
            raise NotParked(f"no parked row {row_id} any more")
        if gone["attempts"] and not await connection.fetchval(self._sql["still refused"], key):
            await self.release(connection, [key])
            mark_emitted(session)
        details = {"key": key, "row": row_id, "type": gone["type"], "topic": gone["topic"], "reason": reason}
        await self._record(session, "outbox.discarded", gone["event_id"], gone["tenant_id"], details, at, actor)
        return key

    async def _record(
        self,
        session: AsyncSession,
        action: str,
        entity_id: UUID,
        tenant_id: UUID | None,
        details: dict[str, Any],
        at: datetime,
        actor: str | None,
    ) -> None:
        record = AuditRecord(action, "outbox-event", entity_id, tenant_id, details)
        await self._audit.record(session, [record], occurred_at=at, actor=actor, correlation_id=f"outbox/{entity_id}")


def _parked_key(row: asyncpg.Record) -> ParkedKey:
    return ParkedKey(
        key=row["message_key"],
        topic=row["topic"],
        parked_at=row["parked_at"],
        reason=row["reason"],
        next_attempt_at=row["next_attempt_at"],
        first_id=row["id"],
        event_id=row["event_id"],
        tenant_id=row["tenant_id"],
        attempts=row["attempts"],
        rows=row["rows"],
    )
