"""Kafka: what services may use of it. `kafka` is the only module that imports the client library."""

from chassis.messaging.kafka import (
    Producer,
    auto_creates_topics,
    create_topics,
    describe_topics,
    read_topics,
    require_topics,
)
from chassis.messaging.records import BrokerUnavailable, KafkaAddress, Record, TopicSpec

__all__ = [
    "BrokerUnavailable",
    "KafkaAddress",
    "Producer",
    "Record",
    "TopicSpec",
    "auto_creates_topics",
    "create_topics",
    "describe_topics",
    "read_topics",
    "require_topics",
]
