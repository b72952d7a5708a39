"""Topics come from the contracts' bindings and from nothing else; a file that can't be read is named."""

from pathlib import Path
from textwrap import dedent
from uuid import uuid4

import pytest

from chassis.contracts import ContractInvalid, contract_of, drift, ensure_topics, load_contracts
from chassis.contracts.__main__ import main
from chassis.messaging import (
    BrokerUnavailable,
    KafkaAddress,
    TopicSpec,
    create_topics,
    describe_topics,
    read_topics,
)
from chassis.testing.plugin import TestBroker

GOOD = """
asyncapi: 3.0.0
channels:
  noted:
    address: {topic}
    x-governance: {{event_class: domain}}
    messages:
      Noted: {{$ref: '#/components/messages/Noted'}}
    bindings:
      kafka:
        partitions: 3
        replicas: 3
        topicConfiguration:
          cleanup.policy: [compact, delete]
          retention.ms: 1000
          min.insync.replicas: 2
          preallocate: true
components:
  messages:
    Noted:
      name: Noted
      headers:
        allOf:
          - $ref: '#/components/schemas/Envelope'
        required: [ce_sequence]
        properties:
          ce_type: {{type: string, const: test.noted}}
      payload: {{$ref: '#/components/schemas/Note'}}
      examples:
        - name: one
          payload: {{Number: 1}}
  schemas:
    Envelope:
      type: object
      required: [ce_id]
      properties:
        ce_id: {{type: string}}
        ce_type: {{type: string}}
    Note:
      type: object
      properties:
        Number: {{$ref: '#/components/schemas/Number'}}
    Number: {{type: integer}}
"""


def contract(folder: Path, text: str, name: str = "test.asyncapi.yaml") -> Path:
    (folder / name).write_text(dedent(text))
    return folder


@pytest.fixture
def topic_name() -> str:
    return f"pin.test.{uuid4().hex[:12]}.v1"


def test_topics_are_what_the_bindings_say(tmp_path: Path):
    [read] = load_contracts(contract(tmp_path, GOOD.format(topic="pin.test.note.v1")))
    config = {"cleanup.policy": "compact,delete", "retention.ms": "1000", "preallocate": "true"}
    assert read.topics() == [TopicSpec("pin.test.note.v1", 3, 3, config | {"min.insync.replicas": "2"})]
    assert read.topics(replicas=1) == [TopicSpec("pin.test.note.v1", 3, 1, config)]


def test_messages_have_their_references_written_out(tmp_path: Path):
    [read] = load_contracts(contract(tmp_path, GOOD.format(topic="pin.test.note.v1")))
    [message] = read.messages()
    assert (message.topic, message.type, message.name) == ("pin.test.note.v1", "test.noted", "Noted")
    assert message.payload == {"type": "object", "properties": {"Number": {"type": "integer"}}}
    assert message.headers["required"] == ["ce_id", "ce_sequence"]
    assert message.headers["properties"]["ce_type"] == {"type": "string", "const": "test.noted"}
    assert message.examples == [{"name": "one", "payload": {"Number": 1}}]
    assert message.governance == {"event_class": "domain"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just text",
        "- a list",
        "channels:",
        "channels: []",
        "channels: {noted: 7}",
        "channels: {noted: {address: a}}",
        "channels: {noted: {address: a, bindings: }}",
        "channels: {noted: {address: a, bindings: {kafka: }}}",
        "channels: {noted: {address: a, bindings: {kafka: {replicas: 1}}}}",
        "channels: {noted: {address: a, bindings: {kafka: {partitions: many, replicas: 1}}}}",
        "channels: {noted: {address: a, bindings: {kafka: {partitions: 1, replicas: 1, topicConfiguration: 7}}}}",
        "channels: {noted: {bindings: {kafka: {partitions: 1, replicas: 1}}}}",
        "a: [unclosed",
        "a: \t{tab: 1}\n\tb",
        "!!python/object/apply:os.system ['true']",
    ],
    ids=range(16),
)
def test_a_file_that_describes_no_topics_is_named(tmp_path: Path, text: str):
    contract(tmp_path, text, "broken.asyncapi.yaml")
    with pytest.raises(ContractInvalid, match=r"broken\.asyncapi\.yaml"):
        [file.topics() for file in load_contracts(tmp_path)]


def test_a_file_that_is_not_text_is_named(tmp_path: Path):
    (tmp_path / "broken.asyncapi.yaml").write_bytes(b"\xff\xfe\x00channels")
    with pytest.raises(ContractInvalid, match=r"broken\.asyncapi\.yaml"):
        load_contracts(tmp_path)


@pytest.mark.parametrize(
    "messages",
    [
        "",
        "messages: 7",
        "messages: {Noted: {$ref: '#/components/nothing'}}",
        "messages: {Noted: {$ref: 'other.yaml#/Noted'}}",
        "messages: {Noted: {$ref: '#/channels/noted/messages/Noted'}}",
        "messages: {Noted: {name: Noted, payload: {}}}",
        "messages: {Noted: {name: Noted, payload: {}, headers: {}}}",
        "messages: {Noted: {name: Noted, headers: {properties: {ce_type: {const: a}}}}}",
        "messages: {Noted: {name: Noted, headers: {properties: {ce_type: {const: a}}}, payload: &loop {a: *loop}}}",
        "messages: {Noted: 7}",
    ],
    ids=range(10),
)
def test_a_message_that_cannot_be_read_names_file_and_place(tmp_path: Path, messages: str):
    contract(tmp_path, f"channels: {{noted: {{address: a, {messages}}}}}", "broken.asyncapi.yaml")
    [read] = load_contracts(tmp_path)
    with pytest.raises(ContractInvalid, match=r"broken\.asyncapi\.yaml: .*(noted|leads)"):
        list(read.messages())


def test_a_schema_that_contains_itself_is_refused_and_not_followed_for_ever(tmp_path: Path):
    text = GOOD.format(topic="a").replace("Number: {type: integer}", "Number: {$ref: '#/components/schemas/Note'}")
    [read] = load_contracts(contract(tmp_path, text))
    with pytest.raises(ContractInvalid, match=r"test\.asyncapi\.yaml: channel noted"):
        list(read.messages())


def test_a_folder_without_contracts_is_an_error(tmp_path: Path):
    with pytest.raises(ContractInvalid, match="no "):
        load_contracts(tmp_path)


def test_contracts_are_read_in_the_order_of_their_names(tmp_path: Path):
    for name in ("b", "a"):
        contract(tmp_path, GOOD.format(topic=name), f"{name}.asyncapi.yaml")
    contract(tmp_path, "not: ours", "other.yaml")
    assert [read.path.name for read in load_contracts(tmp_path)] == ["a.asyncapi.yaml", "b.asyncapi.yaml"]


def test_drift_is_a_sentence_per_topic():
    declared = [TopicSpec("a", 3), TopicSpec("b", 3), TopicSpec("c", 3)]
    existing = {"a": TopicSpec("a", 3), "b": TopicSpec("b", 2), "d": TopicSpec("d", 9)}
    assert drift(declared, existing) == ["b: 2 partitions, the contract says 3", "c: missing"]


@pytest.mark.messaging
async def test_declared_topics_are_created_once(tmp_path: Path, broker: TestBroker, topic_name: str):
    folder = contract(tmp_path, GOOD.format(topic=topic_name))
    assert await ensure_topics(folder, broker.address, replicas=1) == ([topic_name], [])
    assert (await read_topics(broker.address))[topic_name] == 3
    assert await ensure_topics(folder, broker.address, replicas=1) == ([], [])


@pytest.mark.messaging
async def test_a_topic_that_differs_is_reported_and_left_as_it_is(tmp_path: Path, broker: TestBroker, topic_name: str):
    config = {"cleanup.policy": "compact,delete", "retention.ms": "1000"}
    await create_topics(broker.address, [TopicSpec(topic_name, 2, 1, config)])
    folder = contract(tmp_path, GOOD.format(topic=topic_name))
    created, differences = await ensure_topics(folder, broker.address, replicas=1)
    assert created == []
    assert differences == [f"{topic_name}: 2 partitions, the contract says 3"]
    assert (await read_topics(broker.address))[topic_name] == 2


async def test_no_broker_is_an_error_of_its_own(tmp_path: Path):
    with pytest.raises(BrokerUnavailable):
        await ensure_topics(contract(tmp_path, GOOD.format(topic="a")), KafkaAddress("127.0.0.1:1"), replicas=1)


@pytest.mark.messaging
def test_the_command_creates_reports_and_refuses(
    tmp_path: Path,
    broker: TestBroker,
    topic_name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PIN_ENV", "development")
    monkeypatch.setenv("PIN_KAFKA_SECURITY", "plaintext")
    contract(tmp_path, GOOD.format(topic=topic_name))
    arguments = ["topics", str(tmp_path), "--bootstrap", broker.running.bootstrap, "--replicas", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(f"created {topic_name}\nnotice  ")
    contract(tmp_path, GOOD.format(topic=topic_name).replace("partitions: 3", "partitions: 4"))
    assert main(arguments) == 1
    assert capsys.readouterr().out.startswith(f"drift   {topic_name}: 3 partitions, the contract says 4\nnotice  ")
    contract(tmp_path, "channels: 7")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "topics: test.asyncapi.yaml: no map of channels\n"


@pytest.mark.messaging
async def test_a_broker_describes_topics_with_the_settings_that_were_asked_for(broker: TestBroker, topic_name: str):
    config = {"retention.ms": "60000", "max.message.bytes": "500000"}
    await create_topics(broker.address, [TopicSpec(topic_name, 2, 1, config)])
    described = (await describe_topics(broker.address, ["retention.ms", "min.insync.replicas"]))[topic_name]
    assert described == TopicSpec(topic_name, 2, 1, {"retention.ms": "60000", "min.insync.replicas": "1"})
    assert (await describe_topics(broker.address, ()))[topic_name] == TopicSpec(topic_name, 2, 1)


async def test_a_broker_that_is_away_describes_nothing():
    with pytest.raises(BrokerUnavailable):
        await describe_topics(KafkaAddress("127.0.0.1:1"), ())


def test_a_services_contract_is_found_beside_its_checkout(tmp_path: Path):
    package = tmp_path / "services/ops-queue/src/ops_queue/__init__.py"
    with pytest.raises(FileNotFoundError, match=r"no contract .*/contracts/ops-queue\.asyncapi\.yaml"):
        contract_of(str(package))
    (tmp_path / "contracts").mkdir()
    path = tmp_path / "contracts/ops-queue.asyncapi.yaml"
    path.touch()
    assert contract_of(str(package)) == path
