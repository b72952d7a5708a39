"""Kafka: what services may use of it. `kafka` is the only module that imports the client library."""

from chassis.messaging.kafka import (
    Producer,
    auto_creates_topics,
    create_topics,
    describe_topics,
    read_topics,
    require_topics,
)
from chassis.messaging.kafka_group import SESSION_SECONDS, GroupReader, read_lag
from chassis.messaging.records import BrokerUnavailable, KafkaAddress, Place, Received, Record, TopicSpec

__all__ = [
    "SESSION_SECONDS",
    "BrokerUnavailable",
    "GroupReader",
    "KafkaAddress",
    "Place",
    "Producer",
    "Received",
    "Record",
    "TopicSpec",
    "auto_creates_topics",
    "create_topics",
    "describe_topics",
    "read_lag",
    "read_topics",
    "require_topics",
]
