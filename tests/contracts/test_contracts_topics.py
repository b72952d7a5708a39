"""Topics are made from the contracts' Kafka bindings, once, and what differs from them is told."""

import json
import subprocess
import sys
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from contract_checks import ROOT, edited

from chassis import contracts as module
from chassis.contracts import ContractInvalid, drift, ensure_topics
from chassis.messaging import TopicSpec

KAFKA = ("channels", "timelineOverdue", "bindings", "kafka")


@pytest.fixture
def admin(broker):
    return AdminClient({"bootstrap.servers": broker.running.bootstrap})


@pytest.fixture
def folder(contracts, tmp_path):
    """A contract of its own: the same channel under a topic name that nothing else uses."""
    topic = f"pin.crm.t-{uuid4().hex}.v1"
    one = edited(contracts[0], ("channels", "timelineOverdue", "address"), topic)
    del one.document["channels"]["dealTimeline"]
    (tmp_path / "one.asyncapi.yaml").write_text(json.dumps(one.document))
    return tmp_path, topic


def test_a_topic_is_described_by_its_binding(contracts):
    topics = {spec.name: spec for contract in contracts for spec in contract.topics()}
    assert topics["pin.crm.timeline-overdue.v1"] == TopicSpec(
        "pin.crm.timeline-overdue.v1",
        partitions=12,
        replicas=3,
        config={"cleanup.policy": "delete", "retention.ms": "2592000000", "min.insync.replicas": "2"},
    )


def test_a_single_node_broker_gets_one_replica_and_no_demand_for_more(contracts):
    for spec in contracts[0].topics(replicas=1):
        assert spec.replicas == 1
        assert "min.insync.replicas" not in spec.config


@pytest.mark.parametrize("policy", ["compact", ["compact"]])
def test_a_cleanup_policy_is_read_as_word_or_list(policy, contracts):
    changed = edited(contracts[0], (*KAFKA, "topicConfiguration", "cleanup.policy"), policy)
    assert changed.topics()[0].config["cleanup.policy"] == "compact"


def test_a_channel_without_binding_makes_no_topic(contracts):
    with pytest.raises(ContractInvalid, match=r"^crm\.asyncapi\.yaml: channel timelineOverdue lacks 'partitions'$"):
        edited(contracts[0], (*KAFKA, "partitions"), ...).topics()


def test_missing_and_different_topics_are_told():
    declared = [TopicSpec("a", 12), TopicSpec("b", 12), TopicSpec("c", 12)]
    told = ["b: 6 partitions, the contract says 12", "c: missing"]
    assert drift(declared, {"a": 12, "b": 6, "other": 1}) == told


@pytest.mark.messaging
def test_the_brokers_topics_have_the_declared_partitions_and_settings(broker, admin, contracts):
    existing = admin.list_topics(timeout=10).topics
    for channel in (channel for contract in contracts for channel in contract.channels.values()):
        binding = channel["bindings"]["kafka"]
        assert len(existing[channel["address"]].partitions) == binding["partitions"]
        resource = ConfigResource(ResourceType.TOPIC, channel["address"])
        settings = admin.describe_configs([resource])[resource].result(timeout=10)
        declared = binding["topicConfiguration"]
        assert settings["retention.ms"].value == str(declared["retention.ms"])
        assert settings["cleanup.policy"].value == ",".join(declared["cleanup.policy"])


@pytest.mark.messaging
async def test_topics_are_created_once(broker, folder):
    contracts_folder, topic = folder
    assert await ensure_topics(contracts_folder, broker.address, replicas=1) == ([topic], [])
    assert await ensure_topics(contracts_folder, broker.address, replicas=1) == ([], [])


@pytest.mark.messaging
def test_the_command_reports_a_topic_of_another_size_and_leaves_it(broker, admin, folder, capsys):
    contracts_folder, topic = folder
    admin.create_topics([NewTopic(topic, 3, 1)])[topic].result(timeout=10)
    bootstrap = broker.running.bootstrap
    assert module.main([str(contracts_folder), "--bootstrap", bootstrap, "--replicas", "1"]) == 1
    assert capsys.readouterr().out == f"drift   {topic}: 3 partitions, the contract says 12\n"
    assert len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 3


@pytest.mark.messaging
def test_the_command_says_what_it_created(broker, folder, capsys):
    contracts_folder, topic = folder
    assert module.main([str(contracts_folder), "--bootstrap", broker.running.bootstrap, "--replicas", "1"]) == 0
    assert capsys.readouterr().out == f"created {topic}\n"


def test_the_command_refuses_a_folder_without_contracts_in_one_line(tmp_path, capsys):
    assert module.main([str(tmp_path), "--bootstrap", "127.0.0.1:9"]) == 2
    assert capsys.readouterr().err == f"topics: no *.asyncapi.yaml in {tmp_path}\n"


def test_the_command_says_in_one_line_that_no_broker_answers():
    command = [sys.executable, "-m", "chassis.contracts", str(ROOT / "contracts"), "--bootstrap", "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("topics: 127.0.0.1:9: ")
    assert done.stderr.count("\n") == 1
