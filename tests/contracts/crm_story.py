"""One life of a crm, told once for all that judge its records: every command, the job, a message that its consumer sets
aside, and the sealed audit rows. Nothing is emitted by hand: a declared message that isn't here is one that no code
path of the service has produced."""

import json
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from uuid import UUID, uuid4

import pytest
from contract_checks import ROOT
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from chassis import tracing
from chassis.audit import AuditSealer
from chassis.consumers import Consumer, ConsumerMetrics, Handler
from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.contracts import every_message
from chassis.db import Actor, Database
from chassis.messaging import Received
from chassis.runtime import Stop
from crm import commands, messages
from crm.app import Crm, build
from crm.consumers import declare_consumers
from crm.domain import DealStatus, DealTimelineEventType
from crm.settings import CrmSettings

NOWHERE = "127.0.0.1:9"
HOLD_ANSWERED = "pin.chessboard.hold-answered.v1"
MOSCOW = timezone(timedelta(hours=3))
Kind = DealTimelineEventType


@dataclass(frozen=True)
class Written:
    """One outbox row as a record."""

    topic: str
    key: str
    headers: dict[str, str]
    value: bytes

    @property
    def type(self) -> str:
        return self.headers["ce_type"]

    @property
    def payload(self):
        return json.loads(self.value)


@dataclass
class Story:
    """A crm whose deals went through everything that it announces."""

    crm: Crm
    tenant: UUID
    correlation: str
    ended_deal: UUID
    overdue_step: UUID
    due_at: datetime
    cycle_at: datetime
    records: list[Written]


@pytest.fixture
async def story(databases, request, clock, connect):
    database = await databases.make("crm", ROOT / "services/crm/migrations")
    bootstrap = request.getfixturevalue("broker").running.bootstrap if "messaging" in request.keywords else NOWHERE
    settings = CrmSettings(
        env="development",
        database_url=database.system_url,
        api_database_url=database.api_url,
        migrate_database_url=database.owner_url,
        kafka_bootstrap=bootstrap,
        kafka_security="plaintext",
    )
    crm = build(settings, frozenset({"jobs", "relay"}), clock)
    tracer = tracing.configure_tracing("crm", None, exporter=InMemorySpanExporter())
    api = Database(database.api_url, application_name="contracts")
    system = Database(database.system_url, application_name="contracts")
    try:
        yield await _tell(crm, api, system, clock, await connect(database.admin_url))
    finally:
        tracer.close()
        await api.close()
        await system.close()
        await crm.close()
        await databases.drop(database)


async def _set_aside(system, clock) -> None:
    """Consume a message that breaks its contract: it is quarantined, and that is announced."""

    def parse(_):
        raise ValueError("in breach of the contract")

    async def handle(_, __):
        raise AssertionError("nothing to handle")

    consumer = Consumer("pin.crm.hold-answers", [Handler(HOLD_ANSWERED, HOLD_ANSWERED, parse, handle)])
    metrics = ConsumerMetrics(CollectorRegistry())
    await Batches(Handling(system, consumer, "crm", clock, metrics)).take([_record(HOLD_ANSWERED, b"{}")], Stop())


def _record(topic, value, correlation="request-1") -> Received:
    headers = {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": str(uuid4()),
        "ce_source": "/pin/chessboard",
        "ce_type": topic,
        "ce_time": "2026-11-30T09:00:00Z",
        "ce_subject": "unit-1",
        "ce_aggregatetype": "PropertyObject",
        "ce_contractversion": "1",
        "ce_correlationid": correlation,
        "ce_eventclass": "domain",
    }
    raw = tuple((name, value.encode()) for name, value in headers.items())
    return Received(topic, 0, 12, 1_796_000_000_000, b"unit-1", value, raw)


async def _book(crm, system, act, clock, connection) -> None:
    """Bookings through all that is asked of the chessboard, which answers everything but one of them."""
    reactions = {consumer.group: consumer for consumer in declare_consumers(CollectorRegistry())}
    handling = Handling(system, reactions["pin.crm.hold-answers"], "crm", clock, ConsumerMetrics(CollectorRegistry()))
    jobs = {driver.job.name: driver for driver in crm.drivers}
    answered: set[int] = set()

    def later(**duration):
        return clock.instant + timedelta(**duration)

    async def answer(outcome):
        rows = await connection.fetch(
            "select id, headers, payload from crm.outbox where headers ->> 'ce_aggregatetype' = 'PropertyObject'"
        )
        for row in (row for row in rows if row["id"] not in answered):
            asked, number = json.loads(row["payload"]), int(json.loads(row["headers"])["ce_sequence"])
            answered.add(row["id"])
            told = {name: asked[name] for name in ("BookingId", "TenantId", "PropertyObjectId")}
            told |= {"Sequence": number, "Outcome": outcome, "Reason": None, "Version": number}
            await Batches(handling).take(
                [_record(HOLD_ANSWERED, json.dumps(told).encode(), f"answer-{uuid4()}")], Stop()
            )

    async def held(deal, partner=None):
        new = commands.NewBooking(deal.id, [uuid4(), uuid4()], partner)
        booking = (await act(commands.draft_booking, new)).id
        await act(commands.quote_booking, booking, commands.Price(100, "EUR", later(days=1)))
        await act(commands.reserve_booking, booking, later(days=1))
        await answer("held")
        return booking

    async def confirmed(deal, partner=None):
        booking = await held(deal, partner)
        await act(commands.commit_booking, booking, later(days=9))
        await answer("booked")
        return booking

    deal = await act(commands.open_deal, "Flat 14")
    partner = uuid4()
    await act(commands.set_partner_limit, partner, 1000, "EUR")
    await act(commands.register_booking, await confirmed(deal, partner))
    await act(commands.cancel_booking, await confirmed(deal))
    await answer("released")
    quoted = (await act(commands.draft_booking, commands.NewBooking(deal.id, [uuid4()], partner))).id
    await act(commands.quote_booking, quoted, commands.Price(100, "EUR", later(hours=1)))
    await held(deal)
    clock.advance(timedelta(days=2))
    await jobs["booking-expiration"].run_once()
    await jobs["booking-quotes"].run_once()
    unknown = (await act(commands.draft_booking, commands.NewBooking(deal.id, [uuid4()], None))).id
    await act(commands.reserve_booking, unknown, later(days=1))
    for _ in range(2):
        clock.advance(timedelta(minutes=2))
        await jobs["booking-answers"].run_once()
    await answer("held")
    await act(commands.end_deal, deal.id, DealStatus.CANCELLED)


async def _seal(system, clock) -> None:
    """Chain what was audited, and announce it."""
    registry = CollectorRegistry()
    sealer = AuditSealer(system, clock, schema="crm", registry=registry, event=messages.AUDIT_RECORDED)
    assert await sealer.run_once() > 0


async def _tell(crm, api, system, clock, connection) -> Story:
    tenant, correlation = uuid4(), f"story-{uuid4()}"
    due_at = clock.instant + timedelta(days=1, microseconds=250)

    async def act(command, *arguments):
        by = commands.By(tenant, "user-7", "MANAGER", clock.advance(timedelta(minutes=1)), correlation)
        actor = Actor(tenant, None, by.user_id, frozenset({"MANAGER"}))
        with tracing.working("story", uuid4()):
            async with api.write(actor) as session:
                return await command(session, *arguments, by)

    def step(kind, due=None):
        occurred_at = clock.instant.astimezone(MOSCOW) - timedelta(hours=1)
        return commands.NewStep(kind, occurred_at, due, {"note": "a call"})

    deal = await act(commands.open_deal, "Flat 12")
    overdue = await act(commands.add_step, deal.id, step(Kind.DOCUMENT_REQUESTED, due_at.astimezone(MOSCOW)))
    await act(commands.add_step, deal.id, step(Kind.PAYMENT_REQUESTED))
    await act(commands.add_step, deal.id, step(Kind.INSPECTION_SCHEDULED, clock.instant + timedelta(days=30)))
    cycle_at = clock.advance(timedelta(days=2, microseconds=7))
    await crm.drivers[0].run_once()
    await act(commands.add_step, deal.id, step(Kind.DOCUMENT_UPLOADED))
    await act(commands.add_step, deal.id, step(Kind.PAYMENT_RECEIVED))
    await act(commands.end_deal, deal.id, DealStatus.COMPLETED)
    other = await act(commands.open_deal, "Flat 13")
    await act(commands.end_deal, other.id, DealStatus.CANCELLED)

    await _book(crm, system, act, clock, connection)
    await _set_aside(system, clock)
    await _seal(system, clock)
    rows = await connection.fetch("select topic, message_key, headers, payload from crm.outbox order by id")
    records = [Written(row["topic"], row["message_key"], json.loads(row["headers"]), row["payload"]) for row in rows]
    return Story(crm, tenant, correlation, deal.id, overdue.id, due_at, cycle_at, records)


@pytest.fixture
def declared(contracts):
    return {(message.topic, message.type): message for _, message in every_message(contracts)}
