"""What is emitted is judged by its contract, and the refusal names type and place but never a value."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest

import crm
from chassis.contracts import Contract, ContractBreach, ContractChecker, DeclaredMessage, contract_of
from chassis.instants import rfc3339
from chassis.outbox import Cause, Message, envelope
from chassis.platform_events import SYSTEM_KEY, audit_recorded, quarantined
from chassis.testing.plugin import START

CONTRACT = contract_of(crm.__file__)
TYPE = "pin.crm.timeline-overdue.v1"
SECRET = "Ivan Petrov, +7 900 000-00-00"


@pytest.fixture(scope="module")
def checker() -> ContractChecker:
    return ContractChecker.of(CONTRACT)


@pytest.fixture
def example() -> dict[str, Any]:
    """The overdue event's example, to be spoiled."""
    message: DeclaredMessage = next(one for one in Contract(CONTRACT).messages() if one.type == TYPE)
    return orjson.loads(orjson.dumps(message.examples[0]))


def test_every_declared_example_passes_as_bytes_and_as_mapping(checker: ContractChecker):
    for message in Contract(CONTRACT).messages():
        for one in message.examples:
            checker.check(message.topic, message.type, one["headers"], orjson.dumps(one["payload"]))
            checker.check(message.topic, message.type, one["headers"], one["payload"])


@pytest.mark.parametrize(
    ("part", "field", "value", "told"),
    [
        ("payload", "DueAt", ..., "payload: DueAt is missing"),
        ("payload", "DueAt", "2026-11-30T10:00:00", "payload.DueAt: "),
        ("payload", "DueAt", "2026-02-30T10:00:00Z", "payload.DueAt: format"),
        ("payload", "DealId", SECRET, "payload.DealId: pattern"),
        ("payload", "DealId", 7, "payload.DealId: type"),
        ("payload", "Type", SECRET, "payload.Type: enum"),
        ("payload", "BuyerName", SECRET, "payload: additionalProperties"),
        ("headers", "ce_tenantid", ..., "headers: ce_tenantid is missing"),
        ("headers", "ce_eventclass", "saga", "headers.ce_eventclass: const"),
        ("headers", "traceparent", SECRET, "headers.traceparent: pattern"),
        ("headers", "x-secret", SECRET, "headers: additionalProperties"),
    ],
)
def test_a_breach_names_type_and_place_and_no_value(
    checker: ContractChecker, example: dict[str, Any], part: str, field: str, value: Any, told: str
):
    if value is ...:
        del example[part][field]
    else:
        example[part][field] = value
    with pytest.raises(ContractBreach) as caught:
        checker.check(TYPE, TYPE, example["headers"], orjson.dumps(example["payload"]))
    text = str(caught.value)
    assert text.startswith(f"{TYPE} on {TYPE} breaks its contract: ")
    assert told in text
    assert SECRET not in text
    assert not [value for value in example["payload"].values() if str(value) in text]
    assert len(text) < 1000


def test_a_payload_that_is_not_json_is_a_breach_without_its_text(checker: ContractChecker, example: dict[str, Any]):
    with pytest.raises(ContractBreach, match=r"payload: not JSON$") as caught:
        checker.check(TYPE, TYPE, example["headers"], SECRET.encode())
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_trace_context_may_come_along(checker: ContractChecker, example: dict[str, Any]):
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=1"}
    checker.check(TYPE, TYPE, example["headers"] | trace, example["payload"])


@pytest.mark.parametrize(("topic", "kind"), [(TYPE, "crm.deal.lost"), ("pin.crm.lost.v1", TYPE)])
def test_a_type_that_no_contract_declares_on_the_topic_is_a_breach(
    checker: ContractChecker, example: dict[str, Any], topic: str, kind: str
):
    with pytest.raises(ContractBreach, match=f"^{kind}: no contract declares it on {topic}$"):
        checker.check(topic, kind, example["headers"], example["payload"])


def test_many_breaches_are_told_shortly(checker: ContractChecker, example: dict[str, Any]):
    with pytest.raises(ContractBreach) as caught:
        checker.check(TYPE, TYPE, {}, {})
    assert str(caught.value).count(";") == 4


@pytest.mark.parametrize("payload", [b"7", b"[]", b"null", b'"text"'])
def test_a_payload_that_is_no_object_is_a_breach(checker: ContractChecker, example: dict[str, Any], payload: bytes):
    with pytest.raises(ContractBreach, match="payload: type"):
        checker.check(TYPE, TYPE, example["headers"], payload)


def test_events_of_chassis_fit_the_envelope_of_their_contract(checker: ContractChecker):
    aside = {
        "consumer": "pin.crm.hold-answers", "topic": "t", "partition": 0, "offset": 0, "disposition": "exhausted",
        "errorClass": "KeyError", "errorCode": "handler", "deadLetterId": str(uuid4()), "eventId": None,
        "subjectId": None,
    }  # fmt: skip
    row = {
        "auditId": "1", "sequence": 1, "occurredAt": rfc3339(START), "actor": None, "action": "deal.opened",
        "entityType": "Deal", "entityId": str(uuid4()), "tenantId": None, "correlationId": "run-1", "details": {},
        "previousHash": "0" * 64, "hash": "a" * 64,
    }  # fmt: skip
    for message in (
        Message(quarantined("crm"), "any key", aside, START),
        Message(audit_recorded("crm"), SYSTEM_KEY, row, START, uuid4()),
    ):
        headers = envelope(message, Cause("run-1", uuid4()))
        checker.check(message.event.topic, message.event.type, headers, orjson.dumps(message.payload))
        with pytest.raises(ContractBreach, match=r"headers: additionalProperties"):
            checker.check(message.event.topic, message.event.type, headers | {"ce_sequence": "1"}, message.payload)


def test_a_checker_of_no_contract_allows_nothing(tmp_path: Path):
    (tmp_path / "none.asyncapi.yaml").write_text("channels: {}")
    with pytest.raises(ContractBreach):
        ContractChecker.of(tmp_path / "none.asyncapi.yaml").check("t", "k", {}, {})
