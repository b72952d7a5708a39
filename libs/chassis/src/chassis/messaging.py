"""Kafka, and the only module that imports its client.

`Producer.publish` returns when every record is acknowledged by all in-sync replicas, and otherwise raises: there is
no third outcome. Records of one key keep the order in which they were given.
"""

import asyncio
import ssl
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.producer.message_accumulator import BatchBuilder

MAX_BATCH_BYTES: Final = 256 * 1024
_PARTITION: Final = DefaultPartitioner()


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


class Producer:
    """An idempotent producer (acks=all) that sends batches and waits for their acknowledgement.

    Args:
        address: where Kafka is.
        client_id: name shown in the broker's logs.
        ack_timeout: seconds to wait for all acknowledgements of one `publish`.
    """

    def __init__(self, address: KafkaAddress, *, client_id: str, ack_timeout: float = 10.0) -> None:
        self._address = address
        self._client_id = client_id
        self._ack_timeout = ack_timeout
        self._client: AIOKafkaProducer | None = None
        self._starting = asyncio.Lock()

    async def connect(self) -> None:
        """Connect if not connected.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        async with self._starting:
            if self._client is not None:
                return
            client = AIOKafkaProducer(
                **self._address.client_arguments(),
                client_id=self._client_id,
                enable_idempotence=True,
                acks="all",
                linger_ms=0,
                max_batch_size=MAX_BATCH_BYTES,
                max_request_size=1024 * 1024,
            )
            try:
                await client.start()
            except (KafkaError, OSError) as error:
                await client.stop()
                raise BrokerUnavailable(f"{self._address.bootstrap}: {error}") from error
            self._client = client

    async def publish(self, records: Sequence[Record]) -> None:
        """Send records and wait until all are acknowledged.

        A failure closes the connection: the next call gets a new producer, so that one stuck out of sequence can't
        stay so.

        Args:
            records: in the order in which each key's records are to be read.

        Raises:
            BrokerUnavailable: not every record was acknowledged in time; any of them may still have arrived.
        """
        await self.connect()
        client = self._client
        if client is None:
            raise BrokerUnavailable("the connection was closed by a failure of another publish")
        try:
            async with asyncio.timeout(self._ack_timeout):
                await _send_all(client, records)
        except (KafkaError, OSError, TimeoutError) as error:
            await self._discard(client)
            raise BrokerUnavailable(f"{self._address.bootstrap}: {type(error).__name__} {error}") from error

    async def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._client is not None:
            await self._discard(self._client)

    async def _discard(self, client: AIOKafkaProducer) -> None:
        if self._client is client:
            self._client = None
        try:
            async with asyncio.timeout(2):
                await client.stop()
        except (KafkaError, OSError, TimeoutError):
            # stop() waits for batches that a dead broker will never acknowledge; its sender task ends with it.
            await client.client.close()


async def _send_all(client: AIOKafkaProducer, records: Sequence[Record]) -> None:
    open_batches: dict[tuple[str, int], BatchBuilder] = {}
    partitions: dict[str, list[int]] = {}
    acknowledgements: list[asyncio.Future[Any]] = []
    for record in records:
        choices = partitions.get(record.topic)
        if choices is None:
            choices = partitions[record.topic] = sorted(await client.partitions_for(record.topic))
        place = (record.topic, _PARTITION(record.key, choices, choices))
        batch = open_batches.get(place)
        if batch is None or not _append(batch, record):
            if batch is not None:
                acknowledgements.append(await client.send_batch(batch, place[0], partition=place[1]))
            batch = open_batches[place] = client.create_batch()
            _append(batch, record)
    for (topic, partition), batch in open_batches.items():
        acknowledgements.append(await client.send_batch(batch, topic, partition=partition))
    await asyncio.gather(*acknowledgements)


def _append(batch: BatchBuilder, record: Record) -> bool:
    appended = batch.append(timestamp=None, key=record.key, value=record.value, headers=record.headers)
    return appended is not None


async def read_topics(address: KafkaAddress) -> dict[str, int]:
    """Return the partition count of every topic that the broker has.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with _Admin(address) as admin:
        described = await admin.describe_topics()
        return {topic["topic"]: len(topic["partitions"]) for topic in described}


async def require_topics(address: KafkaAddress, names: Collection[str]) -> None:
    """Check that topics exist.

    Raises:
        BrokerUnavailable: no broker answers, or topics are missing (the text names them).
    """
    missing = sorted(set(names) - set(await read_topics(address)))
    if missing:
        raise BrokerUnavailable(f"missing topics: {', '.join(missing)}")


async def create_topics(address: KafkaAddress, specs: Sequence[TopicSpec]) -> list[str]:
    """Create the topics that don't exist yet and return their names; existing ones are left as they are.

    Raises:
        BrokerUnavailable: no broker answers, or it refuses a topic.
    """
    existing = await read_topics(address)
    missing = [spec for spec in specs if spec.name not in existing]
    async with _Admin(address) as admin:
        for spec in missing:
            topic = NewTopic(spec.name, spec.partitions, spec.replicas, topic_configs=dict(spec.config))
            response = await admin.create_topics([topic])
            for name, code, *reason in response.topic_errors:
                if code not in (0, TopicAlreadyExistsError.errno):
                    raise BrokerUnavailable(f"topic {name} was refused: error {code} {reason}")
    return [spec.name for spec in missing]


class _Admin:
    """An administration connection for the length of a block."""

    def __init__(self, address: KafkaAddress) -> None:
        self._address = address
        self._client = AIOKafkaAdminClient(**address.client_arguments())

    async def __aenter__(self) -> AIOKafkaAdminClient:
        try:
            await self._client.start()
        except (KafkaError, OSError) as error:
            await self._client.close()
            raise BrokerUnavailable(f"{self._address.bootstrap}: {error}") from error
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
