"""Kafka, and the only module that imports its client.

`Producer.publish` returns when every record is acknowledged by all in-sync replicas, and otherwise raises: there is
no third outcome. Records of one key keep the order in which they were given.
"""

import asyncio
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, ProducerClosed, TopicAlreadyExistsError
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.producer.message_accumulator import BatchBuilder

from chassis.messaging.records import BrokerUnavailable, KafkaAddress, Record, TopicSpec

MAX_BATCH_BYTES: Final = 256 * 1024
LONGEST_CLOSE: Final = 1.0
_AUTO_CREATE: Final = "auto.create.topics.enable"
_PARTITION: Final = DefaultPartitioner()
log = structlog.get_logger(__name__)


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
            BrokerUnavailable: no broker answers in time.
        """
        await self._connected()

    async def publish(self, records: Sequence[Record]) -> None:
        """Send records and wait until all are acknowledged.

        A failure closes the connection: the next call gets a new producer, so that one stuck out of sequence can't
        stay so.

        Args:
            records: in the order in which each key's records are to be read.

        Raises:
            BrokerUnavailable: not every record was acknowledged in time; any of them may still have arrived.
        """
        client: AIOKafkaProducer | None = None
        try:
            async with asyncio.timeout(self._ack_timeout):
                client = await self._connected()
                await _send_all(client, records)
        except (KafkaError, OSError, TimeoutError) as error:
            if client is not None:
                await self._discard(client)
            raise _unavailable(self._address, error) from error

    async def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._client is not None:
            await self._discard(self._client)

    async def _connected(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._client is not None:
                return self._client
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
                async with asyncio.timeout(self._ack_timeout):
                    await client.start()
                self._client = client
            except (KafkaError, OSError, TimeoutError) as error:
                raise _unavailable(self._address, error) from error
            finally:
                if self._client is None:
                    await _end(client)
            return client

    async def _discard(self, client: AIOKafkaProducer) -> None:
        if self._client is client:
            self._client = None
            await _end(client)


async def _end(client: AIOKafkaProducer) -> None:
    """Close a client within seconds and leave none of its tasks behind, whatever the broker does.

    The library's own stop() sends what is still queued, retries for ever while nobody answers, and once it is
    interrupted leaves tasks that connect and send again. Therefore its inner parts are ended one by one: the sender,
    the connections (which fails the requests that wait for an answer), the wait for metadata that no one will bring
    any more, and at last the batches.
    """
    sender: asyncio.Task[None] | None = client._sender.sender_task  # noqa: SLF001
    if sender is not None:
        sender.cancel()
    await client.client.close()
    deadline = time.monotonic() + LONGEST_CLOSE
    while sender is not None and not sender.done() and time.monotonic() < deadline:
        awaited: asyncio.Future[bool] | None = client.client._md_update_fut  # noqa: SLF001
        if awaited is not None and not awaited.done():
            awaited.set_result(False)
        await asyncio.wait([sender], timeout=0.02)
    if sender is not None:
        sender.cancel()
    client._message_accumulator.fail_all(ProducerClosed())  # noqa: SLF001
    try:
        async with asyncio.timeout(LONGEST_CLOSE):
            await client.stop()
    except (KafkaError, OSError, TimeoutError):
        log.warning("producer not closed in good order")


async def _send_all(client: AIOKafkaProducer, records: Sequence[Record]) -> None:
    queues: dict[tuple[str, int], list[BatchBuilder]] = {}
    partitions: dict[str, list[int]] = {}
    for record in records:
        choices = partitions.get(record.topic)
        if choices is None:
            choices = partitions[record.topic] = sorted(await client.partitions_for(record.topic))
        batches = queues.setdefault((record.topic, _PARTITION(record.key, choices, choices)), [])
        if not batches or not _append(batches[-1], record):
            batches.append(client.create_batch())
            _append(batches[-1], record)
    sending = [asyncio.ensure_future(_send_in_order(client, *place, batches)) for place, batches in queues.items()]
    try:
        await asyncio.gather(*sending)
    finally:
        for task in sending:
            task.cancel()


async def _send_in_order(client: AIOKafkaProducer, topic: str, partition: int, batches: Sequence[BatchBuilder]) -> None:
    """Send a partition's batches one after the other.

    A batch that was queued behind one that the broker refuses would be taken (a broker that doesn't know the producer
    yet accepts any sequence number), and its records would stand before those that are sent again.
    """
    for batch in batches:
        await (await client.send_batch(batch, topic, partition=partition))


def _append(batch: BatchBuilder, record: Record) -> bool:
    appended = batch.append(timestamp=None, key=record.key, value=record.value, headers=record.headers)
    return appended is not None


def _unavailable(address: KafkaAddress, error: BaseException) -> BrokerUnavailable:
    return BrokerUnavailable(f"{address.bootstrap}: {str(error) or type(error).__name__}")


async def read_topics(address: KafkaAddress) -> dict[str, int]:
    """Return the partition count of every topic that the broker has.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with _Admin(address) as admin:
        described = await admin.describe_topics()
        return {topic["topic"]: len(topic["partitions"]) for topic in described}


async def describe_topics(address: KafkaAddress, settings: Collection[str]) -> dict[str, TopicSpec]:
    """Return every topic that the broker has, as it is.

    Args:
        address: where Kafka is.
        settings: names of the topic settings to ask for; none asks for none.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with _Admin(address) as admin:
        found = {topic["topic"]: topic["partitions"] for topic in await admin.describe_topics()}
        configs = await _settings(admin, ConfigResourceType.TOPIC, found, settings)
        return {
            name: TopicSpec(
                name,
                len(partitions),
                min((len(partition["replicas"]) for partition in partitions), default=0),
                configs.get(name, {}),
            )
            for name, partitions in found.items()
        }


async def auto_creates_topics(address: KafkaAddress) -> bool:
    """Return whether a broker makes a topic of any name that somebody asks for.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    async with _Admin(address) as admin:
        brokers = [str(broker["node_id"]) for broker in (await admin.describe_cluster())["brokers"]]
        configs = await _settings(admin, ConfigResourceType.BROKER, brokers, [_AUTO_CREATE])
        return any(config.get(_AUTO_CREATE) == "true" for config in configs.values())


async def _settings(
    admin: AIOKafkaAdminClient, kind: ConfigResourceType, names: Iterable[str], settings: Collection[str]
) -> dict[str, dict[str, str]]:
    if not settings:
        return {}
    resources = [ConfigResource(kind, name, dict.fromkeys(settings)) for name in names]
    answers = [answer.to_object() for answer in await admin.describe_configs(resources)] if resources else []
    return {
        resource["resource_name"]: {
            entry["config_names"]: entry["config_value"]
            for entry in resource["config_entries"]
            if entry["config_names"] in settings
        }
        for answer in answers
        for resource in answer["resources"]
    }


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
    created: list[str] = []
    async with _Admin(address) as admin:
        for spec in specs:
            if spec.name in existing:
                continue
            topic = NewTopic(spec.name, spec.partitions, spec.replicas, topic_configs=dict(spec.config))
            response = await admin.create_topics([topic])
            for name, code, *reason in response.topic_errors:
                if code == 0:
                    created.append(name)
                elif code != TopicAlreadyExistsError.errno:
                    raise BrokerUnavailable(f"topic {name} was refused: error {code} {reason}")
    return created


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
            raise _unavailable(self._address, error) from error
        return self._client

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._client.close()
        if isinstance(error, KafkaError):
            raise _unavailable(self._address, error) from error
