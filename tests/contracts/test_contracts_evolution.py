"""What may change inside a major version: each kind of change against each event class, and on the real contract."""

from copy import deepcopy
from datetime import date

import pytest
from contract_checks import ROOT, edited

from chassis.contracts import Contract
from chassis.contracts.classes import EVENT_CLASSES
from chassis.contracts.evolution import changes, compare, refusals

ON = date(2026, 11, 30)
FULL = {"domain", "saga", "audit", "security", "compliance"}
BACKWARD = {"analytical", "operational"}

SCHEMA = {
    "type": "object",
    "required": ["id", "kind", "size"],
    "properties": {
        "id": {"type": "string", "format": "uuid", "pattern": "^[0-9a-f-]+$"},
        "kind": {"type": "string", "enum": ["a", "b"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 10},
        "note": {"oneOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
        "mark": {"const": "x"},
        "part": {"type": "object", "required": ["at"], "properties": {"at": {"type": "string"}}},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
}
NEVER, BY_FULL, ALWAYS = set(), FULL, FULL | BACKWARD
"""The classes that refuse a change."""

FIELD = ("properties",)
GONE = ...
KINDS = [
    ("an optional field was added", (*FIELD, "more"), {"type": "string"}, NEVER),
    ("an optional field was added deeper", (*FIELD, "part", "properties", "more"), {"type": "string"}, NEVER),
    ("a description was written", (*FIELD, "id", "description"), "the id", NEVER),
    ("an optional field was removed", (*FIELD, "note"), GONE, BY_FULL),
    ("a required field was removed", (*FIELD, "size"), GONE, BY_FULL),
    ("a required field became optional", ("required",), ["id", "kind"], BY_FULL),
    ("an optional field became required", ("required",), ["id", "kind", "size", "note"], ALWAYS),
    ("a required field was added deeper", (*FIELD, "part", "required"), ["at", "by"], ALWAYS),
    ("an integer became a number", (*FIELD, "size", "type"), "number", BY_FULL),
    ("a type became null too", (*FIELD, "size", "type"), ["integer", "null"], BY_FULL),
    ("a type became anything", (*FIELD, "mark"), {}, BY_FULL),
    ("null was taken away", (*FIELD, "note"), {"type": "string", "maxLength": 20}, ALWAYS),
    ("a type was replaced", (*FIELD, "size"), {"type": "string"}, ALWAYS),
    ("a string became an array", (*FIELD, "id"), {"type": "array"}, ALWAYS),
    ("an enumeration's value was added", (*FIELD, "kind", "enum"), ["a", "b", "c"], BY_FULL),
    ("an enumeration's value was removed", (*FIELD, "kind", "enum"), ["a"], ALWAYS),
    ("an enumeration's value was renamed", (*FIELD, "kind", "enum"), ["a", "B"], ALWAYS),
    ("an enumeration was removed", (*FIELD, "kind", "enum"), GONE, BY_FULL),
    ("an enumeration was added", (*FIELD, "id", "enum"), ["1"], ALWAYS),
    ("an upper bound was tightened", (*FIELD, "size", "maximum"), 9, ALWAYS),
    ("an upper bound was loosened", (*FIELD, "size", "maximum"), 11, BY_FULL),
    ("an upper bound was removed", (*FIELD, "size", "maximum"), GONE, BY_FULL),
    ("an upper bound was added", (*FIELD, "id", "maxLength"), 36, ALWAYS),
    ("a lower bound was tightened", (*FIELD, "size", "minimum"), 2, ALWAYS),
    ("a lower bound was loosened", (*FIELD, "size", "minimum"), 0, BY_FULL),
    ("a bound beside null was tightened", (*FIELD, "note", "oneOf", "0", "maxLength"), 10, ALWAYS),
    ("a bound of a list was tightened", (*FIELD, "tags", "maxItems"), 2, ALWAYS),
    ("the items of a list got another type", (*FIELD, "tags", "items"), {"type": "integer"}, ALWAYS),
    ("a pattern was changed", (*FIELD, "id", "pattern"), "^[0-9a-f]+$", ALWAYS),
    ("a pattern was removed", (*FIELD, "id", "pattern"), GONE, BY_FULL),
    ("a pattern was added", (*FIELD, "kind", "pattern"), "^[ab]$", ALWAYS),
    ("a format was changed", (*FIELD, "id", "format"), "uri", ALWAYS),
    ("a format was removed", (*FIELD, "id", "format"), GONE, BY_FULL),
    ("a constant was changed", (*FIELD, "mark", "const"), "y", ALWAYS),
    ("the object was closed", ("additionalProperties",), False, ALWAYS),
    ("a rule came that is not understood", ("dependentRequired",), {"note": ["mark"]}, ALWAYS),
]


def changed(schema, path, value):
    """Return a copy of a schema with one place set, or removed where the value is `...`."""
    result = deepcopy(schema)
    at = result
    for step in path[:-1]:
        at = at[int(step)] if isinstance(at, list) else at[step]
    if value is GONE:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    if path == (*FIELD, "size") and value is GONE:
        result["required"].remove("size")
    return result


@pytest.mark.req("EVT-131")
@pytest.mark.parametrize("event_class", EVENT_CLASSES)
@pytest.mark.parametrize(("kind", "path", "value", "refusing"), KINDS, ids=[row[0] for row in KINDS])
def test_a_class_allows_a_change_or_refuses_it(kind, path, value, refusing, event_class):
    found = list(compare(SCHEMA, changed(SCHEMA, path, value), "payload"))
    assert any(change.refused_for(event_class) for change in found) == (event_class in refusing), found


@pytest.mark.parametrize(("kind", "path", "value", "refusing"), KINDS, ids=[row[0] for row in KINDS])
def test_a_change_the_other_way_is_seen_too(kind, path, value, refusing):
    """Backwards, what broke old records breaks old readers; so a class that is FULL refuses the same changes."""
    there = list(compare(SCHEMA, changed(SCHEMA, path, value), "p"))
    back = list(compare(changed(SCHEMA, path, value), SCHEMA, "p"))
    if not kind.startswith("an optional field was"):
        assert any(one.refused_for("domain") for one in back) == any(one.refused_for("domain") for one in there)


def test_an_optional_field_of_a_closed_object_breaks_its_old_readers():
    closed = changed(SCHEMA, ("additionalProperties",), False)
    [change] = compare(closed, changed(closed, (*FIELD, "more"), {"type": "string"}), "p")
    assert change.refused_for("domain")
    assert not change.refused_for("operational")


def test_the_order_of_alternatives_and_how_they_are_written_mean_nothing():
    other = changed(SCHEMA, (*FIELD, "note"), {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 20}]})
    assert list(compare(SCHEMA, other, "p")) == []
    both = {"type": ["string", "null"]}
    assert list(compare(both, {"oneOf": [{"type": "null"}, {"type": "string"}]}, "p")) == []


def test_a_schema_that_is_not_understood_may_stay_and_not_change():
    strange = {"oneOf": [{"type": "string", "maxLength": 1}, {"type": "string", "minLength": 9}]}
    assert list(compare(strange, deepcopy(strange), "p")) == []
    [change] = compare(strange, {"oneOf": [{"type": "string"}]}, "p")
    assert change.refused_for("analytical")


# The real contract.

OVERDUE = "pin.crm.timeline-overdue.v1"
CHANNEL = ("channels", "timelineOverdue")
FIELDS = ("components", "schemas", "DealTimelineOverdueEvent")
FULL_RULE = "(since 1.0.0; domain is FULL_TRANSITIVE)"


@pytest.fixture
def first():
    return Contract(ROOT / "contracts/released/crm/1.0.0.yaml")


@pytest.fixture
def today():
    return Contract(ROOT / "contracts/crm.asyncapi.yaml")


def said(released, contract, on=ON):
    return [sentence.removeprefix("crm.asyncapi.yaml: ") for sentence in refusals(released, contract, on)]


def test_the_contract_of_today_keeps_what_it_promised_at_first(first, today):
    assert refusals(first, today, ON) == []
    assert {(change.place, change.kind) for change in changes(first, today, ON)} >= {
        ("pin.crm.operational.v1", "a channel was added"),
        (f"{OVERDUE}: {OVERDUE}: headers.traceparent", "an optional field was added"),
    }


@pytest.mark.req("EVT-131")
@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (CHANNEL, GONE, f"{OVERDUE}: the channel was removed"),
        ((*CHANNEL, "x-message-key"), "TenantId", f"{OVERDUE}: the key was changed from DealId to TenantId"),
        (
            (*CHANNEL, "bindings", "kafka", "partitions"),
            24,
            f"{OVERDUE}: the partition count was changed from 12 to 24",
        ),
        (
            (*CHANNEL, "x-governance", "event_class"),
            "analytical",
            f"{OVERDUE}: the class was changed from domain to analytical",
        ),
        (
            ("channels", "dealTimeline", "messages", "DealCancelled"),
            GONE,
            "pin.crm.deal-timeline.v1: crm.deal.cancelled: the message was removed",
        ),
        (
            (*FIELDS, "required"),
            ["DealId", "TimelineEventId", "TenantId", "Type", "DueAt"],
            f"{OVERDUE}: {OVERDUE}: payload.OverdueAt: a required field became optional",
        ),
        (
            ("components", "schemas", "Guid", "pattern"),
            "^.*$",
            f"{OVERDUE}: {OVERDUE}: headers.ce_id: pattern was changed",
        ),
        (
            ("components", "schemas", "OfDeal", "properties", "ce_aggregatetype", "const"),
            "Step",
            f"{OVERDUE}: {OVERDUE}: headers.ce_aggregatetype: const was changed",
        ),
    ],
)
def test_a_breaking_change_of_the_contract_is_refused_with_its_place(path, value, sentence, first, today):
    assert f"{sentence} {FULL_RULE}" in said(first, edited(today, path, value))


@pytest.mark.req("EVT-128", "EVT-129")
def test_a_topic_goes_only_after_its_successors_window(first, today):
    window = {"predecessor": OVERDUE, "from": "2026-12-01", "until": "2027-03-01"}
    successor = today.channels["timelineOverdue"] | {
        "address": "pin.crm.timeline-overdue.v2",
        "x-compatibility": window,
    }
    moved = edited(today, CHANNEL, successor)
    assert said(first, moved, date(2027, 3, 1)) == [f"{OVERDUE}: the channel was removed {FULL_RULE}"]
    assert said(first, moved, date(2027, 3, 2)) == []
