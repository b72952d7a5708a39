"""Kafka: what services may use of it. `kafka` is the only module that imports the client library."""

from chassis.messaging.kafka import Producer, create_topics, read_topics, require_topics
from chassis.messaging.records import BrokerUnavailable, KafkaAddress, Publication, Record, RecordRefused, TopicSpec

__all__ = [
    "BrokerUnavailable",
    "KafkaAddress",
    "Producer",
    "Publication",
    "Record",
    "RecordRefused",
    "TopicSpec",
    "create_topics",
    "read_topics",
    "require_topics",
]
