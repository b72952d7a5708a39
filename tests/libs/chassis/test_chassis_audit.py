"""Audit rows: written with what they speak of, or not at all."""

from datetime import UTC, datetime
from uuid import UUID

import asyncpg
import orjson
import pytest

from chassis.audit import Audit, AuditRecord
from chassis.db import Database

AUDIT = Audit("crm")
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)


def record(number: int, **details: object) -> AuditRecord:
    return AuditRecord("thing.moved", "thing", UUID(int=number), UUID(int=9) if number % 2 else None, details)


async def test_rows_stand_in_the_given_order_with_every_column(system: Database, admin: asyncpg.Connection):
    records = [record(number, note="tab\tline\n\\N", rank=number) for number in range(5)]
    async with system.write() as session:
        await AUDIT.record(session, records, occurred_at=NOW, actor="user\t1", correlation_id="req-1")
        await AUDIT.record(session, records[:1], occurred_at=NOW, actor=None, correlation_id="run-1")
        await AUDIT.record(session, [], occurred_at=NOW, actor=None, correlation_id="run-2")
    rows = await admin.fetch("select * from crm.audit_log order by id")
    assert [row["entity_id"] for row in rows] == [UUID(int=number) for number in (0, 1, 2, 3, 4, 0)]
    assert [row["tenant_id"] for row in rows[:2]] == [None, UUID(int=9)]
    assert {(row["action"], row["entity_type"], row["occurred_at"]) for row in rows} == {("thing.moved", "thing", NOW)}
    assert [row["actor"] for row in rows] == ["user\t1"] * 5 + [None]
    assert [row["correlation_id"] for row in rows] == ["req-1"] * 5 + ["run-1"]
    assert orjson.loads(rows[1]["details"]) == {"note": "tab\tline\n\\N", "rank": 1}


async def test_without_the_change_there_is_no_row(system: Database, admin: asyncpg.Connection):
    async def fail() -> None:
        async with system.write() as session:
            await AUDIT.record(session, [record(1)], occurred_at=NOW, actor=None, correlation_id="x")
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await admin.fetchval("select count(*) from crm.audit_log") == 0


async def test_an_instant_without_offset_is_refused(system: Database):
    async with system.write() as session:
        with pytest.raises(ValueError, match="naive"):
            await AUDIT.record(
                session, [record(1)], occurred_at=NOW.replace(tzinfo=None), actor=None, correlation_id="x"
            )
