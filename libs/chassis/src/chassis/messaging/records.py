"""The words of messaging: addresses, records, topics and errors; nothing here knows the client library."""

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class BrokerUnavailable(Exception):
    """Kafka could not be reached, or did not acknowledge in time; nothing is known about the records."""


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
                context.load_cert_chain(self.cert_file, self.key_file)
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
    headers: tuple[tuple[str, bytes], ...]

    @property
    def place(self) -> Place:
        """The partition it stands in."""
        return Place(self.topic, self.partition)
