"""A consumer that shares no code with the services: librdkafka reads, the CloudEvents SDK decodes."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.kafka import KafkaMessage, from_kafka
from cloudevents.core.formats.json import JSONFormat
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event as it arrived.

    Attributes:
        event: decoded by the SDK.
        payload: its data.
        at: unix time of arrival, seconds.
    """

    event: BaseCloudEvent
    payload: dict[str, Any]
    at: float


@dataclass
class Watcher:
    """Reads topics in a thread of its own and keeps what arrives."""

    bootstrap: str
    topics: Sequence[str]
    arrivals: list[Arrival] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def of_type(self, kind: str) -> list[Arrival]:
        """Return what has arrived of one `ce_type`."""
        return [arrival for arrival in list(self.arrivals) if arrival.event.get_type() == kind]

    def _run(self) -> None:
        settings = {
            "bootstrap.servers": self.bootstrap,
            "group.id": f"demo-{uuid4()}",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
        consumer = Consumer(settings)
        described = consumer.list_topics(timeout=10).topics
        consumer.assign(
            [
                TopicPartition(topic, number, OFFSET_BEGINNING)
                for topic in self.topics
                for number in described[topic].partitions
            ]
        )
        form = JSONFormat()
        while not self._stop.is_set():
            first = consumer.poll(0.1)
            for message in [first, *consumer.consume(500, timeout=0)] if first else []:
                self._take(message, form, time.time())
        consumer.close()

    def _take(self, message: Any, form: JSONFormat, at: float) -> None:
        if message.error():
            self.trouble.append(str(message.error()))
            return
        raw = KafkaMessage(headers=dict(message.headers() or []), key=message.key(), value=message.value())
        try:
            event = from_kafka(raw, form)
        except (ValueError, KeyError, TypeError) as error:
            self.trouble.append(f"{message.topic()}@{message.offset()}: {error}")
            return
        data = event.get_data()
        self.arrivals.append(Arrival(event, data if isinstance(data, dict) else {}, at))
