"""The safety net's batch against one SQL statement that writes the same rows, payloads built in SQL."""

import logging
import statistics
import time
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import structlog

from chassis.db import Database
from chassis.jobs import Run
from chassis.runtime import Stop
from chessboard import commands
from chessboard.domain import ExpirationLimits, Phase
from tests.bench.report import Figure

BATCH = 200
GRACE = timedelta(minutes=10)
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)

ONE_STATEMENT = """
with due as (
  select t.* from chessboard.property_object t
  where t.status = 'Reserved' and t.reserved_until is not null and t.reserved_until < $1::timestamptz - $4::interval
  order by t.reserved_until, t.id limit $2 for update skip locked
), freed as (
  update chessboard.property_object t
  set status = 'Free', reserved_until = null, booked_until = null, hold_deal_id = null, hold_booking_id = null,
      status_source = 'ExpirationJob', status_changed_at = $1, updated_at = $1, version = t.version + 1
  from due where t.id = due.id and t.version = due.version returning t.id
), kept as (
  insert into chessboard.property_object_version (property_object_id, version, tenant_id, from_status, to_status,
    source, price_minor, currency, correlation_id, changed_at)
  select id, version + 1, tenant_id, status, 'Free', 'ExpirationJob', price_minor, currency, $3::text, $1 from due
), audited as (
  insert into chessboard.audit_log (occurred_at, actor, action, entity_type, entity_id, tenant_id, correlation_id,
    details)
  select $1, null, 'property-object.status-changed', 'property-object', id, tenant_id, $3::text,
         jsonb_build_object('from', status, 'to', 'Free', 'source', 'ExpirationJob', 'version', version + 1,
           'asOf', $1::timestamptz, 'runId', $3::text, 'previousHoldDealId', hold_deal_id,
           'previousReservedUntil', reserved_until, 'previousBookedUntil', booked_until)
  from due
), asked as (
  insert into chessboard.project_recalc_request (project_id, requested_at) select project_id, $1 from due
), announced as (
  insert into chessboard.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
                                 tenant_id, occurred_at, run_id)
  select e.event_id, 'PropertyObject', id::text, 'pin.chessboard.property-object-status-changed.v1',
         convert_to(jsonb_build_object('PropertyObjectId', id, 'TenantId', tenant_id, 'ProjectId', project_id,
           'BuildingId', building_id, 'FromStatus', status, 'ToStatus', 'Free', 'StatusSource', 'ExpirationJob',
           'ReservedUntil', null, 'BookedUntil', null, 'HoldDealId', null, 'SoldAt', null,
           'StatusChangedAt', $1::timestamptz, 'Version', version + 1)::text, 'UTF8'),
         jsonb_build_object('content-type', 'application/json', 'ce_specversion', '1.0', 'ce_id', e.event_id,
           'ce_source', '/pin/chessboard', 'ce_type', 'pin.chessboard.property-object-status-changed.v1',
           'ce_time', $1::timestamptz, 'ce_subject', id, 'ce_aggregatetype', 'PropertyObject',
           'ce_contractversion', '1', 'ce_eventclass', 'domain', 'ce_correlationid', $3::text, 'ce_tenantid', tenant_id,
           'ce_sequence', (version + 1)::text),
         'pin.chessboard.property-object-status-changed.v1', id::text, (hashtext(id::text) & 63)::smallint, tenant_id,
         $1, $3::text::uuid
  from due cross join lateral (select gen_random_uuid() as event_id, due.id as of_row) as e
)
select count(*) from freed
"""

SEED = """
with made as (
  insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)
  select gen_random_uuid(), ('00000000-0000-4000-8000-' || lpad((n % 20)::text, 12, '0'))::uuid, 'Project ' || n, 1,
         $1, $1
  from generate_series(1, 20) n returning id, tenant_id
)
insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)
select gen_random_uuid(), tenant_id, id, 'Building', 1, $1, $1 from made
"""
SEED_OBJECTS = """
insert into chessboard.property_object (id, tenant_id, project_id, building_id, section, number, floor, rooms, area,
  price_minor, currency, status, reserved_until, hold_deal_id, hold_booking_id, status_source, status_changed_at,
  version, created_at, updated_at)
select gen_random_uuid(), b.tenant_id, b.project_id, b.id, 1, n::text, 1, 2, 54.3, 1250000000, 'RUB', 'Reserved',
  $1::timestamptz + make_interval(secs => n), gen_random_uuid(), gen_random_uuid(), 'Crm', $1, 2, $1, $1
from chessboard.building b cross join generate_series(1, $2::int) n
"""


async def seed_holds(admin_url: str, count: int) -> None:
    """Add holds that were over days ago, spread over twenty projects."""
    admin = await asyncpg.connect(admin_url)
    try:
        start = NOW - timedelta(days=10)
        await admin.execute(SEED, start)
        await admin.execute(SEED_OBJECTS, start, count // 20, timeout=600)
        await admin.execute("vacuum (analyze) chessboard.property_object")
    finally:
        await admin.close()


async def our_batches(database: Database, count: int) -> list[float]:
    """Run batches of the job's command in their own transactions; return seconds of each."""
    seconds = []
    for _ in range(count):
        run = Run(uuid4(), NOW, Stop(), lambda: None)
        started = time.perf_counter()
        async with database.write() as session:
            batch = await commands.release_expired_holds(session, run, Phase.RESERVED, ExpirationLimits(BATCH, GRACE))
        seconds.append(time.perf_counter() - started)
        assert len(batch.released) == BATCH, batch
    return seconds


async def statement_batches(url: str, count: int) -> list[float]:
    """Run the one statement in transactions of its own; return seconds of each."""
    connection = await asyncpg.connect(url)
    seconds = []
    try:
        for _ in range(count):
            started = time.perf_counter()
            async with connection.transaction():
                freed = await connection.fetchval(ONE_STATEMENT, NOW, BATCH, str(uuid4()), GRACE)
            seconds.append(time.perf_counter() - started)
            assert freed == BATCH, freed
    finally:
        await connection.close()
    return seconds


async def against_one_statement(database: Database, url: str, admin_url: str, rounds: int = 12) -> list[Figure]:
    """Alternate the job's batches with the statement's over the same table; compare medians and slowest."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    await seed_holds(admin_url, 2 * (rounds * 10 + 10) * BATCH)
    await our_batches(database, 10)
    await statement_batches(url, 10)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        ours += await our_batches(database, 10)
        theirs += await statement_batches(url, 10)
    mine, base = statistics.median(ours), statistics.median(theirs)
    slow, slow_base = (statistics.quantiles(each, n=100)[98] for each in (ours, theirs))
    return [
        Figure(
            "hold expiration, batch of 200, rows per second against one SQL statement",
            ratio=base / mine,
            bar=0.6,
            aim=0.75,
            detail=f"{mine * 1000:.1f} ms against {base * 1000:.1f} ms a batch ({BATCH / mine:.0f} rows/s)",
        ),
        Figure(
            "hold expiration, p99 of a batch against the statement's p99",
            ratio=slow / slow_base,
            bar=5.0,
            lower_is_better=True,
            detail=f"{slow * 1000:.1f} ms against {slow_base * 1000:.1f} ms",
        ),
    ]
