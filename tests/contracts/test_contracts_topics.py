"""Topics are made from the contracts' Kafka bindings, once, and what differs from them is told."""

import json
import subprocess
import sys
from uuid import uuid4

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from contract_checks import ROOT, contract_named, edited

from chassis.contracts import ContractInvalid, drift, ensure_topics, undeclared
from chassis.contracts import __main__ as module
from chassis.contracts.topics import broker_findings
from chassis.messaging import TopicSpec, auto_creates_topics, create_topics

KAFKA = ("channels", "timelineOverdue", "bindings", "kafka")


@pytest.fixture
def admin(broker):
    return AdminClient({"bootstrap.servers": broker.running.bootstrap})


@pytest.fixture
def folder(contracts, tmp_path):
    """A contract of its own: the same channel under a topic name that nothing else uses."""
    topic = f"pin.crm.t-{uuid4().hex}.v1"
    one = edited(contract_named(contracts, "crm"), ("channels", "timelineOverdue", "address"), topic)
    one.document["channels"] = {"timelineOverdue": one.document["channels"]["timelineOverdue"]}
    (tmp_path / "one.asyncapi.yaml").write_text(json.dumps(one.document))
    return tmp_path, topic


@pytest.fixture(autouse=True)
def plaintext_is_allowed(monkeypatch):
    """The tests' broker speaks nothing else; that the command reads the rest is shown in test_kafka_security."""
    monkeypatch.setenv("PIN_ENV", "development")
    monkeypatch.setenv("PIN_KAFKA_SECURITY", "plaintext")


def run(*words):
    return module.main([str(word) for word in words])


def said(capsys):
    """What a command printed, less what it notices of other tests' topics on the shared broker."""
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("notice  ")]


def test_a_topic_is_described_by_its_binding(contracts):
    topics = {spec.name: spec for contract in contracts for spec in contract.topics()}
    assert topics["pin.crm.timeline-overdue.v1"] == TopicSpec(
        "pin.crm.timeline-overdue.v1",
        partitions=12,
        replicas=3,
        config={
            "cleanup.policy": "delete",
            "retention.ms": "2592000000",
            "min.insync.replicas": "2",
            "max.message.bytes": "1048576",
        },
    )


def test_a_single_node_broker_gets_one_replica_and_no_demand_for_more(contracts):
    for spec in contract_named(contracts, "crm").topics(replicas=1):
        assert spec.replicas == 1
        assert "min.insync.replicas" not in spec.config


@pytest.mark.parametrize("policy", ["compact", ["compact"]])
def test_a_cleanup_policy_is_read_as_word_or_list(policy, contracts):
    changed = edited(contract_named(contracts, "crm"), (*KAFKA, "topicConfiguration", "cleanup.policy"), policy)
    assert changed.topics()[0].config["cleanup.policy"] == "compact"


def test_a_channel_without_binding_makes_no_topic(contracts):
    with pytest.raises(ContractInvalid, match=r"^crm\.asyncapi\.yaml: channel timelineOverdue lacks 'partitions'$"):
        edited(contract_named(contracts, "crm"), (*KAFKA, "partitions"), ...).topics()


def test_missing_and_different_topics_are_told():
    declared = [TopicSpec("a", 12, 3), TopicSpec("b", 12, 3), TopicSpec("c", 12, 3)]
    told = ["b: 6 partitions, the contract says 12", "b: 1 replicas, the contract says 3", "c: missing"]
    existing = {"a": TopicSpec("a", 12, 3), "b": TopicSpec("b", 6, 1), "other": TopicSpec("other", 1)}
    assert drift(declared, existing) == told


@pytest.mark.parametrize(
    ("setting", "have", "want", "told"),
    [
        ("retention.ms", "1", "2", "retention.ms 1, the contract says 2"),
        ("cleanup.policy", "compact", "delete", "cleanup.policy compact, the contract says delete"),
        ("cleanup.policy", "delete,compact", "compact,delete", None),
        ("min.insync.replicas", "1", "2", "min.insync.replicas 1, the contract says 2"),
        ("max.message.bytes", "1000", "2000", "max.message.bytes 1000, the contract says 2000"),
        ("max.message.bytes", "2000", "2000", None),
    ],
)
def test_a_setting_that_differs_is_told(setting, have, want, told):
    found = drift([TopicSpec("a", 1, 1, {setting: want})], {"a": TopicSpec("a", 1, 1, {setting: have})})
    assert found == ([] if told is None else [f"a: {told}"])


def test_topics_of_the_platform_that_no_contract_declares_are_told():
    assert undeclared([TopicSpec("pin.a.b.v1", 1)], ["pin.a.b.v1", "pin.a.lost.v1", "other", "__consumer_offsets"]) == [
        "pin.a.lost.v1"
    ]


@pytest.mark.messaging
@pytest.mark.req("EVT-102", "EVT-116")
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
async def test_every_setting_that_differs_on_the_broker_is_told(broker, folder):
    contracts_folder, topic = folder
    odd = {"retention.ms": "60000", "cleanup.policy": "compact", "max.message.bytes": "500000"}
    await create_topics(broker.address, [TopicSpec(topic, 12, 1, odd)])
    created, differences = await ensure_topics(contracts_folder, broker.address, replicas=1)
    assert created == []
    assert sorted(differences) == [
        f"{topic}: cleanup.policy compact, the contract says delete",
        f"{topic}: max.message.bytes 500000, the contract says 1048576",
        f"{topic}: retention.ms 60000, the contract says 2592000000",
    ]
    as_declared = (await ensure_topics(contracts_folder, broker.address, replicas=None))[1]
    assert f"{topic}: 1 replicas, the contract says 3" in as_declared
    assert f"{topic}: min.insync.replicas 1, the contract says 2" in as_declared


@pytest.mark.messaging
@pytest.mark.req("EVT-127")
async def test_a_topic_that_no_contract_declares_is_noticed_on_the_broker(broker, folder):
    contracts_folder, topic = folder
    lost = f"{topic.removesuffix('.v1')}-lost.v1"
    await create_topics(broker.address, [TopicSpec(lost, 1)])
    await ensure_topics(contracts_folder, broker.address, replicas=1)
    noticed = await broker_findings(contracts_folder, broker.address)
    assert f"{lost}: no contract declares it" in noticed
    assert not [sentence for sentence in noticed if sentence.startswith(f"{topic}:")]


@pytest.mark.messaging
async def test_auto_creation_left_on_is_noticed(broker, folder):
    """The embedded broker has it on; Apache Kafka is started here with it off."""
    on = await auto_creates_topics(broker.address)
    if broker.running.kind != "external":
        assert on == (broker.running.kind == "embedded")
    said = "auto.create.topics.enable is true: a misspelt name makes a topic"
    assert (said in await broker_findings(folder[0], broker.address)) == on


@pytest.mark.messaging
def test_the_command_reports_a_topic_of_another_size_and_leaves_it(broker, admin, folder, capsys):
    contracts_folder, topic = folder
    kept = {"retention.ms": "2592000000", "max.message.bytes": "1048576"}
    admin.create_topics([NewTopic(topic, 3, 1, config=kept)])[topic].result(timeout=10)
    assert run("topics", contracts_folder, "--bootstrap", broker.running.bootstrap, "--replicas", "1") == 1
    assert said(capsys) == [f"drift   {topic}: 3 partitions, the contract says 12"]
    assert len(admin.list_topics(topic, timeout=10).topics[topic].partitions) == 3


@pytest.mark.messaging
def test_the_command_says_what_it_created(broker, folder, capsys):
    contracts_folder, topic = folder
    assert run("topics", contracts_folder, "--bootstrap", broker.running.bootstrap, "--replicas", "1") == 0
    assert said(capsys) == [f"created {topic}"]


def test_the_command_refuses_a_folder_without_contracts_in_one_line(tmp_path, capsys):
    assert run("topics", tmp_path, "--bootstrap", "127.0.0.1:9") == 2
    assert capsys.readouterr().err == f"topics: no *.asyncapi.yaml in {tmp_path}\n"


def test_the_command_says_in_one_line_that_no_broker_answers():
    command = [sys.executable, "-m", "chassis.contracts", "topics", str(ROOT / "contracts"), "--bootstrap"]
    done = subprocess.run([*command, "127.0.0.1:9"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("topics: 127.0.0.1:9: ")
    assert done.stderr.count("\n") == 1


def test_the_command_speaks_plaintext_in_development_only(monkeypatch, capsys):
    monkeypatch.delenv("PIN_ENV")
    assert run("topics", ROOT / "contracts", "--bootstrap", "127.0.0.1:9") == 2
    said = "topics: PIN_KAFKA_SECURITY=plaintext is refused unless PIN_ENV=development\n"
    assert capsys.readouterr().err == said
