"""The words of messaging: addresses, records, topics and errors; nothing here knows the client library."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BrokerUnavailable(Exception):
    """Kafka could not be reached, or did not acknowledge in time; nothing is known about the records."""


class OffsetsGone(Exception):
    """What stood at a position of a topic is no longer there."""


class RecordRefused(Exception):
    """A record that the broker or the client refuses for its own sake, while others pass: too large, no such topic.

    Attributes:
        record: the record.
        reason: why, as an operator reads it.
        final: whether it can never pass; otherwise it may once somebody has changed a topic or a right.
    """

    def __init__(self, record: "Record", reason: str, *, final: bool) -> None:
        super().__init__(f"{record.topic}, key {record.key.decode(errors='replace')[:100]}: {reason}")
        self.record = record
        self.reason = reason
        self.final = final


@dataclass(frozen=True, slots=True)
class KafkaAddress:
    """Where Kafka is and how to speak to it.

    Attributes:
        bootstrap: `host:port[,host:port]`.
        security: plaintext, ssl or sasl_ssl; settings refuse plaintext outside development.
        ca_file: certificates (PEM) to trust in place of the system's.
        cert_file: our certificate (PEM), where the broker asks for one.
        key_file: its private key (PEM).
        sasl_mechanism: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, with `sasl_ssl`.
        username: for SASL.
        password: for SASL; never shown.
    """

    bootstrap: str
    security: str = "plaintext"
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    sasl_mechanism: str = "SCRAM-SHA-512"
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    def client_arguments(self) -> dict[str, Any]:
        """Return the connection arguments that every client of the library takes.

        Raises:
            OSError: a certificate file can't be read (ssl.SSLError: it holds no certificate).
        """
        arguments: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.security.upper(),
            "request_timeout_ms": 10_000,
        }
        if self.security in ("ssl", "sasl_ssl"):
            context = ssl.create_default_context(cafile=self.ca_file)
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file, password=str)  # "": never asks a terminal
            arguments["ssl_context"] = context
        if self.security == "sasl_ssl":
            arguments["sasl_mechanism"] = self.sasl_mechanism
            arguments["sasl_plain_username"] = self.username
            arguments["sasl_plain_password"] = self.password
        return arguments


@dataclass(frozen=True, slots=True)
class Record:
    """One Kafka record to send: key and value as bytes, headers in order."""

    topic: str
    key: bytes
    value: bytes
    headers: Sequence[tuple[str, bytes]]


@dataclass(slots=True)
class Publication:
    """What became of the records of one `deliver`; of a record in neither set nothing is known, or it was not sent.

    Attributes:
        acknowledged: positions of the records that all in-sync replicas have.
        refused: position -> why; later records of the same key were not sent to that topic.
        trouble: why records are left that nobody refused.
    """

    acknowledged: set[int] = field(default_factory=set)
    refused: dict[int, RecordRefused] = field(default_factory=dict)
    trouble: BrokerUnavailable | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of Kafka's protocol that speaks of records or their topic and not of the broker's state.

    Attributes:
        reason: what it means.
        final: no later attempt can pass.
        whole_topic: it holds for every record of the topic.
    """

    reason: str
    final: bool = False
    whole_topic: bool = False


REFUSALS: dict[int, Refusal] = {
    2: Refusal("refused as corrupt"),
    3: Refusal("the topic doesn't exist", whole_topic=True),
    10: Refusal("larger than the broker or the topic allows", final=True),
    17: Refusal("no valid topic name", final=True, whole_topic=True),
    18: Refusal("larger than a segment of the topic", final=True),
    29: Refusal("not authorised to write to the topic", whole_topic=True),
    32: Refusal("timestamp out of the topic's range"),
    43: Refusal("format not supported by the topic", final=True),
    44: Refusal("in breach of a policy of the broker"),
    87: Refusal("refused by the broker's check of records", final=True),
}
"""Error codes of Kafka's protocol guide that refuse; every other one is trouble that passes."""


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as its contract declares it.

    Attributes:
        name: the topic's name.
        partitions: number of partitions, fixed at birth.
        replicas: replication factor.
        config: broker-side topic settings, as text.
    """

    name: str
    partitions: int
    replicas: int = 1
    config: Mapping[str, str] = field(default_factory=dict)


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Received:
    """One record as the broker keeps it; nothing in it has been decoded.

    Attributes:
        timestamp_ms: the record's timestamp, milliseconds since 1970 UTC.
        headers: names and values in order.
    """

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def place(self) -> Place:
        """The partition it stands in."""
        return Place(self.topic, self.partition)


def unavailable(address: KafkaAddress, error: BaseException) -> BrokerUnavailable:
    """Return what an error of the client means to those who don't know the client."""
    return BrokerUnavailable(f"{address.bootstrap}: {str(error) or type(error).__name__}")
