"""The real Apache Kafka (4.x, KRaft, one combined node) for tests, benchmarks and fault tests.

The jars come from Maven Central through `mvn`; the broker runs on `java` 17 or newer, on loopback ports
only, with its data, configuration, log and pid file in one folder. Everything here is synchronous and
needs no Kafka client::

    lib = fetch(Path(".cache"))
    with ApacheKafka.start(tmp_path / "kafka", lib_dir=lib) as kafka:
        producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)

Whatever keeps the broker from running is a :class:`KafkaUnavailable`, whose text is one line fit for a
skip message. For development and tests only: TLS and authentication are
there where a test asks for listeners that have them.
"""

from chassis.testing.apache_kafka.jars import KAFKA_VERSION, LOG4J_VERSION, KafkaUnavailable, fetch, find_java
from chassis.testing.apache_kafka.server import ApacheKafka

__all__ = ["KAFKA_VERSION", "LOG4J_VERSION", "ApacheKafka", "KafkaUnavailable", "fetch", "find_java"]
