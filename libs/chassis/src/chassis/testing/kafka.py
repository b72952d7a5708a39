"""Which broker tests and the development stack run on, and a reader of topics that shares no code with the services.

`PIN_KAFKA` chooses: unset or `embedded`, `apache` (fetched from Maven Central), or `host:port` of any cluster.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, cast
from uuid import uuid4

import orjson
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, KafkaException, TopicPartition
from confluent_kafka import Message as RawMessage

from chassis.testing.apache_kafka import ApacheKafka, KafkaUnavailable, fetch
from chassis.testing.processes import CannotStart, accepts_connections
from chassis.testing.servers import EmbeddedBroker

CHOICE: Final = "PIN_KAFKA"


def cache_folder(root: Path) -> Path:
    """Return the folder of fetched software of a checkout."""
    return root / ".pin" / "cache"


@dataclass(frozen=True, slots=True)
class Event:
    """One record as a foreign consumer sees it."""

    topic: str
    partition: int
    offset: int
    key: str
    headers: dict[str, str]
    value: bytes

    @property
    def type(self) -> str:
        """`ce_type`."""
        return self.headers.get("ce_type", "")

    @property
    def id(self) -> str:
        """`ce_id`."""
        return self.headers.get("ce_id", "")

    @property
    def payload(self) -> Any:
        """The value, parsed."""
        return orjson.loads(self.value)


@dataclass
class RunningBroker:
    """A broker to use; `kind` says which, `stop` ends it if it is ours.

    Attributes:
        bootstrap: `host:port` for clients.
        kind: embedded, apache or external.
    """

    bootstrap: str
    kind: str
    server: EmbeddedBroker | ApacheKafka | None = None

    @classmethod
    def start(cls, home: Path, cache: Path, *, port: int | None = None, choice: str | None = None) -> Self:
        """Start the broker that `PIN_KAFKA` asks for, or connect to the one it names.

        Args:
            home: folder for its data.
            cache: folder for fetched software.
            port: loopback port for a broker of ours; a free one if None.
            choice: in place of the environment variable.

        Raises:
            CannotStart: it can't be had (the text is one line).
        """
        wanted = choice or os.environ.get(CHOICE, "") or "embedded"
        if wanted == "embedded":
            embedded = EmbeddedBroker.start(home, port=port)
            return cls(embedded.bootstrap, "embedded", embedded)
        if wanted == "apache":
            try:
                apache = ApacheKafka.start(home, lib_dir=fetch(cache), port=port)
            except KafkaUnavailable as error:
                raise CannotStart(str(error)) from error
            return cls(apache.bootstrap, "apache", apache)
        host, _, port_text = wanted.rpartition(":")
        if not host or not port_text.isdigit() or not accepts_connections(int(port_text), host):
            raise CannotStart(f"PIN_KAFKA is embedded, apache or host:port of a broker that answers, not {wanted!r}")
        return cls(wanted, "external")

    def stop(self) -> None:
        """Stop the broker if this process started it."""
        if self.server is not None:
            self.server.stop()


@dataclass
class TopicReader:
    """Reads topics with librdkafka, without a consumer group.

    Args:
        bootstrap: `host:port`.
        topics: what to read.
        from_beginning: from the first record, or only what comes after this reader was made.
    """

    bootstrap: str
    topics: Sequence[str]
    from_beginning: bool = True
    seen: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": f"reader-{uuid4()}",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
                "topic.metadata.refresh.interval.ms": 1000,
                "log_level": 0,
            }
        )
        start = OFFSET_BEGINNING if self.from_beginning else OFFSET_END
        partitions = []
        for topic in self.topics:
            described = self._consumer.list_topics(topic, timeout=10).topics[topic]
            for number in described.partitions:
                offset = start
                if not self.from_beginning:
                    offset = self._consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=10)[1]
                partitions.append(TopicPartition(topic, number, offset))
        self._consumer.assign(partitions)

    def poll(self, seconds: float) -> list[Event]:
        """Return the events that arrive within `seconds`, at the latest when the first ones did."""
        first = self._consumer.poll(seconds)
        if first is None:
            return []
        events = [_event(message) for message in (first, *self._consumer.consume(num_messages=1000, timeout=0))]
        self.seen += events
        return events

    def until(self, enough: Callable[[list[Event]], bool], seconds: float = 20.0) -> list[Event]:
        """Read until `enough(all events seen)` is true.

        Raises:
            AssertionError: it didn't become true in time (the text says what was seen).
        """
        deadline = time.monotonic() + seconds
        while not enough(self.seen):
            left = deadline - time.monotonic()
            assert left > 0, f"not seen within {seconds} s; {len(self.seen)} events of {self.topics} were"
            self.poll(min(left, 0.2))
        return self.seen

    def close(self) -> None:
        """Close the connection."""
        self._consumer.close()


def _event(message: RawMessage) -> Event:
    if message.error() is not None:
        raise KafkaException(message.error())
    pairs = cast("list[tuple[str, bytes | None]]", message.headers() or [])
    return Event(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        (message.key() or b"").decode(),
        {name: (value or b"").decode() for name, value in pairs},
        message.value() or b"",
    )
