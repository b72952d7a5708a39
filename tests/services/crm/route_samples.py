"""Rows of one tenant, with which the walk over all routes fills their paths."""

from collections.abc import Mapping
from typing import Any
from uuid import UUID, uuid4

import asyncpg


async def make(admin: "asyncpg.Connection[Any]", tenant: UUID) -> Mapping[str, Any]:
    """Add a deal with a step and return the value of each path parameter."""
    deal = uuid4()
    await admin.execute(
        "insert into crm.deal (id, tenant_id, title, status, version, created_at, updated_at)"
        " values ($1, $2, 'Flat 12', 'Active', 1, '2026-11-01T00:00:00Z', '2026-11-01T00:00:00Z')",
        deal,
        tenant,
    )
    await admin.execute(
        "insert into crm.deal_timeline_event (id, deal_id, tenant_id, type, status, occurred_at, payload, created_at,"
        " updated_at) values ($1, $2, $3, 'DocumentRequested', 'InProgress', '2026-11-01T00:00:00Z', '{}',"
        " '2026-11-01T00:00:00Z', '2026-11-01T00:00:00Z')",
        uuid4(),
        deal,
        tenant,
    )
    letter = uuid4()
    await admin.execute(
        "insert into crm.dead_letter (id, consumer, topic, partition, record_offset, recorded_at, parking_key, headers,"
        " error_class, error_code, error, attempts, first_failed_at, last_failed_at, disposition)"
        " values ($1, 'pin.crm.test', 't', 0, 0, '2026-11-01T00:00:00Z', '', '[]', 'Unreadable', 'not_json', '', 1,"
        " '2026-11-01T00:00:00Z', '2026-11-01T00:00:00Z', 'quarantine')",
        letter,
    )
    return {"deal_id": deal, "letter_id": letter, "name": "timeline-overdue"}
