"""Rows of one tenant, with which the walk over all routes fills their paths."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg


async def make(admin: "asyncpg.Connection[Any]", tenant: UUID) -> Mapping[str, Any]:
    """Add a project with an object and return the value of each path parameter."""
    project, building, unit = uuid4(), uuid4(), uuid4()
    at = datetime(2026, 11, 1, tzinfo=UTC)
    await admin.execute(
        "insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)"
        " values ($1, $2, 'Riverside', 1, $3, $3)",
        project,
        tenant,
        at,
    )
    await admin.execute(
        "insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)"
        " values ($1, $2, $3, 'A', 1, $4, $4)",
        building,
        tenant,
        project,
        at,
    )
    await admin.execute(
        "insert into chessboard.property_object (id, tenant_id, project_id, building_id, section, number, floor, rooms,"
        " area, price_minor, currency, status, status_source, status_changed_at, version, created_at, updated_at)"
        " values ($1, $2, $3, $4, 1, '12', 3, 2, 54.3, 100, 'RUB', 'Free', 'Import', $5, 1, $5, $5)",
        unit,
        tenant,
        project,
        building,
        at,
    )
    letter = uuid4()
    await admin.execute(
        "insert into chessboard.dead_letter (id, consumer, topic, partition, record_offset, recorded_at, parking_key,"
        " headers, error_class, error_code, error, attempts, first_failed_at, last_failed_at, disposition)"
        " values ($1, 'pin.chessboard.test', 't', 0, 0, '2026-11-01T00:00:00Z', '', '[]', 'Unreadable', 'not_json', '',"
        " 1, '2026-11-01T00:00:00Z', '2026-11-01T00:00:00Z', 'quarantine')",
        letter,
    )
    return {
        "project_id": project,
        "building_id": building,
        "property_object_id": unit,
        "letter_id": letter,
        "name": "retention",
    }
