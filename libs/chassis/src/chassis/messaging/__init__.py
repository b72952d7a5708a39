"""Kafka: what services may use of it. Only the modules of `kafka` import the client library."""

from chassis.messaging.kafka.group import SESSION_SECONDS, GroupReader, read_lag, read_overdue
from chassis.messaging.kafka.producer import Producer, partition_of
from chassis.messaging.kafka.tail import TailReader
from chassis.messaging.kafka.topics import (
    auto_creates_topics,
    create_topics,
    describe_topics,
    read_topics,
    require_topics,
)
from chassis.messaging.records import (
    BrokerUnavailable,
    KafkaAddress,
    OffsetsGone,
    Place,
    Publication,
    Received,
    Record,
    RecordRefused,
    TopicSpec,
)

__all__ = [
    "SESSION_SECONDS",
    "BrokerUnavailable",
    "GroupReader",
    "KafkaAddress",
    "OffsetsGone",
    "Place",
    "Producer",
    "Publication",
    "Received",
    "Record",
    "RecordRefused",
    "TailReader",
    "TopicSpec",
    "auto_creates_topics",
    "create_topics",
    "describe_topics",
    "partition_of",
    "read_lag",
    "read_overdue",
    "read_topics",
    "require_topics",
]
