"""What crm really writes is what its contract declares: every command and the job run on a real database, and the
records are judged byte by byte in the outbox (as foreign readers see them: test_foreign_readers)."""

from datetime import UTC, datetime

import pytest
from contract_checks import unproduced

from chassis.contracts.releases import breaches


def test_every_declared_message_is_produced(story, contracts):
    assert unproduced("crm", {(record.topic, record.type) for record in story.records}, contracts) == []


def test_a_message_that_nothing_produces_or_nobody_declared_is_refused(contracts, declared):
    crm = {(topic, kind) for topic, kind in declared if topic.startswith("pin.crm.")}
    produced = {*crm, ("pin.crm.audit.v1", "audit.lost")} - {("pin.crm.audit.v1", "audit.recorded")}
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
        if field := channels[record.topic].get("x-message-key"):
            assert record.key == record.payload[field] == record.headers["ce_subject"]


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
