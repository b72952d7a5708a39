"""What every contract file must say, and each rule seen refusing a file that breaks it."""

import pytest
from contract_checks import ROOT, contract_named, edited, undeclared_topics

from chassis.contracts import Contract, ContractInvalid, load_contracts
from chassis.contracts.classes import EVENT_CLASSES
from chassis.contracts.governance import (
    ALONE,
    GOVERNANCE,
    LARGEST_RECORD,
    binding_gaps,
    broken_guarantees,
    class_gaps,
    days,
    envelope_gaps,
    governance_gaps,
    misnamed,
    queue_gaps,
    sensitive_fields,
    topics_declared_twice,
    unequal_partitions,
)
from chassis.contracts.releases import bad_examples
from chassis.outbox import MAX_RECORD_BYTES

FILE = "crm.asyncapi.yaml: "
CHANNEL = "channel timelineOverdue"
MESSAGE = "message DealTimelineOverdueEvent"
EXAMPLE = f"{MESSAGE}: example document-not-sent"
GRAMMAR = "is not pin.<context>.<event>.v<major>"
IN_SYNC = "domain events need min.insync.replicas of 2 or more and more replicas than that"
COUNT = "must be a whole number of 1 or more"
NO_MORE = "Additional properties are not allowed"

TO_CHANNEL = ("channels", "timelineOverdue")
TO_GOVERNANCE = (*TO_CHANNEL, "x-governance")
TO_KAFKA = (*TO_CHANNEL, "bindings", "kafka")
TO_CONFIG = (*TO_KAFKA, "topicConfiguration")
TO_MESSAGE = ("components", "messages", "DealTimelineOverdueEvent")
TO_EXAMPLE = (*TO_MESSAGE, "examples", "0")
TO_SCHEMAS = ("components", "schemas")
TO_FIELDS = (*TO_SCHEMAS, "DealTimelineOverdueEvent", "properties")

GONE = ...
BROKEN_GOVERNANCE = [
    (("operator_action",), GONE, "x-governance lacks operator_action"),
    (("poison_rule",), "", "x-governance lacks poison_rule"),
    ((), GONE, "x-governance lacks producer"),
    (("consumers",), [], "x-governance lacks consumers"),
    (("consumers",), "all", "consumers must be a list of different names"),
    (("consumers",), ["messenger", "messenger"], "consumers must be a list of different names"),
    (("queue_class",), "topic", "queue_class topic is none of dead-letter, delay, durable-work, event-stream"),
    (
        ("event_class",),
        "business",
        "event_class business is none of analytical, audit, compliance, domain, operational, saga, security",
    ),
    (("retention", "log"), "7 years", "retention.log 7 years is no ISO 8601 duration"),
    (("retention",), "P7Y", "retention.topic None is no ISO 8601 duration"),
    *(((name,), GONE, f"x-governance lacks {name}") for name in GOVERNANCE),
]
BROKEN_BINDINGS = [
    ((*TO_KAFKA, "topic"), "pin.crm.other.v1", "bindings.kafka.topic pin.crm.other.v1 is not the address"),
    ((*TO_CHANNEL, "bindings"), GONE, "bindings.kafka.topic None is not the address"),
    ((*TO_KAFKA, "partitions"), "12", f"bindings.kafka.partitions {COUNT}"),
    ((*TO_KAFKA, "replicas"), GONE, f"bindings.kafka.replicas {COUNT}"),
    ((*TO_CONFIG, "cleanup.policy"), "delete", "cleanup.policy must list delete or compact"),
    ((*TO_CONFIG, "cleanup.policy"), ["keep"], "cleanup.policy must list delete or compact"),
    ((*TO_CONFIG, "retention.ms"), 604_800_000, "retention.ms 604800000 is not retention.topic"),
    ((*TO_GOVERNANCE, "retention", "topic"), "P7D", "retention.ms 2592000000 is not retention.topic"),
    ((*TO_CONFIG, "auto.create.topics.enable"), True, "auto.create.topics.enable is no setting of a topic"),
]
BROKEN_GUARANTEES = [
    ((*TO_CONFIG, "min.insync.replicas"), GONE, IN_SYNC),
    ((*TO_KAFKA, "replicas"), 2, IN_SYNC),
    (
        (*TO_CHANNEL, "x-message-key"),
        GONE,
        "domain events are ordered per entity, but x-message-key names no field",
    ),
    (
        TO_GOVERNANCE,
        {"event_class": "audit", "retention": {"topic": "P30D", "log": "P6Y"}},
        "audit events stay in the log for 7 years",
    ),
    (
        TO_GOVERNANCE,
        {"event_class": "compliance", "retention": {"topic": "P30D", "log": "P6Y"}},
        "compliance events stay in the log for 7 years",
    ),
    ((*TO_GOVERNANCE, "retention", "log"), "P1Y", "domain events stay in the log for 7 years"),
    ((*TO_GOVERNANCE, "retention", "topic"), "P8Y", "retention.log is shorter than retention.topic"),
    (
        (*TO_CONFIG, "cleanup.policy"),
        ["compact", "delete"],
        "domain events are never compacted: their history is replayed",
    ),
    (
        (*TO_CONFIG, "max.message.bytes"),
        500_000,
        "max.message.bytes below 1000000: a record that the outbox takes would stop the relay",
    ),
]
TO_QUEUE = ("x-queues", "outbox")
BROKEN_QUEUES = [
    ((*TO_QUEUE, "where"), GONE, "lacks where"),
    ((*TO_QUEUE, "operator_action"), "", "lacks operator_action"),
    ((*TO_QUEUE, "retention"), GONE, "lacks retention"),
    ((*TO_QUEUE, "alert"), GONE, "lacks alert"),
    (TO_QUEUE, None, "lacks producer"),
    ((*TO_QUEUE, "queue_class"), "event-stream", "an event stream is a topic, not a table"),
    ((*TO_QUEUE, "queue_class"), "list", "queue_class list is none of dead-letter, delay, durable-work, event-stream"),
]
BROKEN_CLASSES = [
    (("x-event-classes", "domain"), GONE, "domain is declared None, the class needs at-rest"),
    (("x-event-classes",), GONE, "operational is declared None, the class needs at-rest"),
    (
        ("x-event-classes", "audit", "encryption"),
        "at-rest",
        "audit is declared at-rest, the class needs at-rest tamper-evident",
    ),
]
WRONG_NAMES = [
    ((*TO_CHANNEL, "address"), "pin.crm.Timeline.v1", f"pin.crm.Timeline.v1 {GRAMMAR}"),
    ((*TO_CHANNEL, "address"), "pin.crm.timeline-overdue", f"pin.crm.timeline-overdue {GRAMMAR}"),
    (
        (*TO_CHANNEL, "address"),
        "pin.chessboard.timeline.v1",
        "pin.chessboard.timeline.v1 is not in the context of its producer crm",
    ),
    ((*TO_CHANNEL, "x-origin"), GONE, "x-origin must be source or assumed"),
    ((*TO_MESSAGE, "x-origin"), "ours", f"{MESSAGE}: x-origin must be source or assumed"),
]
BROKEN_ENVELOPES = [
    ((*TO_MESSAGE, "traits"), [], "traits replace one another's `required`; join headers by allOf"),
    ((*TO_CHANNEL, "x-message-key"), "BuyerId", "the key BuyerId is not a required field of the payload"),
    ((*TO_MESSAGE, "bindings"), GONE, "bindings.kafka declares no key"),
    (
        (*TO_SCHEMAS, "Envelope", "properties", "ce_source", "const"),
        "/pin/sales",
        "ce_source is /pin/sales, not /pin/crm",
    ),
    ((*TO_GOVERNANCE, "event_class"), "saga", "ce_eventclass is domain, not saga"),
    ((*TO_CHANNEL, "address"), "pin.crm.timeline-overdue.v2", "ce_contractversion is 1, not 2"),
]
SENSITIVE = [
    ((*TO_FIELDS, "BuyerName"), {"type": "string"}, "BuyerName"),
    ((*TO_FIELDS, "total_sum"), {"type": "number"}, "total_sum"),
    ((*TO_FIELDS, "Buyer"), {"type": "object", "properties": {"Phone": {"type": "string"}}}, "Buyer.Phone"),
    (
        (*TO_FIELDS, "Payments"),
        {"type": "array", "items": {"type": "object", "properties": {"EscrowState": {"type": "string"}}}},
        "Payments.EscrowState",
    ),
]
BAD_EXAMPLES = [
    (("payload", "DueAt"), GONE, 'payload: "DueAt" is a required property'),
    (("payload", "Note"), "call him", f"payload: {NO_MORE} ('Note' was unexpected)"),
    (("payload", "DueAt"), "2026-02-30T10:00:00Z", 'payload.DueAt: "2026-02-30T10:00:00Z" is not a "date-time"'),
    (("headers", "ce_sequence"), "3", f"headers: {NO_MORE} ('ce_sequence' was unexpected)"),
    (("headers", "ce_id"), GONE, 'headers: "ce_id" is a required property'),
    (("headers", "ce_id"), "A7", 'headers.ce_id: "A7" is not a "uuid"'),
]
VIOLATIONS = [
    *(
        (governance_gaps, (*TO_GOVERNANCE, *path), value, f"{CHANNEL}: {said}")
        for path, value, said in BROKEN_GOVERNANCE
    ),
    *((queue_gaps, path, value, f"queue outbox: {said}") for path, value, said in BROKEN_QUEUES),
    *((class_gaps, path, value, f"x-event-classes: {said}") for path, value, said in BROKEN_CLASSES),
    *((binding_gaps, path, value, f"{CHANNEL}: {said}") for path, value, said in BROKEN_BINDINGS),
    *((broken_guarantees, path, value, f"{CHANNEL}: {said}") for path, value, said in BROKEN_GUARANTEES),
    *((misnamed, path, value, f"{CHANNEL}: {said}") for path, value, said in WRONG_NAMES),
    *((envelope_gaps, path, value, f"{CHANNEL}: {MESSAGE}: {said}") for path, value, said in BROKEN_ENVELOPES),
    *(
        (sensitive_fields, path, value, f"{MESSAGE}: {field} is named like personal data or money")
        for path, value, field in SENSITIVE
    ),
    *((bad_examples, (*TO_EXAMPLE, *path), value, f"{EXAMPLE}: {said}") for path, value, said in BAD_EXAMPLES),
    (bad_examples, (*TO_MESSAGE, "examples"), GONE, f"{MESSAGE}: no example"),
]


@pytest.mark.req("EVT-112", "EVT-113", "EVT-115", "EVT-116", "EVT-117", "EVT-118", "EVT-119", "EVT-127", "EVT-133")
@pytest.mark.parametrize("check", [*ALONE, bad_examples], ids=lambda check: check.__name__)
def test_every_contract_passes(check, contracts):
    assert [sentence for contract in contracts for sentence in check(contract)] == []


def test_no_topic_is_declared_twice(contracts):
    assert topics_declared_twice(contracts) == []


def test_topics_that_share_a_key_have_equal_partition_counts(contracts):
    assert unequal_partitions(contracts) == []


def test_every_topic_named_in_code_is_declared(contracts):
    folders = [ROOT / "services", ROOT / "libs", ROOT / "deploy"]
    kinds = {".py", ".sql", ".yaml", ".yml", ".toml", ".md", ".mako", ".json"}
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds and path.is_file()]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    assert any("pin.crm.timeline-overdue.v1" in text for text in sources.values())
    assert undeclared_topics(sources, contracts) == []


@pytest.mark.req("EVT-112", "EVT-113", "EVT-114", "EVT-115", "EVT-116", "EVT-117", "EVT-118", "EVT-119", "EVT-127")
@pytest.mark.parametrize(("check", "path", "value", "sentence"), VIOLATIONS, ids=[row[3] for row in VIOLATIONS])
def test_a_contract_that_breaks_a_rule_is_refused(check, path, value, sentence, contracts):
    broken = edited(contract_named(contracts, "crm"), path, value)
    assert FILE + sentence in check(broken)


def test_a_topic_that_two_channels_declare_is_refused(contracts):
    twice = edited(
        contract_named(contracts, "crm"),
        ("channels", "again"),
        contract_named(contracts, "crm").channels["timelineOverdue"],
    )
    first = "pin.crm.timeline-overdue.v1 is declared by crm.asyncapi.yaml: channel timelineOverdue already"
    assert topics_declared_twice([twice]) == [f"crm.asyncapi.yaml: channel again: {first}"]


def test_unequal_partition_counts_of_one_key_are_refused(contracts):
    unequal = edited(contract_named(contracts, "crm"), (*TO_KAFKA, "partitions"), 24)
    counts = f"24 partitions in {FILE}channel timelineOverdue; 12 partitions in {FILE}channel dealTimeline"
    assert unequal_partitions([unequal]) == [f"key DealId: {counts}"]


def test_a_topic_in_code_that_no_contract_declares_is_refused(contracts):
    sources = {"services/crm/src/crm/messages.py": "\n\nTOPIC = 'pin.crm.deal-lost.v1'\n"}
    sentences = ["services/crm/src/crm/messages.py:3: no contract declares pin.crm.deal-lost.v1"]
    assert undeclared_topics(sources, contracts) == sentences


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("channels: [", "node content"),
        ("- a list", "no map of channels"),
        ("channels: {a: 1}", "no map of channels"),
        ("asyncapi: 3.0.0", "no map of channels"),
        ("channels: {a: {messages: {b: {$ref: '#/nowhere'}}}}", "#/nowhere leads nowhere"),
        ("channels: {a: {messages: {b: {name: b}}}}", "channel a: a message lacks 'headers'"),
        ("channels: {a: {address: t}}", "channel a: a message lacks 'messages'"),
    ],
)
def test_a_file_that_is_no_contract_is_refused_with_its_name(text, reason, tmp_path):
    (tmp_path / "odd.asyncapi.yaml").write_text(text)
    with pytest.raises(ContractInvalid) as caught:
        list(Contract(tmp_path / "odd.asyncapi.yaml").messages())
    assert str(caught.value).startswith("odd.asyncapi.yaml: ")
    assert reason in str(caught.value)


def test_a_folder_without_contracts_is_refused(tmp_path):
    with pytest.raises(ContractInvalid, match=r"^no \*\.asyncapi\.yaml in "):
        load_contracts(tmp_path)


@pytest.mark.parametrize(
    ("duration", "expected"), [("P30D", 30), ("P7Y", 2555), ("P1Y6M", 545), ("P2W", 14), ("P", None), ("30D", None)]
)
def test_a_retention_is_an_iso_8601_duration(duration, expected):
    assert days(duration) == expected


@pytest.mark.req("EVT-135", "EVT-138")
def test_every_class_of_the_platform_has_its_guarantees():
    promised = {
        name: (one.lossless, one.per_entity, one.log_years, one.encryption) for name, one in EVENT_CLASSES.items()
    }
    assert promised == {
        "domain": (True, True, 7, "at-rest"),
        "analytical": (False, False, 0, "at-rest"),
        "saga": (True, True, 7, "at-rest"),
        "audit": (True, False, 7, "at-rest tamper-evident"),
        "security": (True, False, 7, "at-rest tamper-evident"),
        "operational": (True, False, 7, "at-rest"),
        "compliance": (True, False, 7, "at-rest audit-grade"),
    }


@pytest.mark.req("EVT-135", "EVT-138")
@pytest.mark.parametrize(
    ("kind", "source", "delivery", "order"),
    [
        ("domain", "platform services", "at least once, ordered per entity", "per entity"),
        ("audit", "all services, through the audit log", "at least once; append-only, chained by hash", "by timestamp"),
    ],
)
def test_the_page_of_queues_says_what_a_class_promises(kind, source, delivery, order):
    rows = (ROOT / "contracts/QUEUES.md").read_text().splitlines()
    begins = f"| {kind} | {source} | {delivery} | {order} | 7 years or more | at-rest"
    assert any(row.startswith(begins) for row in rows)


@pytest.mark.req("EVT-135", "EVT-138")
@pytest.mark.parametrize("kind", EVENT_CLASSES)
def test_a_channel_with_one_replica_in_sync_breaks_every_class_but_the_lossy_one(kind, contracts):
    weak = edited(contract_named(contracts, "crm"), (*TO_CONFIG, "min.insync.replicas"), 1)
    weak = edited(weak, (*TO_GOVERNANCE, "event_class"), kind)
    assert any("need min.insync.replicas" in said for said in broken_guarantees(weak)) == (kind != "analytical")


def test_a_topic_takes_every_record_that_the_outbox_takes():
    assert MAX_RECORD_BYTES < LARGEST_RECORD


@pytest.mark.req("EVT-103", "EVT-104", "EVT-106")
def test_work_of_one_service_waits_in_its_tables_and_not_on_a_topic(contracts):
    channels = [channel for contract in contracts for channel in contract.channels.values()]
    assert {channel["x-governance"]["queue_class"] for channel in channels} == {"event-stream"}
    queues = [queue for contract in contracts for queue in contract.document["x-queues"].values()]
    assert {"durable-work", "delay", "dead-letter"} == {queue["queue_class"] for queue in queues}
    assert all(queue["where"].startswith("table ") for queue in queues)
