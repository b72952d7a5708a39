"""Code and contracts say the same, both ways, and foreign readers understand the declared examples.

What a service publishes is what its contract declares, name by name; what a contract declares of our own services is
in their code.
"""

from dataclasses import replace
from datetime import datetime
from types import UnionType
from typing import Literal, TypedDict, get_args, get_origin, get_type_hints

import pytest
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat
from contract_checks import (
    Publisher,
    contract_named,
    edited,
    free_text_fields,
    payload_drift,
    undeclared,
    unlisted,
    unpublished,
    unread,
)

from chassis import platform_events
from chassis.contracts import every_message
from chessboard import messages as board
from crm import messages

CONTEXTS = ("crm", "chessboard")

PRODUCED_AS = {
    messages.DEAL_TIMELINE_OVERDUE: messages.DealTimelineOverduePayload,
    messages.STEP_ADDED: messages.StepAddedPayload,
    messages.STEP_DONE: messages.StepDonePayload,
    messages.DEAL_COMPLETED: messages.DealEndedPayload,
    messages.DEAL_CANCELLED: messages.DealEndedPayload,
    messages.BOOKING_STATE_CHANGED: messages.BookingStateChangedPayload,
    messages.BOOKING_QUOTE_INVALIDATED: messages.BookingQuoteInvalidatedPayload,
    messages.HOLD_REQUESTED: messages.HoldRequestedPayload,
    messages.COMMIT_REQUESTED: messages.CommitRequestedPayload,
    messages.OBJECT_SOLD: messages.ObjectSoldPayload,
    messages.RELEASED_BY_EXPIRY: messages.ObjectReleasedPayload,
    messages.RELEASED_BY_CANCELLATION: messages.ObjectReleasedPayload,
    messages.RELEASED_WITH_DEAL: messages.ObjectReleasedPayload,
    messages.INTERVENTION_NEEDED: messages.InterventionPayload,
    messages.INTERVENTION_RESOLVED: messages.InterventionPayload,
    board.STATUS_CHANGED: board.PropertyObjectStatusChangedPayload,
    board.HOLD_ANSWERED: board.HoldAnsweredPayload,
    board.OFFER_UPDATED: board.OfferUpdatedPayload,
    **{platform_events.quarantined(context): platform_events.QuarantinedPayload for context in CONTEXTS},
    **{platform_events.audit_recorded(context): platform_events.AuditRecordedPayload for context in CONTEXTS},
}
"""The class whose keys are an event type's payload."""


@pytest.fixture
def crm_publisher(publishers):
    return next(publisher for publisher in publishers if publisher.service == "crm")


def payload_class(message):
    return next(
        kind for event, kind in PRODUCED_AS.items() if (event.topic, event.type) == (message.topic, message.type)
    )


def fits(value, kind):
    """Whether a JSON value is of a TypedDict's field type."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is UnionType:
        return any(fits(value, part) for part in get_args(kind))
    return isinstance(value, get_origin(kind) or kind) and not (kind is int and isinstance(value, bool))


def declared(contracts, name):
    return next((contract, message) for contract, message in every_message(contracts) if message.name == name)


@pytest.mark.req("EVT-134y")
def test_every_event_type_in_code_is_listed_and_declared(publishers, contracts):
    assert publishers
    assert [sentence for publisher in publishers for sentence in unlisted(publisher)] == []
    assert [sentence for publisher in publishers for sentence in undeclared(publisher, contracts)] == []


def test_every_declared_message_of_our_services_is_in_their_code(publishers, contracts):
    assert unpublished(publishers, contracts) == []


def test_every_payload_class_has_exactly_the_declared_fields(publishers, contracts):
    assert set(PRODUCED_AS) == {event for publisher in publishers for event in publisher.events.values()}
    of_services = {kind for publisher in publishers for kind in publisher.payloads.values()}
    assert of_services <= set(PRODUCED_AS.values())
    drift = [
        sentence
        for contract, message in every_message(contracts)
        for sentence in payload_drift(payload_class(message), contract, message)
    ]
    assert drift == []


def test_every_example_has_the_producers_keys_and_types(contracts):
    for _, message in every_message(contracts):
        fields = get_type_hints(payload_class(message))
        for example in message.examples:
            assert example["payload"].keys() == fields.keys(), message.name
            for field, kind in fields.items():
                assert fits(example["payload"][field], kind), f"{message.name}.{field}"


def test_the_cloudevents_sdk_reads_every_example(contracts):
    for contract, message in every_message(contracts):
        channel = next(c for c in contract.channels.values() if c["address"] == message.topic)
        for example in message.examples:
            headers = {name: value.encode() for name, value in example["headers"].items()}
            key_field = channel.get("x-message-key")
            key = (example["payload"][key_field] if key_field else example["headers"]["ce_subject"]).encode()
            event = from_kafka(
                KafkaMessage(headers, key, JSONFormat().write_data(example["payload"], None)), JSONFormat()
            )
            assert event.get_type() == message.type
            assert event.get_source() == example["headers"]["ce_source"]
            assert event.get_subject() == event.get_extension("partitionkey") == key.decode()
            assert event.get_time() == datetime.fromisoformat(example["headers"]["ce_time"])
            assert event.get_extension("contractversion") == "1"
            assert event.get_data() == example["payload"]


@pytest.mark.req("EVT-113", "EVT-114")
def test_every_example_is_parsed_by_every_consumer_of_ours(publishers, contracts):
    assert unread(publishers, contracts) == []


@pytest.mark.req("TLO-10")
def test_the_registry_lists_the_overdue_event_with_its_two_consumers(contracts):
    _, message = declared(contracts, "DealTimelineOverdueEvent")
    assert message.topic == message.type == "pin.crm.timeline-overdue.v1"
    assert message.governance["producer"] == "crm"
    assert message.governance["consumers"] == ["messenger", "notifications"]


@pytest.mark.req("TLO-20", "TLO-49")
def test_the_overdue_event_can_hold_only_ids_enumerations_and_instants(contracts):
    contract, message = declared(contracts, "DealTimelineOverdueEvent")
    assert free_text_fields(message) == []
    note = ("components", "schemas", "DealTimelineOverdueEvent", "properties", "Note")
    _, loose = declared([edited(contract, note, {"type": "string"})], "DealTimelineOverdueEvent")
    assert free_text_fields(loose) == ["Note"]


def test_an_event_type_without_a_contract_is_refused(crm_publisher, contracts):
    lost = replace(messages.STEP_ADDED, type="crm.deal.step-lost")
    publisher = replace(crm_publisher, constants={"STEP_LOST": lost})
    said = "crm.messages.STEP_LOST: no contract declares crm.deal.step-lost on pin.crm.deal-timeline.v1"
    assert undeclared(publisher, contracts) == [said]


def test_an_event_type_that_published_forgets_is_refused(crm_publisher):
    publisher = replace(crm_publisher, listed=crm_publisher.listed[1:])
    assert unlisted(publisher) == ["crm.messages.DEAL_TIMELINE_OVERDUE: not in PUBLISHED"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "/pin/sales"}, "ce_source is /pin/sales, {} says /pin/crm"),
        ({"aggregate_type": "Step"}, "ce_aggregatetype is Step, {} says Deal"),
        ({"event_class": "saga"}, "ce_eventclass is saga, {} says domain"),
        ({"contract_version": 2}, "ce_contractversion is 2, {} says 1"),
    ],
)
def test_an_event_type_that_differs_from_its_contract_is_refused(change, said, crm_publisher, contracts):
    publisher = replace(crm_publisher, constants={"STEP_DONE": replace(messages.STEP_DONE, **change)})
    where = said.format("crm.asyncapi.yaml: message DealStepDone")
    assert undeclared(publisher, contracts) == [f"crm.messages.STEP_DONE: {where}"]


def test_a_declared_message_that_no_code_publishes_is_refused(crm_publisher, contracts):
    constants = {name: event for name, event in crm_publisher.constants.items() if name != "DEAL_CANCELLED"}
    said = "crm publishes no crm.deal.cancelled on pin.crm.deal-timeline.v1"
    publisher = replace(crm_publisher, constants=constants)
    assert unpublished([publisher], contracts) == [f"crm.asyncapi.yaml: message DealCancelled: {said}"]


def test_a_payload_class_that_differs_from_its_contract_is_refused(contracts):
    class Ended(TypedDict, total=False):
        DealId: str
        TenantId: str
        Reason: str

    assert payload_drift(Ended, *declared(contracts, "DealCancelled")) == [
        "crm.asyncapi.yaml: message DealCancelled: EndedAt is not in Ended",
        "crm.asyncapi.yaml: message DealCancelled: Reason of Ended is not declared",
        "crm.asyncapi.yaml: message DealCancelled: DealId is required on one side only (Ended)",
        "crm.asyncapi.yaml: message DealCancelled: TenantId is required on one side only (Ended)",
    ]


def test_a_platform_event_that_no_contract_declares_is_refused(crm_publisher, contracts):
    gone = edited(contract_named(contracts, "crm"), ("channels", "operational"), ...)
    publisher = replace(crm_publisher, constants={})
    said = "crm.messages.quarantined: no contract declares message.quarantined on pin.crm.operational.v1"
    assert undeclared(publisher, [gone]) == [said]


def test_a_consumer_that_reads_no_such_message_or_cannot_parse_its_example_is_refused(contracts):
    place = ("channels", "timelineOverdue", "x-governance", "consumers")
    changed = edited(contract_named(contracts, "crm"), place, ["messenger", "deaf", "strict"])
    topic = "pin.crm.timeline-overdue.v1"

    def consumer(service, readers):
        return Publisher(service, f"{service}.messages", {}, [], {}, {}, readers)

    where = "crm.asyncapi.yaml: message DealTimelineOverdueEvent"
    strict = consumer("strict", {(topic, topic): lambda payload: payload["DealNumber"]})
    assert sorted(unread([consumer("deaf", {}), strict], [changed])) == [
        f"{where}: deaf reads no {topic}",
        f"{where}: strict can't parse the example document-not-sent: KeyError 'DealNumber'",
    ]
    content = consumer("strict", {(topic, topic): lambda payload: payload["DealId"]})
    assert unread([content], [changed]) == []
