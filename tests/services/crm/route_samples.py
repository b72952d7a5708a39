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
    booking, property_object, partner = uuid4(), uuid4(), uuid4()
    await admin.execute(
        "insert into crm.object_claim (tenant_id, property_object_id, sequence) values ($1, $2, 0)",
        tenant,
        property_object,
    )
    await admin.execute(
        "insert into crm.booking (id, tenant_id, deal_id, partner_id, state, version, charged_minor, probes,"
        " created_at, updated_at)"
        " values ($1, $2, $3, $4, 'draft', 1, 0, 0, '2026-11-01T00:00:00Z', '2026-11-01T00:00:00Z')",
        booking,
        tenant,
        deal,
        partner,
    )
    await admin.execute(
        "insert into crm.booking_object (booking_id, tenant_id, property_object_id, position) values ($1, $2, $3, 1)",
        booking,
        tenant,
        property_object,
    )
    await admin.execute(
        "insert into crm.booking_history (booking_id, version, tenant_id, from_state, to_state, changed_at)"
        " values ($1, 1, $2, 'draft', 'draft', '2026-11-01T00:00:00Z')",
        booking,
        tenant,
    )
    await admin.execute(
        "insert into crm.partner_limit (tenant_id, partner_id, currency, limit_minor, used_minor)"
        " values ($1, $2, 'EUR', 1, 0)",
        tenant,
        partner,
    )
    letter = uuid4()
    await admin.execute(
        "insert into crm.dead_letter (id, consumer, topic, partition, record_offset, recorded_at, parking_key, headers,"
        " error_class, error_code, error, attempts, first_failed_at, last_failed_at, disposition)"
        " values ($1, 'pin.crm.test', 't', 0, 0, '2026-11-01T00:00:00Z', '', '[]', 'Unreadable', 'not_json', '', 1,"
        " '2026-11-01T00:00:00Z', '2026-11-01T00:00:00Z', 'quarantine')",
        letter,
    )
    return {
        "deal_id": deal,
        "booking_id": booking,
        "partner_id": partner,
        "letter_id": letter,
        "name": "timeline-overdue",
    }
