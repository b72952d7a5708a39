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
        security: plaintext or ssl; settings refuse plaintext outside development.
    """

    bootstrap: str
    security: str = "plaintext"

    def client_arguments(self) -> dict[str, Any]:
        """Return the connection arguments that every client of the library takes."""
        arguments: dict[str, Any] = {
            "bootstrap_servers": self.bootstrap,
            "security_protocol": self.security.upper(),
            "request_timeout_ms": 10_000,
        }
        if self.security == "ssl":
            arguments["ssl_context"] = ssl.create_default_context()
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
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def place(self) -> Place:
        """The partition it stands in."""
        return Place(self.topic, self.partition)
