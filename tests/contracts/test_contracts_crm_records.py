"""What crm really writes is what its contract declares: every command and the job run on a real database, and the
records are judged byte by byte, in the outbox and as a foreign consumer reads them from the broker."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID, uuid4

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat
from confluent_kafka import Consumer
from contract_checks import ROOT, unproduced

from chassis.contracts import every_message
from chassis.contracts.releases import breaches
from chassis.db import Actor, Database
from chassis.outbox import Cause, Message, Outbox
from chassis.platform_events import SYSTEM_KEY, AuditRecordedPayload, QuarantinedPayload, audit_recorded, quarantined
from crm import commands
from crm.app import Crm, build
from crm.domain import DealStatus, DealTimelineEventType
from crm.settings import CrmSettings

TOPICS = (
    "pin.crm.timeline-overdue.v1", "pin.crm.deal-timeline.v1", "pin.crm.operational.v1", "pin.crm.audit.v1",
)  # fmt: skip
NOWHERE = "127.0.0.1:9"
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
    api = Database(database.api_url, application_name="contracts")
    system = Database(database.system_url, application_name="contracts")
    try:
        await _announce(system, clock.instant)
        yield await _tell(crm, api, clock, await connect(database.admin_url))
    finally:
        await api.close()
        await system.close()
        await crm.close()
        await databases.drop(database)


async def _announce(system, at) -> None:
    """Emit what chassis emits in crm's name: a message set aside, and a sealed audit row with and without an actor."""
    aside = QuarantinedPayload(
        consumer="pin.crm.hold-answers",
        topic="pin.chessboard.hold-answered.v1",
        partition=0,
        offset=12,
        disposition="exhausted",
        errorClass="TimeoutError",
        errorCode="handler",
        deadLetterId=str(uuid4()),
        eventId=None,
        subjectId=None,
    )
    sealed = AuditRecordedPayload(
        auditId="1",
        sequence=1,
        occurredAt="2026-11-30T09:00:00Z",
        actor=None,
        action="timeline-step.overdue",
        entityType="DealTimelineEvent",
        entityId=str(uuid4()),
        tenantId=str(uuid4()),
        correlationId="run-1",
        details={"status": "Overdue"},
        previousHash="0" * 64,
        hash="f" * 64,
    )
    by_person = sealed | {"auditId": "2", "sequence": 2, "actor": "user-7", "tenantId": None}
    messages = [
        Message(quarantined("crm"), "key-1", aside, at),
        Message(audit_recorded("crm"), SYSTEM_KEY, sealed, at, UUID(sealed["tenantId"])),
        Message(audit_recorded("crm"), "user-7", by_person, at),
    ]
    async with system.write() as session:
        await Outbox("crm").emit(session, messages, Cause("run-1"))


async def _tell(crm, api, clock, connection) -> Story:
    tenant, correlation = uuid4(), f"story-{uuid4()}"
    due_at = clock.instant + timedelta(days=1, microseconds=250)

    async def act(command, *arguments):
        by = commands.By(tenant, "user-7", "MANAGER", clock.advance(timedelta(minutes=1)), correlation)
        async with api.write(Actor(tenant, None, by.user_id, frozenset({"MANAGER"}))) as session:
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

    rows = await connection.fetch("select topic, message_key, headers, payload from crm.outbox order by id")
    records = [Written(row["topic"], row["message_key"], json.loads(row["headers"]), row["payload"]) for row in rows]
    return Story(crm, tenant, correlation, deal.id, overdue.id, due_at, cycle_at, records)


@pytest.fixture
def declared(contracts):
    return {(message.topic, message.type): message for _, message in every_message(contracts)}


def test_every_declared_message_is_produced(story, contracts):
    assert unproduced("crm", {(record.topic, record.type) for record in story.records}, contracts) == []


def test_a_message_that_nothing_produces_or_nobody_declared_is_refused(contracts, declared):
    produced = {*declared, ("pin.crm.audit.v1", "audit.lost")} - {("pin.crm.audit.v1", "audit.recorded")}
    assert unproduced("crm", produced, contracts) == [
        "crm.asyncapi.yaml: message AuditRecorded: no test produces it",
        "audit.lost on pin.crm.audit.v1: produced, and no contract declares it",
    ]


def test_every_record_keeps_to_its_schemas_with_no_field_more(story, declared):
    found = {
        f"{record.type} {breach}"
        for record in story.records
        for breach in breaches(declared[record.topic, record.type], record.headers, record.payload)
    }
    assert found == set()


def test_every_record_has_the_declared_key(story, contracts):
    channels = {channel["address"]: channel for c in contracts for channel in c.channels.values()}
    for record in story.records:
        assert record.key == record.headers["ce_subject"]
        if field := channels[record.topic].get("x-message-key"):
            assert record.key == record.payload[field]


def test_the_story_walks_every_branch_of_the_payloads(story):
    of = {kind: [r.payload for r in story.records if r.type == kind] for kind in {r.type for r in story.records}}
    assert {payload["DueAt"] is None for payload in of["crm.deal.step-added"]} == {True, False}
    assert {payload["WasOverdue"] for payload in of["crm.deal.step-done"]} == {True, False}
    assert {payload["ClosedByEventId"] is None for payload in of["crm.deal.step-done"]} == {True, False}


def test_records_of_a_command_carry_its_correlation_and_a_growing_sequence(story):
    commanded = [record for record in story.records if record.topic == "pin.crm.deal-timeline.v1"]
    assert {record.headers["ce_correlationid"] for record in commanded} == {story.correlation}
    sequences = [int(r.headers["ce_sequence"]) for r in commanded if r.key == str(story.ended_deal)]
    assert sequences == sorted(sequences)
    assert sequences[0] == 2


def test_event_ids_are_different(story):
    assert len({record.headers["ce_id"] for record in story.records}) == len(story.records)


@pytest.mark.req("TLO-20", "TLO-44", "TLO-45", "TLO-46", "TLO-48", "TLO-49")
def test_the_overdue_record_is_exactly_what_the_source_asks_for(story):
    record = next(record for record in story.records if record.topic == "pin.crm.timeline-overdue.v1")
    assert record.headers["ce_contractversion"] == "1"
    assert record.headers["ce_aggregatetype"] == "Deal"
    assert record.key == record.headers["ce_subject"] == str(story.ended_deal)
    assert "ce_sequence" not in record.headers
    assert record.payload == {
        "DealId": str(story.ended_deal),
        "TimelineEventId": str(story.overdue_step),
        "TenantId": str(story.tenant),
        "Type": "DocumentRequested",
        "DueAt": "2026-12-01T09:00:00.000250Z",
        "OverdueAt": story.cycle_at.astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    assert datetime.fromisoformat(record.payload["DueAt"]) == story.due_at


def test_a_record_with_an_undeclared_field_is_refused(story, declared):
    record = story.records[0]
    message = declared[record.topic, record.type]
    unexpected = "Additional properties are not allowed ('{}' was unexpected)"
    found = breaches(message, record.headers | {"ce_secret": "1"}, record.payload | {"BuyerName": "?"})
    assert found == [f"headers: {unexpected.format('ce_secret')}", f"payload: {unexpected.format('BuyerName')}"]


def test_a_record_in_another_casing_or_with_a_naive_instant_is_refused(story, declared):
    record = next(record for record in story.records if record.type == "crm.deal.completed")
    message = declared[record.topic, record.type]
    naive = record.payload | {"EndedAt": record.payload["EndedAt"].removesuffix("Z")}
    camel = {name[0].lower() + name[1:]: value for name, value in record.payload.items()}
    assert any(breach.startswith("payload.EndedAt: ") for breach in breaches(message, record.headers, naive))
    assert 'payload: "DealId" is a required property' in breaches(message, record.headers, camel)


@pytest.mark.messaging
async def test_a_foreign_consumer_reads_every_message_from_the_broker(story, broker, declared):
    while (await story.crm.relays[0].run_once()).published:
        pass
    written = {record.headers["ce_id"]: record for record in story.records}
    with broker.reading(*TOPICS, from_beginning=True) as reader:
        events = reader.until(lambda seen: written.keys() <= {event.id for event in seen})
    read = [event for event in events if event.id in written]
    assert len(read) == len(written)
    assert {(event.topic, event.type) for event in read} == set(declared)
    for record in read:
        headers = {name: value.encode() for name, value in record.headers.items()}
        event = from_kafka(KafkaMessage(headers, record.key, record.value), JSONFormat())
        sent = written[record.id]
        assert (event.get_type(), event.get_source(), event.get_subject()) == (sent.type, "/pin/crm", sent.key)
        assert event.get_time() == datetime.fromisoformat(sent.headers["ce_time"])
        assert event.get_extension("tenantid") == sent.headers.get("ce_tenantid")
        assert event.get_data() == sent.payload
        assert breaches(declared[record.topic, record.type], record.headers, event.get_data()) == []
    assert len({event.partition for event in read if event.key == str(story.ended_deal)}) == 1


@pytest.mark.messaging
@pytest.mark.req("TLO-59b", "TLO-59c", "TLO-61b")
async def test_both_consumers_of_the_registry_get_the_overdue_record(story, broker, declared):
    message = declared["pin.crm.timeline-overdue.v1", "pin.crm.timeline-overdue.v1"]
    while (await story.crm.relays[0].run_once()).published:
        pass
    assert len(message.governance["consumers"]) == 2
    for name in message.governance["consumers"]:
        assert _first_of_tenant(broker.running.bootstrap, name, message.topic, str(story.tenant)) == str(
            story.overdue_step
        )


def _first_of_tenant(bootstrap: str, name: str, topic: str, tenant: str) -> str:
    """Return the step that the first record of a tenant speaks of, as a new consumer group of that name reads it."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"pin.{name}.timeline-overdue-{uuid4()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    try:
        while (record := consumer.poll(30)) is not None:
            assert record.error() is None
            payload = json.loads(record.value())
            if payload["TenantId"] == tenant:
                return payload["TimelineEventId"]
        raise AssertionError(f"{name} got no record of {topic}")
    finally:
        consumer.close()
