"""timeline-overdue against one SQL statement that writes the same rows: update, audit, outbox; payload built in SQL."""

import statistics
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg

from chassis.db import Database
from chassis.jobs import Run
from chassis.runtime import Stop
from crm import commands
from crm.domain import OverdueLimits
from tests.bench.report import Figure

BATCH = 500
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)

ONE_STATEMENT = """
with due as (
  select t.id, t.deal_id, t.tenant_id, t.type, t.due_at from crm.deal_timeline_event t
  where t.status = 'InProgress' and t.due_at is not null and t.due_at < $1
  order by t.due_at, t.id limit $2 for update skip locked
), moved as (
  update crm.deal_timeline_event t set status = 'Overdue', updated_at = $1 from due
  where t.id = due.id and t.status = 'InProgress' returning t.id
), audited as (
  insert into crm.audit_log (occurred_at, actor, action, entity_type, entity_id, tenant_id, correlation_id, details)
  select $1, null, 'timeline-step.overdue', 'timeline-step', id, tenant_id, $3::text,
         jsonb_build_object('from', 'InProgress', 'to', 'Overdue', 'dueAt', due_at, 'overdueAt', $1::timestamptz)
  from due
), announced as (
  insert into crm.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
                          tenant_id, occurred_at, run_id)
  select e.event_id, 'Deal', deal_id::text, 'pin.crm.timeline-overdue.v1',
         convert_to(jsonb_build_object('DealId', deal_id, 'TimelineEventId', id, 'TenantId', tenant_id, 'Type', type,
                                       'DueAt', due_at, 'OverdueAt', $1::timestamptz)::text, 'UTF8'),
         jsonb_build_object('content-type', 'application/json', 'ce_specversion', '1.0', 'ce_id', e.event_id,
           'ce_source', '/pin/crm', 'ce_type', 'pin.crm.timeline-overdue.v1', 'ce_time', $1::timestamptz,
           'ce_subject', deal_id, 'ce_aggregatetype', 'Deal', 'ce_contractversion', '1', 'ce_eventclass', 'domain',
           'ce_correlationid', $3::text, 'ce_tenantid', tenant_id),
         'pin.crm.timeline-overdue.v1', deal_id::text, (hashtext(deal_id::text) & 63)::smallint, tenant_id, $1,
         $3::text::uuid
  from due cross join lateral (select gen_random_uuid() as event_id, due.id as of_row) as e
)
select count(*) from moved
"""

SEED = """
insert into crm.deal (id, tenant_id, title, status, version, created_at, updated_at)
select gen_random_uuid(), ('00000000-0000-4000-8000-' || lpad((n % 20)::text, 12, '0'))::uuid, 'Deal ' || n,
       'Active', 1, $1, $1 from generate_series(1, $2) n
"""
SEED_STEPS = """
insert into crm.deal_timeline_event (id, deal_id, tenant_id, type, status, occurred_at, due_at, payload, created_at,
                                     updated_at)
select gen_random_uuid(), d.id, d.tenant_id, 'DocumentRequested', 'InProgress', $1,
       $1::timestamptz + make_interval(secs => $2 + n * $3),
       jsonb_build_object('document', 'passport', 'note', 'page ' || n), $1,
       $1
from (select id, tenant_id, row_number() over () as r from crm.deal limit 1000) d
cross join generate_series(1, $4) n
"""


async def seed_steps(admin: "asyncpg.Connection[asyncpg.Record]", *, due: int, future: int) -> None:
    """Add steps in progress: `due` that are past at NOW and `future` that are not (both in thousands of rows)."""
    if not await admin.fetchval("select exists (select from crm.deal)"):
        await admin.execute(SEED, NOW - timedelta(days=40), 1000)
    start = NOW - timedelta(days=30)
    await admin.execute(SEED_STEPS, start, 0.0, 60.0, due, timeout=600)
    if future:
        await admin.execute(SEED_STEPS, NOW, 3600.0, 60.0, future, timeout=600)
    await admin.execute("analyze crm.deal_timeline_event")


async def our_batches(database: Database, count: int) -> list[float]:
    """Run batches of the job's command in their own transactions; return seconds of each."""
    run = Run(uuid4(), NOW, Stop(), lambda: None)
    seconds, after = [], None
    for _ in range(count):
        started = time.perf_counter()
        async with database.write() as session:
            result = await commands.mark_overdue_steps(session, run, OverdueLimits(BATCH, 200), after)
        seconds.append(time.perf_counter() - started)
        after = result.cursor
        assert result.processed_count == BATCH, result
    return seconds


async def statement_batches(url: str, count: int) -> list[float]:
    """Run the one statement in transactions of its own; return seconds of each."""
    connection = await asyncpg.connect(url)
    seconds = []
    try:
        for _ in range(count):
            started = time.perf_counter()
            async with connection.transaction():
                moved = await connection.fetchval(ONE_STATEMENT, NOW, BATCH, str(uuid4()))
            seconds.append(time.perf_counter() - started)
            assert moved == BATCH, moved
    finally:
        await connection.close()
    return seconds


async def against_one_statement(database: Database, url: str, admin_url: str, rounds: int = 8) -> list[Figure]:
    """Alternate the job's batches with the statement's over the same table and compare the medians."""
    admin = await asyncpg.connect(admin_url)
    try:
        await seed_steps(admin, due=(rounds + 1) * 10, future=0)
    finally:
        await admin.close()
    await our_batches(database, 5)
    await statement_batches(url, 5)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours += await our_batches(database, 10)
        theirs += await statement_batches(url, 10)
    mine, base = statistics.median(ours), statistics.median(theirs)
    return [
        Figure(
            "timeline-overdue, batch of 500, rows per second against one SQL statement",
            ratio=base / mine,
            bar=0.6,
            aim=0.75,
            detail=f"{mine * 1000:.1f} ms against {base * 1000:.1f} ms a batch ({BATCH / mine:.0f} rows/s)",
        )
    ]


async def at_scale(small: Database, large: Database, small_admin: str, large_admin: str) -> list[Figure]:
    """Compare the cost of a batch over 3 million steps with the cost over 100 thousand; 20 thousand are due in both."""
    for url, future in ((small_admin, 80), (large_admin, 2980)):
        admin = await asyncpg.connect(url)
        try:
            await seed_steps(admin, due=20, future=future)
            await admin.execute("vacuum (analyze) crm.deal_timeline_event")
            await admin.execute("checkpoint")
        finally:
            await admin.close()
    costs: dict[str, list[float]] = {"small": [], "large": []}
    for _ in range(4):
        costs["small"] += await our_batches(small, 8)
        costs["large"] += await our_batches(large, 8)
    few, many = (statistics.median(costs[name]) for name in ("small", "large"))
    return [
        Figure(
            "timeline-overdue, cost of a batch at 3 million rows against 100 thousand",
            ratio=many / few,
            bar=1.3,
            lower_is_better=True,
            detail=f"{many * 1000:.1f} ms against {few * 1000:.1f} ms",
        )
    ]
