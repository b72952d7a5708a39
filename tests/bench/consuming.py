"""Inbox and one flush per batch against the same handler run one transaction per message.

The handler locks its deal (an entity), changes it through its mapping, and emits one event: what a command does.
"""

import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import orjson
from prometheus_client import CollectorRegistry
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import DatabaseClock
from chassis.consumers import Consumer, ConsumerMetrics, Delivery, Handler
from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.db import Database, find_locked, flush, remember_locked
from chassis.instants import rfc3339
from chassis.messaging import Received
from chassis.outbox import Message, Outbox
from chassis.runtime import Stop
from crm.domain import Deal
from crm.messages import DEAL_COMPLETED
from crm.tables import deals
from tests.bench.report import Figure

DEALS, MESSAGES, ROUNDS = 2000, 2000, 3
NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
OUTBOX = Outbox("crm")
SEED = """
insert into crm.deal (id, tenant_id, title, status, version, created_at, updated_at)
select gen_random_uuid(), gen_random_uuid(), 'Deal ' || n, 'Active', 1, $1, $1 from generate_series(1, $2::int) n
returning id
"""


async def preload(session: AsyncSession, keys: Sequence[UUID]) -> None:
    """Lock the deals of a batch with one ordered statement."""
    rows = select(Deal).where(deals.c.id.in_(keys)).order_by(deals.c.id).with_for_update()
    for deal in (await session.execute(rows)).scalars():
        remember_locked(session, deal, deal.id)


async def on_touched(session: AsyncSession, delivery: Delivery[UUID]) -> None:
    """Change a deal and announce it."""
    deal = find_locked(session, Deal, delivery.payload)
    assert deal is not None
    deal.title, deal.version, deal.updated_at = f"seen {deal.version}", deal.version + 1, delivery.now
    await flush(session)
    payload = {"DealId": str(deal.id), "TenantId": str(deal.tenant_id), "EndedAt": rfc3339(delivery.now)}
    message = Message(DEAL_COMPLETED, str(deal.id), payload, delivery.now, deal.tenant_id, deal.version)
    await OUTBOX.emit(session, [message], delivery.cause)


def parse(value: Any) -> UUID:
    """Return the deal's id."""
    return UUID(value["DealId"])


def records(ids: Sequence[UUID]) -> list[Received]:
    """Return one message per deal, over and over, as the broker would give them."""
    made = []
    for offset in range(MESSAGES):
        deal = str(ids[offset % len(ids)])
        headers = {
            "ce_id": str(uuid4()),
            "ce_type": "bench.touched",
            "ce_time": "2026-11-30T12:00:00Z",
            "ce_contractversion": "1",
            "ce_subject": deal,
            "ce_correlationid": "bench",
        }
        pairs = tuple((name, value.encode()) for name, value in headers.items())
        stamp = int(time.time() * 1000)
        made.append(Received("bench", 0, offset, stamp, deal.encode(), orjson.dumps({"DealId": deal}), pairs))
    return made


async def whole_against_single(database: Database, admin_url: str) -> list[Figure]:
    """Take the same messages in batches of 500 and one by one, in turns."""
    admin = await asyncpg.connect(admin_url)
    ids = [row["id"] for row in await admin.fetch(SEED, NOW, DEALS)]
    handler = Handler("bench", "bench.touched", parse, on_touched, lambda key: [key])
    consumer = Consumer("pin.crm.bench", [handler], preload)
    handling = Handling(database, consumer, "crm", DatabaseClock(), ConsumerMetrics(CollectorRegistry()))
    rates: dict[int, list[float]] = {500: [], 1: []}
    for _ in range(ROUNDS):
        for size, found in rates.items():
            todo = records(ids)[: MESSAGES if size > 1 else MESSAGES // 4]
            batches, started = Batches(handling), time.perf_counter()
            for first in range(0, len(todo), size):
                await batches.take(todo[first : first + size], Stop())
            found.append(len(todo) / (time.perf_counter() - started))
            await admin.execute("truncate crm.outbox, crm.inbox")
    await admin.close()
    whole, single = (statistics.median(found) for found in rates.values())
    detail = f"{whole:.0f} against {single:.0f} messages/s"
    return [Figure("inbox and one flush / one transaction per message", whole / single, bar=5.0, detail=detail)]
