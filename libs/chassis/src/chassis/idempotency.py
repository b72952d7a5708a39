"""Answers kept under an Idempotency-Key: the same request again gets the same answer, and runs once.

The key's row is inserted before the command and gets the answer after it, in the command's own transaction: whatever
ends that transaction early leaves no row, so nothing is in progress for longer than it runs. Only success is kept.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import asyncpg
import orjson
from sqlalchemy import Column, DateTime, Index, LargeBinary, MetaData, SmallInteger, Table, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_error

KEY_PATTERN: Final = r"^[\x21-\x7e]{1,255}$"
WAIT_MILLISECONDS: Final = 2000
"""How long a second request waits for the first one; bounded, since it holds a connection meanwhile."""
KEPT_HOURS: Final = 24
"""Answers are kept at least this long; the caller of `purge` decides how much longer."""
KEPT_HEADERS: Final = frozenset({"content-type", "etag", "location"})


class KeyReused(Exception):
    """The key was used for another request."""


class RequestInProgress(Exception):
    """A request with the same key is being handled."""


@dataclass(frozen=True, slots=True)
class KeyOf:
    """Whose key it is and for what.

    Attributes:
        tenant_id: tenant of the caller.
        subject: the caller.
        operation: method and route template.
        key: the value of the header.
    """

    tenant_id: UUID
    subject: str
    operation: str
    key: str


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """An answer as it is kept: status, the headers that matter, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def idempotency_table(metadata: MetaData) -> Table:
    """Return the table of stored answers for a service's metadata."""
    return Table(
        "idempotency_key",
        metadata,
        Column("tenant_id", Uuid, primary_key=True),
        Column("subject", Text, primary_key=True),
        Column("operation", Text, primary_key=True),
        Column("key", Text, primary_key=True),
        Column("fingerprint", LargeBinary, nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False),
        Column("status", SmallInteger),
        Column("headers", JSONB),
        Column("body", LargeBinary),
        Index("ix_idempotency_key_created_at", "created_at"),
    )


def fingerprint_of(method: str, path: str, body: bytes) -> bytes:
    """Return what tells one request from another; JSON that means the same has the same fingerprint.

    Args:
        method: HTTP method.
        path: path with its query.
        body: the body as it came.
    """
    try:
        # The parser that reads the route's body: another one would take two large numbers for one, or refuse its depth.
        meaning = json.dumps(json.loads(body), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        canonical = meaning.encode(errors="surrogatepass")
    except (ValueError, RecursionError):
        canonical = body
    return hashlib.sha256(b"\0".join((method.encode(), path.encode(), canonical))).digest()


class IdempotencyKeys:
    """The stored answers of one service.

    Args:
        schema: the service's schema.
    """

    def __init__(self, schema: str) -> None:
        table = f"{schema}.idempotency_key"
        one = "tenant_id = :tenant_id and subject = :subject and operation = :operation and key = :key"
        self._claim = text(
            f"insert into {table} (tenant_id, subject, operation, key, fingerprint, created_at)"
            " values (:tenant_id, :subject, :operation, :key, :fingerprint, :now) on conflict do nothing returning 1"
        )
        self._find = text(f"select fingerprint, status, headers, body from {table} where {one}")
        self._keep = text(
            f"update {table} set status = :status, headers = cast(:headers as jsonb), body = :body where {one}"
        )
        self._forget = text(f"delete from {table} where {one}")
        self._purge = text(
            f"delete from {table} where ctid = any(array(select ctid from {table} where created_at < :before"
            " order by created_at limit :limit for update skip locked))"
        )

    async def claim(self, session: AsyncSession, key: KeyOf, fingerprint: bytes, now: datetime) -> KeptAnswer | None:
        """Take a key for the transaction at hand, or return the answer that is kept under it.

        Waits WAIT_MILLISECONDS at most for another transaction that has taken it.

        Raises:
            KeyReused: it is kept for another request.
            RequestInProgress: another transaction still has it.
        """
        values = _columns(key)
        if await self._claimed(session, values | {"fingerprint": fingerprint, "now": now}):
            return None
        row = (await session.execute(self._find, values)).one_or_none()
        if row is None or row.status is None:
            raise RequestInProgress("a request with this Idempotency-Key is being handled")
        if row.fingerprint != fingerprint:
            raise KeyReused("the Idempotency-Key was used for another request")
        return KeptAnswer(row.status, row.headers, row.body)

    async def keep(self, session: AsyncSession, key: KeyOf, answer: KeptAnswer) -> None:
        """Keep the answer under a key that this transaction has claimed."""
        headers = orjson.dumps(dict(answer.headers)).decode()
        changes = {"status": answer.status, "headers": headers, "body": answer.body}
        await session.execute(self._keep, _columns(key) | changes)

    async def forget(self, session: AsyncSession, key: KeyOf) -> None:
        """Give up a key that this transaction has claimed."""
        await session.execute(self._forget, _columns(key))

    async def purge(self, session: AsyncSession, before: datetime, limit: int) -> int:
        """Delete the oldest answers kept before an instant, `limit` at most; return how many there were.

        Args:
            session: a write session of the system role.
            before: at least KEPT_HOURS ago.
            limit: rows of one transaction; call again while it returns as many.
        """
        result = await session.execute(self._purge, {"before": before, "limit": limit})
        return int(getattr(result, "rowcount", 0))

    async def _claimed(self, session: AsyncSession, values: Mapping[str, Any]) -> bool:
        usual = (await session.execute(_SHORT_WAIT, {"wait": str(WAIT_MILLISECONDS)})).scalar_one()
        try:
            claimed = (await session.execute(self._claim, values)).scalar_one_or_none() is not None
        except DBAPIError as error:
            if isinstance(driver_error(error), asyncpg.LockNotAvailableError):
                raise RequestInProgress("a request with this Idempotency-Key is being handled") from error
            raise
        await session.execute(_USUAL_WAIT, {"wait": usual})
        return claimed


_SHORT_WAIT: Final = text("select current_setting('lock_timeout'), set_config('lock_timeout', :wait, true)")
"""Gives the usual time-out and sets a short one: a select list is evaluated in its order."""
_USUAL_WAIT: Final = text("select set_config('lock_timeout', :wait, true)")


def _columns(key: KeyOf) -> dict[str, Any]:
    return {"tenant_id": key.tenant_id, "subject": key.subject, "operation": key.operation, "key": key.key}
