"""The audit log: a row written in the transaction it speaks of; no audit row, no commit.

Rows are append-only: the roles of a service may insert and read them, never change them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from sqlalchemy import BigInteger, Column, DateTime, Identity, Index, MetaData, Table, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import COPY_NULL, copy_lines, copy_text
from chassis.instants import rfc3339
from chassis.sqltypes import Xid8


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One audited change.

    Attributes:
        action: what was done, `noun.verb` (`timeline-step.overdue`).
        entity_type: kind of the changed entity.
        entity_id: its id.
        tenant_id: its tenant.
        details: what changed, without personal data or money.
    """

    action: str
    entity_type: str
    entity_id: UUID
    tenant_id: UUID | None
    details: dict[str, Any]


def audit_table(metadata: MetaData) -> Table:
    """Return the audit table for a service's metadata."""
    return Table(
        "audit_log",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("occurred_at", DateTime(timezone=True), nullable=False),
        Column("actor", Text),
        Column("action", Text, nullable=False),
        Column("entity_type", Text, nullable=False),
        Column("entity_id", Uuid, nullable=False),
        Column("tenant_id", Uuid),
        Column("correlation_id", Text, nullable=False),
        Column("details", JSONB, nullable=False),
        Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
        Index("ix_audit_log_entity", "entity_type", "entity_id", "id"),
        Index("ix_audit_log_xid_id", "xid", "id"),
    )


_COLUMNS = (
    "occurred_at", "actor", "correlation_id", "action", "entity_type", "entity_id", "tenant_id", "details",
)  # fmt: skip


class Audit:
    """Writes audit rows of one service.

    Args:
        schema: the service's schema.
    """

    def __init__(self, schema: str) -> None:
        self._table = f"{schema}.audit_log"

    async def record(
        self,
        session: AsyncSession,
        records: Sequence[AuditRecord],
        *,
        occurred_at: datetime,
        actor: str | None,
        correlation_id: str,
    ) -> None:
        """Write audit rows in the session's transaction with one statement.

        Args:
            session: an open write session.
            records: the changes, in order.
            occurred_at: the change's instant, timezone-aware.
            actor: subject of the caller; None for the system.
            correlation_id: id of the request or job run.
        """
        if records:
            lines = _lines(records, occurred_at, actor, correlation_id)
            await self.write(session, lines)

    @staticmethod
    def lines(
        records: Sequence[AuditRecord], *, occurred_at: datetime, actor: str | None, correlation_id: str
    ) -> list[str]:
        """Make rows for `write`, as `record` would write them: in order, one per record."""
        return list(_lines(records, occurred_at, actor, correlation_id))

    async def write(self, session: AsyncSession, lines: Iterable[str]) -> None:
        """Write rows that `lines` has made."""
        await copy_lines(session, self._table, _COLUMNS, lines)


def _lines(
    records: Sequence[AuditRecord], occurred_at: datetime, actor: str | None, correlation_id: str
) -> Iterator[str]:
    who = COPY_NULL if actor is None else copy_text(actor)
    shared = f"{rfc3339(occurred_at)}\t{who}\t{copy_text(correlation_id)}"
    return (f"{shared}\t{_line(record)}" for record in records)


def _line(record: AuditRecord) -> str:
    tenant = COPY_NULL if record.tenant_id is None else str(record.tenant_id)
    details = copy_text(orjson.dumps(record.details).decode())
    return f"{record.action}\t{record.entity_type}\t{record.entity_id}\t{tenant}\t{details}"
