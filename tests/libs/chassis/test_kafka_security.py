"""On the real broker: who is let in, who is turned away and is told why, and what each may do once inside.

Every address comes from the environment, as a service reads it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from kafka_identities import PASSWORD, USERS, Authority, start_secure_kafka

from chassis.contracts import load_contracts
from chassis.contracts.__main__ import main
from chassis.contracts.acl import acls
from chassis.messaging import (
    BrokerUnavailable,
    GroupReader,
    KafkaAddress,
    Place,
    Producer,
    Received,
    Record,
    RecordRefused,
    TopicSpec,
    create_topics,
    read_lag,
    read_topics,
)
from chassis.settings import ServiceSettings
from chassis.testing.apache_kafka import ApacheKafka, KafkaUnavailable, fetch
from chassis.testing.kafka import cache_folder

pytestmark = [
    pytest.mark.messaging,
    pytest.mark.skipif(os.environ.get("PIN_KAFKA") != "apache", reason="runs Apache Kafka: only with PIN_KAFKA=apache"),
]
ROOT = Path(__file__).resolve().parents[3]
OVERDUE = "pin.crm.timeline-overdue.v1"
AUDIT = "pin.crm.audit.v1"
TIMELINE = "pin.crm.deal-timeline.v1"
OPERATIONAL = "pin.crm.operational.v1"
FOREIGN = "pin.chessboard.property-object-status-changed.v1"
LONGEST_REFUSAL = 15.0
Addresses = Callable[..., KafkaAddress]


@dataclass(frozen=True)
class Cluster:
    """The node, whom it trusts and somebody whom it doesn't."""

    kafka: ApacheKafka
    authority: Authority
    stranger: Authority

    def variables(self, door: str, user: str = "root") -> dict[str, str]:
        """Return the environment that leads a user through a door: tls, mutual, plain or scram."""
        listener = {"tls": "TLS", "mutual": "MUTUAL"}.get(door, "SASL")
        found = {"PIN_KAFKA_BOOTSTRAP": self.kafka.at(listener), "PIN_KAFKA_CA_FILE": self.authority.ca_file}
        if door == "mutual":
            cert, key = self.authority.issue(user)
            found |= {"PIN_KAFKA_CERT_FILE": cert, "PIN_KAFKA_KEY_FILE": key}
        if listener == "SASL":
            mechanism = "PLAIN" if door == "plain" else "SCRAM-SHA-512"
            found |= {"PIN_KAFKA_SECURITY": "sasl_ssl", "PIN_KAFKA_SASL_MECHANISM": mechanism}
            found |= {"PIN_KAFKA_USERNAME": user, "PIN_KAFKA_PASSWORD": PASSWORD}
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One secured node for all, with the contracts' permissions as `python -m chassis.contracts acls` has them."""
    folder = tmp_path_factory.mktemp("secure")
    authority, stranger = Authority(folder, "ours"), Authority(folder, "foreign")
    try:
        kafka = start_secure_kafka(folder, fetch(cache_folder(ROOT)), authority)
    except KafkaUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    with kafka:
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        wanted = [UserScramCredentialUpsertion(user, scram, PASSWORD.encode()) for user in USERS]
        for done in admin.alter_user_scram_credentials(wanted).values():
            done.result(timeout=20)
        for done in admin.create_acls(bindings()).values():
            done.result(timeout=20)
        yield Cluster(kafka, authority, stranger)


def bindings() -> list[AclBinding]:
    """Return the contracts' permissions as the foreign administration client takes them."""
    kinds = {"topic": ResourceType.TOPIC, "group": ResourceType.GROUP, "cluster": ResourceType.BROKER}
    words = {"DescribeConfigs": "DESCRIBE_CONFIGS", "IdempotentWrite": "IDEMPOTENT_WRITE"}
    return [
        AclBinding(
            kinds[one.resource],
            one.name,
            ResourcePatternType.PREFIXED if one.prefixed else ResourcePatternType.LITERAL,
            one.principal,
            "*",
            AclOperation[words.get(one.operation, one.operation.upper())],
            AclPermissionType.ALLOW,
        )
        for one in acls(load_contracts(ROOT / "contracts"))
    ]


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Addresses:
    """Reads an address out of an environment, in production's mode; None takes a variable away."""

    def read(variables: dict[str, str], **changes: str | None) -> KafkaAddress:
        enter(monkeypatch, variables | changes)
        return ServiceSettings().kafka

    return read


def enter(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str | None]) -> None:
    """Make these the only variables of ours."""
    for name in [name for name in os.environ if name.startswith("PIN_")]:
        monkeypatch.delenv(name)
    databases = ("PIN_DATABASE_URL", "PIN_API_DATABASE_URL", "PIN_MIGRATE_DATABASE_URL")
    for name, value in {**dict.fromkeys(databases, "postgresql://role@db/pin"), **variables}.items():
        if value is not None:
            monkeypatch.setenv(name, value)


@asynccontextmanager
async def member(address: KafkaAddress, group: str, *topics: str):
    """Be the one member of a group."""
    reader = GroupReader(address, group, topics, _nothing)
    try:
        await reader.start()
        yield reader
    finally:
        await reader.close()


async def _nothing() -> None:
    return


async def first(reader: GroupReader, seconds: float = 20.0) -> Received:
    """Return the first record that a member gets."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if records := await reader.poll(1.0, 1):
            return records[0]
    raise AssertionError(f"no record within {seconds} s")


async def publish(address: KafkaAddress, topic: str) -> None:
    """Send one record with the relay's producer."""
    producer = Producer(address, client_id="test")
    try:
        await producer.publish([Record(topic, b"key", b"{}", [])])
    finally:
        await producer.close()


async def join(address: KafkaAddress) -> None:
    """Join a group and leave it."""
    async with member(address, "pin.test.nobody", "pin.test.nothing.v1"):
        pass


# Who is let in.


@pytest.mark.req("EVT-102")
@pytest.mark.parametrize("door", ["tls", "mutual", "plain", "scram"])
async def test_all_our_clients_pass_every_door(cluster: Cluster, address: Addresses, door: str) -> None:
    where = address(cluster.variables(door))
    topic, group = f"pin.test.{uuid4().hex}.v1", f"pin.test.{uuid4().hex}"
    assert await create_topics(where, [TopicSpec(topic, 1)]) == [topic]
    await publish(where, topic)
    assert (await read_topics(where))[topic] == 1
    async with member(where, group, topic) as reader:
        assert (await first(reader)).value == b"{}"
        assert await reader.acknowledge({Place(topic, 0): 0})
    assert await read_lag(where, group) == {group: {Place(topic, 0): 1}}


# Who is turned away, and what is said.

CLIENTS: dict[str, Callable[[KafkaAddress], Awaitable[Any]]] = {
    "producer": lambda address: publish(address, OVERDUE),
    "topics": read_topics,
    "reader": join,
    "lag": lambda address: read_lag(address, "pin."),
}


def stranger_authority(cluster: Cluster) -> dict[str, str | None]:
    return cluster.variables("tls") | {"PIN_KAFKA_CA_FILE": cluster.stranger.ca_file}


def other_host(cluster: Cluster) -> dict[str, str | None]:
    found = cluster.variables("tls")
    return found | {"PIN_KAFKA_BOOTSTRAP": found["PIN_KAFKA_BOOTSTRAP"].replace("127.0.0.1", "localhost")}


def no_certificate(cluster: Cluster) -> dict[str, str | None]:
    return cluster.variables("mutual") | {"PIN_KAFKA_CERT_FILE": None, "PIN_KAFKA_KEY_FILE": None}


def certificate_of_a_stranger(cluster: Cluster) -> dict[str, str | None]:
    cert, key = cluster.stranger.issue("crm")
    return cluster.variables("mutual") | {"PIN_KAFKA_CERT_FILE": cert, "PIN_KAFKA_KEY_FILE": key}


def wrong_password(door: str) -> Callable[[Cluster], dict[str, str | None]]:
    return lambda cluster: cluster.variables(door) | {"PIN_KAFKA_PASSWORD": "hunter3-mistyped"}


def plaintext(cluster: Cluster) -> dict[str, str | None]:
    bootstrap = cluster.kafka.at("TLS")
    return {"PIN_KAFKA_BOOTSTRAP": bootstrap, "PIN_KAFKA_SECURITY": "plaintext", "PIN_ENV": "development"}


def tls_to_plaintext(cluster: Cluster) -> dict[str, str | None]:
    return cluster.variables("tls") | {"PIN_KAFKA_BOOTSTRAP": cluster.kafka.bootstrap}


@pytest.mark.parametrize(
    ("arrange", "said"),
    [
        (stranger_authority, "the broker's certificate is not accepted: unable to get local issuer certificate"),
        (other_host, "the broker's certificate is not accepted: Hostname mismatch"),
        (no_certificate, "our client certificate is missing or not accepted"),
        (certificate_of_a_stranger, "our client certificate is missing or not accepted"),
        (wrong_password("plain"), "user root is not accepted (PLAIN): wrong user or password"),
        (wrong_password("scram"), "user root is not accepted (SCRAM-SHA-512): wrong user or password"),
        (plaintext, "does this port speak plaintext"),
        (tls_to_plaintext, "does this port speak"),
    ],
    ids=["authority", "host", "no certificate", "foreign certificate", "plain", "scram", "plaintext", "tls"],
)
@pytest.mark.parametrize("client", CLIENTS)
async def test_a_refusal_says_which_it_is_in_bounded_time_and_no_password(
    cluster: Cluster, address: Addresses, caplog, arrange: Callable[[Cluster], dict[str, str | None]], said: str, client
) -> None:
    where = address(arrange(cluster))
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable) as caught:
        await CLIENTS[client](where)
    assert time.monotonic() - started < LONGEST_REFUSAL
    assert str(caught.value).startswith(f"{where.bootstrap}: ")
    assert said in str(caught.value)
    everything = f"{caught.value!r} {caught.value.__cause__!r} {caplog.text} {where!r}"
    assert "hunter" not in everything


# What each may do: the contracts' permissions and nothing else.


@pytest.fixture
async def topics(cluster: Cluster) -> None:
    """Topics of two services, made by the superuser."""
    where = KafkaAddress(cluster.kafka.bootstrap)
    await create_topics(where, [TopicSpec(name, 1) for name in (OVERDUE, AUDIT, FOREIGN)])


@pytest.mark.parametrize("door", ["mutual", "scram"])
async def test_crm_writes_its_own_topics_and_no_other(cluster, topics, address, door: str) -> None:
    where = address(cluster.variables(door, "crm"))
    await publish(where, OVERDUE)
    await publish(where, AUDIT)
    with pytest.raises(RecordRefused, match=f"^{FOREIGN}, key key: not authorised to write to the topic$"):
        await publish(where, FOREIGN)


async def test_a_refused_topic_keeps_back_no_other(cluster, topics, address) -> None:
    producer = Producer(address(cluster.variables("scram", "crm")), client_id="test")
    publication = await producer.deliver([Record(topic, b"k", b"{}", []) for topic in (FOREIGN, OVERDUE)])
    await producer.close()
    assert (publication.acknowledged, set(publication.refused), publication.trouble) == ({1}, {0}, None)
    assert not publication.refused[0].final


@pytest.mark.parametrize("user", ["chessboard", "messenger"])
async def test_another_service_cannot_write_crms_topics(cluster, topics, address, user: str) -> None:
    with pytest.raises((RecordRefused, BrokerUnavailable), match=f"{OVERDUE}|[Aa]uthori"):
        await publish(address(cluster.variables("scram", user)), OVERDUE)


async def test_a_consumer_reads_what_it_is_named_for(cluster, topics, address) -> None:
    await publish(address(cluster.variables("scram", "crm")), OVERDUE)
    where, group = address(cluster.variables("scram", "messenger")), f"pin.messenger.{uuid4().hex}"
    async with member(where, group, OVERDUE) as reader:
        assert (await first(reader)).topic == OVERDUE
        assert await reader.acknowledge({Place(OVERDUE, 0): 1})
    assert group in await read_lag(where, "pin.messenger.")
    assert AUDIT not in await read_topics(where)


@pytest.mark.parametrize(
    ("group", "topic", "named"),
    [("pin.messenger.cards", AUDIT, AUDIT), ("pin.crm.cards", OVERDUE, "pin.crm.cards")],
    ids=["topic", "group"],
)
async def test_a_foreign_topic_or_group_is_refused_by_name(cluster, topics, address, group, topic, named) -> None:
    where = address(cluster.variables("scram", "messenger"))
    with pytest.raises(BrokerUnavailable, match=named):
        async with asyncio.timeout(LONGEST_REFUSAL), member(where, group, topic) as reader:
            await first(reader)


@pytest.mark.parametrize("user", ["crm", "messenger"])
async def test_services_create_no_topics(cluster, topics, address, user: str) -> None:
    with pytest.raises(BrokerUnavailable, match=r"topic pin\.crm\.new\.v1 was refused: error 29"):
        await create_topics(address(cluster.variables("scram", user)), [TopicSpec("pin.crm.new.v1", 1)])


# The deploy step.


@pytest.mark.req("EVT-107")
def test_the_deploy_step_makes_the_topics_over_tls_and_tells_drift(cluster, monkeypatch, capsys) -> None:
    asyncio.run(create_topics(KafkaAddress(cluster.kafka.bootstrap), [TopicSpec(OPERATIONAL, 1)]))
    enter(monkeypatch, cluster.variables("scram", "topics"))
    assert main(["topics", str(ROOT / "contracts"), "--replicas", "1"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert f"created {TIMELINE}" in said
    assert f"drift   {OPERATIONAL}: 1 partitions, the contract says 3" in said
    assert not [line for line in said if line.startswith(f"drift   {TIMELINE}")]
    declared = {spec.name for contract in load_contracts(ROOT / "contracts") for spec in contract.topics()}
    assert declared <= set(asyncio.run(read_topics(KafkaAddress(cluster.kafka.bootstrap))))


def test_the_deploy_step_is_refused_in_one_line_without_its_password(cluster, monkeypatch, capsys) -> None:
    enter(monkeypatch, cluster.variables("scram", "topics") | {"PIN_KAFKA_PASSWORD": None})
    assert main(["topics", str(ROOT / "contracts")]) == 2
    said = capsys.readouterr().err
    assert said == "topics: PIN_KAFKA_SECURITY=sasl_ssl needs PIN_KAFKA_USERNAME and PIN_KAFKA_PASSWORD\n"
