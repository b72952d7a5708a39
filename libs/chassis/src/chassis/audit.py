"""The audit log: a row written in the transaction it speaks of; no audit row, no commit.

Rows are append-only: the roles of a service may insert and read them, never change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import orjson
from sqlalchemy import BigInteger, Column, DateTime, Identity, Index, MetaData, Table, Text, Uuid
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection


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
        Index("ix_audit_log_entity", "entity_type", "entity_id", "id"),
    )


_INSERT = """
insert into {schema}.audit_log (occurred_at, actor, correlation_id, action, entity_type, entity_id, tenant_id, details)
select $1, $2, $3, a.action, a.entity_type, a.entity_id, a.tenant_id, a.details::jsonb
from unnest($4::text[], $5::text[], $6::uuid[], $7::uuid[], $8::text[])
     with ordinality as a(action, entity_type, entity_id, tenant_id, details, n)
order by a.n
"""


class Audit:
    """Writes audit rows of one service.

    Args:
        schema: the service's schema.
    """

    def __init__(self, schema: str) -> None:
        self._insert = _INSERT.format(schema=schema)

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
        if not records:
            return
        rows = [(r.action, r.entity_type, r.entity_id, r.tenant_id, orjson.dumps(r.details).decode()) for r in records]
        connection = await driver_connection(session)
        await connection.execute(self._insert, occurred_at, actor, correlation_id, *zip(*rows, strict=True))
