"""The page of queues and Kafka's permissions follow from the contracts, and can't grow old unnoticed."""

import json
import shlex

import pytest
from contract_checks import ROOT, contract_named, edited

from chassis.contracts import load_contracts
from chassis.contracts.__main__ import main
from chassis.contracts.acl import Acl, acls
from chassis.contracts.classes import EVENT_CLASSES
from chassis.contracts.governance import queues_of
from chassis.contracts.queues import PAGE, page, stale

FOLDER = ROOT / "contracts"


@pytest.fixture
def text():
    return (FOLDER / PAGE).read_text()


@pytest.mark.req("EVT-127")
def test_the_page_of_queues_is_what_the_contracts_say(contracts):
    assert stale(FOLDER, contracts) == []


def test_a_page_that_is_older_than_the_contracts_is_refused(contracts, tmp_path):
    place = ("channels", "audit", "x-governance", "operator_action")
    told = ["QUEUES.md: older than the contracts; `make queues` writes it"]
    assert stale(FOLDER, [edited(contract_named(contracts, "crm"), place, "call someone")]) == told
    assert stale(tmp_path, contracts) == told


@pytest.mark.req("EVT-112", "EVT-113", "EVT-115", "EVT-116", "EVT-117", "EVT-118", "EVT-119", "EVT-127")
def test_the_page_shows_of_every_topic_and_table_who_answers_for_it(contracts, text):
    sections = {part.splitlines()[0]: part for part in text.split("\n### ")[1:]}
    for contract in contracts:
        for channel in contract.channels.values():
            section, said = sections[f"`{channel['address']}`"], channel["x-governance"]
            for name in ("producer", "idempotency_key", "retry_policy", "poison_rule", "operator_action", "alert"):
                assert f" {said[name]} |" in section, name
            assert f"| consumers | {', '.join(said['consumers'])} |" in section
            assert f"topic {said['retention']['topic']}, event log {said['retention']['log']}" in section
            assert EVENT_CLASSES[said["event_class"]].delivery in section
        for name, queue in queues_of(contract):
            assert f"| where | {queue['where']} |" in sections[f"{contract.name}: {name}"]


@pytest.mark.req("EVT-133", "EVT-134z")
def test_every_queue_belongs_to_a_contour_and_every_contour_lists_its_queues(contracts, text):
    overview = text.split("## Families by execution contour")[1].split("\n## ")[0]
    rows = {cells[1].strip(): cells[2] for line in overview.splitlines() if len(cells := line.split("|")) == 4}
    for contract in contracts:
        for channel in contract.channels.values():
            assert f"`{channel['address']}`" in rows[channel["x-governance"]["contour"]]
        for name, queue in queues_of(contract):
            assert f"{contract.name}: {name}" in rows[queue["contour"]]


def test_the_command_writes_the_page(tmp_path, contracts, capsys):
    (tmp_path / "crm.asyncapi.yaml").write_text((FOLDER / "crm.asyncapi.yaml").read_text())
    assert main(["queues", str(tmp_path)]) == 0
    assert (tmp_path / PAGE).read_text() == page(load_contracts(tmp_path))
    assert stale(tmp_path, load_contracts(tmp_path)) == []


@pytest.mark.req("EVT-134", "EVT-134x", "EVT-134z")
@pytest.mark.parametrize(
    "sentence",
    [
        "## Events or requests",
        "## Which guarantee suffices",
        "## Which broker for what",
        "## What eventing is tied to",
        "**Kafka for all that crosses a service's border.**",
        "**Work of one service waits in its own Postgres tables.**",
        "**What is scheduled or delayed is a row with a due time.**",
        "**Replay.**",
        "**Observability.**",
        "**Release safety.**",
        "**Domain truth.**",
        "kept in step with",
    ],
)
def test_the_page_of_rules_states_the_baseline(sentence):
    assert sentence in (FOLDER / "README.md").read_text()


@pytest.mark.req("EVT-128", "EVT-129", "EVT-130", "EVT-131")
@pytest.mark.parametrize(
    "word",
    ["FULL_TRANSITIVE", "BACKWARD_TRANSITIVE", "x-compatibility", "upcaster", "correction event", "replay_impact"],
)
def test_the_page_of_rules_states_how_contracts_change(word):
    assert word in (FOLDER / "README.md").read_text()


def test_a_service_may_write_its_topics_and_a_consumer_read_them_and_nothing_else(contracts):
    permissions = acls(contracts)
    crm = [one for one in permissions if one.principal == "User:crm"]
    own = {channel["address"] for channel in contract_named(contracts, "crm").channels.values()}
    assert {(one.operation, one.resource) for one in crm} == {
        ("Write", "topic"),
        ("Read", "topic"),
        ("Read", "group"),
        ("Describe", "topic"),
        ("IdempotentWrite", "cluster"),
    }
    assert {one.name for one in crm if one.operation == "Write"} == own
    messenger = [one for one in permissions if one.principal == "User:messenger"]
    assert messenger == sorted(
        [
            *(
                Acl("User:messenger", operation, "topic", topic)
                for operation in ("Describe", "Read")
                for topic in ("pin.crm.booking.v1", "pin.crm.deal-timeline.v1", "pin.crm.timeline-overdue.v1")
            ),
            Acl("User:messenger", "Read", "group", "pin.messenger.", prefixed=True),
        ]
    )
    assert not [one for one in permissions if "*" in one.principal + one.name]
    assert {one.name for one in permissions if one.prefixed and one.operation != "Read"} == {"pin."}


def test_the_group_prefix_is_the_context_and_not_the_service(contracts):
    place = ("channels", "timelineOverdue", "x-governance", "consumers")
    permissions = acls([edited(contract_named(contracts, "crm"), place, ["ops-queue"])])
    assert Acl("User:ops-queue", "Read", "group", "pin.ops.", prefixed=True) in permissions


def test_permissions_are_printed_as_commands_and_as_json(contracts, capsys):
    assert main(["acls", str(FOLDER), "--bootstrap", "kafka:9093"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(acls(contracts)) == len(set(lines))
    words = "kafka-acls.sh --bootstrap-server kafka:9093 --add --allow-principal User:{} --operation {}"
    assert words.format("crm", "Write") + " --topic pin.crm.audit.v1" in lines
    assert words.format("crm", "IdempotentWrite") + " --cluster" in lines
    group = words.format("messenger", "Read") + " --group pin.messenger. --resource-pattern-type prefixed"
    assert group in lines
    assert all(shlex.split(line)[0] == "kafka-acls.sh" for line in lines)
    assert main(["acls", str(FOLDER), "--format", "json"]) == 0
    assert [Acl(**one) for one in json.loads(capsys.readouterr().out)] == acls(contracts)
