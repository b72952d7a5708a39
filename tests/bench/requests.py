"""CRM's requests: batches against one transaction per message, and against set-based SQL that writes the same rows.

Each message is a hold of an object that is free: inbox, row lock, domain, ledger, history, audit, the change's event,
its answer, and the request to count the project again.
"""

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import asyncpg
import orjson
from prometheus_client import CollectorRegistry

from chassis.clock import DatabaseClock
from chassis.consumers import ConsumerMetrics
from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.db import Database
from chassis.instants import rfc3339
from chassis.messaging import Received
from chassis.runtime import Stop
from chessboard.consumers import declare_consumers
from tests.bench.report import Figure

BATCH, ROUNDS, WHOLE, SINGLE = 500, 5, 2000, 500
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TENANT = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01")
HOLD = "pin.crm.booking-hold-requested.v1"
SEED = """
with project as (
  insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)
  values (gen_random_uuid(), $2, 'Riverside', 1, $1, $1) returning id
), building as (
  insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)
  select gen_random_uuid(), $2, id, 'A', 4, $1, $1 from project returning id, project_id
)
insert into chessboard.property_object (id, tenant_id, project_id, building_id, section, number, floor, rooms, area,
  price_minor, currency, status, status_source, status_changed_at, version, created_at, updated_at)
select gen_random_uuid(), $2, b.project_id, b.id, 1 + n % 4, n::text, n % 25, 2, 54.3, 1000, 'RUB', 'Free', 'Import',
  $1, 1, $1, $1
from building b cross join generate_series(1, $3::int) n
returning id
"""
BARE = """
with asked as (
  select * from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[])
    as a(event_id, object_id, booking_id, deal_id, change_id, answer_id)
), marked as (
  insert into chessboard.inbox (consumer, event_id, received_at)
  select 'bench', event_id, $7 from asked on conflict do nothing returning event_id
), locked as (
  select o.id, o.tenant_id, o.project_id, o.building_id, o.version, o.price_minor, o.currency
  from chessboard.property_object o where o.id in (select object_id from asked) order by o.id for update
), held as (
  update chessboard.property_object o
  set status = 'Reserved', reserved_until = $8, hold_deal_id = a.deal_id, hold_booking_id = a.booking_id,
      status_source = 'Crm', status_changed_at = $7, updated_at = $7, version = l.version + 1
  from locked l join asked a on a.object_id = l.id join marked m on m.event_id = a.event_id
  where o.id = l.id and o.status = 'Free'
  returning o.id, o.tenant_id, o.project_id, o.building_id, o.version, o.price_minor, o.currency, a.booking_id,
            a.deal_id, a.event_id, a.change_id, a.answer_id
), ledger as (
  insert into chessboard.hold_ledger (property_object_id, booking_id, deal_id, last_sequence, released)
  select id, booking_id, deal_id, 1, false from held
  on conflict (property_object_id, booking_id) do update set last_sequence = excluded.last_sequence
), history as (
  insert into chessboard.property_object_version (property_object_id, version, tenant_id, from_status, to_status,
    source, reserved_until, hold_deal_id, hold_booking_id, price_minor, currency, correlation_id, changed_at)
  select id, version, tenant_id, 'Free', 'Reserved', 'Crm', $8, deal_id, booking_id, price_minor, currency, $9, $7
  from held
), audited as (
  insert into chessboard.audit_log (occurred_at, action, entity_type, entity_id, tenant_id, correlation_id, details)
  select $7, 'property-object.status-changed', 'property-object', id, tenant_id, $9,
    jsonb_build_object('from', 'Free', 'to', 'Reserved', 'source', 'Crm', 'version', version, 'asOf', $7::timestamptz,
      'runId', null, 'previousHoldDealId', null, 'previousReservedUntil', null, 'previousBookedUntil', null)
  from held
), counted as (
  insert into chessboard.project_recalc_request (project_id, requested_at) select project_id, $7 from held
), messages as (
  select change_id as message_id, 'pin.chessboard.property-object-status-changed.v1' as topic, held.*,
    jsonb_build_object('PropertyObjectId', id, 'TenantId', tenant_id, 'ProjectId', project_id,
      'BuildingId', building_id, 'FromStatus', 'Free', 'ToStatus', 'Reserved', 'StatusSource', 'Crm',
      'ReservedUntil', $8::timestamptz,
      'BookedUntil', null, 'HoldDealId', deal_id, 'SoldAt', null, 'StatusChangedAt', $7::timestamptz,
      'Version', version) as body
  from held
  union all
  select answer_id, 'pin.chessboard.hold-answered.v1', held.*,
    jsonb_build_object('BookingId', booking_id, 'TenantId', tenant_id, 'PropertyObjectId', id, 'Sequence', 1,
      'Outcome', 'held', 'Reason', null, 'Version', version)
  from held
), announced as (
  insert into chessboard.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
    tenant_id, occurred_at)
  select message_id, 'PropertyObject', id::text, topic, convert_to(body::text, 'UTF8'),
    jsonb_build_object('content-type', 'application/json', 'ce_specversion', '1.0', 'ce_id', message_id,
      'ce_source', '/pin/chessboard', 'ce_type', topic, 'ce_time', $7::timestamptz, 'ce_subject', id,
      'ce_aggregatetype', 'PropertyObject', 'ce_contractversion', '1', 'ce_eventclass', 'domain',
      'ce_correlationid', $9::text, 'ce_tenantid', tenant_id, 'ce_causationid', event_id,
      'ce_sequence', version::text),
    topic, id::text, (hashtext(id::text) & 63)::smallint, tenant_id, $7
  from messages
)
select count(*) from held
"""
WRITTEN = ("inbox", "hold_ledger", "property_object_version", "audit_log", "project_recalc_request", "outbox")


def hold_requests(ids: Sequence[UUID]) -> list[Received]:
    """Return a hold of each object, as the broker would give them."""
    made = []
    for offset, one in enumerate(ids):
        unit, tenant = str(one), str(TENANT)
        headers = {
            "content-type": "application/json",
            "ce_specversion": "1.0",
            "ce_id": str(uuid4()),
            "ce_source": "/pin/crm",
            "ce_type": HOLD,
            "ce_time": "2026-11-30T12:00:00Z",
            "ce_subject": unit,
            "ce_aggregatetype": "PropertyObject",
            "ce_contractversion": "1",
            "ce_sequence": "1",
            "ce_tenantid": tenant,
            "ce_correlationid": "bench",
            "ce_eventclass": "domain",
        }
        value = {
            "BookingId": str(uuid4()),
            "DealId": str(uuid4()),
            "TenantId": tenant,
            "PropertyObjectId": unit,
            "ReservedUntil": rfc3339(NOW + timedelta(hours=1)),
        }
        pairs = tuple((name, text.encode()) for name, text in headers.items())
        made.append(Received(HOLD, 0, offset, int(time.time() * 1000), unit.encode(), orjson.dumps(value), pairs))
    return made


async def bare_sql(url: str, ids: Sequence[UUID]) -> float:
    """Hold objects with one statement per batch, each in its transaction; return the seconds."""
    connection = await asyncpg.connect(url)
    spent = 0.0
    try:
        for first in range(0, len(ids), BATCH):
            units = list(ids[first : first + BATCH])
            fresh = [[uuid4() for _ in units] for _ in range(5)]
            started = time.perf_counter()
            async with connection.transaction():
                arguments = (fresh[0], units, *fresh[1:], NOW, NOW + timedelta(hours=1), "bench")
                assert await connection.fetchval(BARE, *arguments) == len(units)
            spent += time.perf_counter() - started
    finally:
        await connection.close()
    return spent


async def consumer_path(database: Database, url: str, admin_url: str) -> list[Figure]:
    """Settle holds in batches, one by one, and as bare SQL, in turns; every object is held once."""
    admin = await asyncpg.connect(admin_url)
    ids = [row["id"] for row in await admin.fetch(SEED, NOW, TENANT, (ROUNDS + 1) * (2 * WHOLE + SINGLE))]
    await admin.execute("vacuum (analyze) chessboard.property_object")
    [consumer] = declare_consumers(CollectorRegistry())
    handling = Handling(database, consumer, "chessboard", DatabaseClock(), ConsumerMetrics(CollectorRegistry()))

    async def taken(units: Sequence[UUID], size: int) -> float:
        todo, batches, started = hold_requests(units), Batches(handling), time.perf_counter()
        for first in range(0, len(todo), size):
            await batches.take(todo[first : first + size], Stop())
        return time.perf_counter() - started

    ways: dict[str, tuple[int, Callable[[Sequence[UUID]], Awaitable[float]]]] = {
        "batches": (WHOLE, lambda units: taken(units, BATCH)),
        "single": (SINGLE, lambda units: taken(units, 1)),
        "sql": (WHOLE, lambda units: bare_sql(url, units)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for name, (count, run) in ways.items():
            units, ids = ids[:count], ids[count:]
            seconds = await run(units)
            rows = [await admin.fetchval(f"select count(*) from chessboard.{table}") for table in WRITTEN]
            assert rows == [count] * 5 + [2 * count], rows
            await admin.execute(f"truncate {', '.join(f'chessboard.{table}' for table in WRITTEN)}")
            if number:
                rates[name].append(count / seconds)
    await admin.close()
    whole, single, bare = (statistics.median(rates[name]) for name in ways)
    return [
        Figure(
            "CRM's requests in batches / one transaction per message",
            whole / single,
            bar=5.0,
            detail=f"{whole:.0f} against {single:.0f} messages/s",
        ),
        Figure(
            "CRM's requests in batches / set-based SQL that writes the same rows",
            whole / bare,
            bar=0.15,
            detail=f"{whole:.0f} against {bare:.0f} messages/s",
        ),
    ]
