"""The producer.

`Producer.deliver` says of each record whether all in-sync replicas have it, whether it was refused for its own sake, or
that nothing is known; `Producer.publish` raises unless all have arrived. Records of one key keep the order in which
they were given, and none passes one of its key that was refused.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final
from weakref import WeakSet

import structlog
from aiokafka import AIOKafkaProducer
from aiokafka.errors import (
    BrokerResponseError,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerClosed,
    TopicAuthorizationFailedError,
    UnknownTopicOrPartitionError,
    kafka_errors,
)
from aiokafka.partitioner import DefaultPartitioner
from aiokafka.producer.message_accumulator import BatchBuilder

from chassis.messaging.delivery import MAX_RECORD_BYTES, MOST_REFUSALS, Delivery, Queue
from chassis.messaging.kafka.causes import not_connected
from chassis.messaging.records import (
    REFUSALS,
    KafkaAddress,
    Publication,
    Record,
    Refusal,
    unavailable,
)

MAX_BATCH_BYTES: Final = 256 * 1024
SMALLEST_BATCH_BYTES: Final = 16 * 1024
LONGEST_CLOSE: Final = 1.0
LONGEST_LOOKUP: Final = 1.0
"""Seconds to wait for a topic that the broker doesn't know, and for which it is then taken not to exist."""
_PARTITION: Final = DefaultPartitioner()
log = structlog.get_logger(__name__)


class InvalidRecord(BrokerResponseError):  # type: ignore[misc]  # the library has no types
    """The broker's check of a record failed; a code that the client library doesn't know."""

    errno = 87
    message = "INVALID_RECORD"


_INTERRUPTIONS: Final = (ProducerClosed, OutOfOrderSequenceNumber)
kafka_errors.setdefault(InvalidRecord.errno, InvalidRecord)


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
        self._ended_by_refusal: WeakSet[AIOKafkaProducer] = WeakSet()
        self._missing: dict[str, float] = {}
        self._batch_bytes: dict[str, int] = {}

    async def connect(self) -> None:
        """Connect if not connected.

        Raises:
            BrokerUnavailable: no broker answers in time.
        """
        await self._connected()

    async def publish(self, records: Sequence[Record]) -> None:
        """Send records and wait until all are acknowledged.

        Args:
            records: in the order in which each key's records are to be read.

        Raises:
            BrokerUnavailable: not every record was acknowledged in time; any of them may still have arrived.
            RecordRefused: a record was refused, the first if several were; those of other keys have arrived.
        """
        publication = await self.deliver(records)
        if publication.trouble is not None:
            raise publication.trouble
        for at in sorted(publication.refused):
            raise publication.refused[at]

    async def deliver(self, records: Sequence[Record]) -> Publication:
        """Send records and say what became of each.

        A failure closes the connection: the next call gets a new producer, so that one stuck out of sequence can't
        stay so. What of a refused batch is at fault is found by sending ever smaller parts of it.

        Args:
            records: in the order in which each key's records are to be read.

        Raises:
            BrokerUnavailable: no broker answers; nothing was sent.
        """
        delivery = Delivery(records)
        delivery.refuse_oversize()
        try:
            async with asyncio.timeout(self._ack_timeout):
                await self._deliver(delivery)
        except (KafkaError, OSError, TimeoutError) as error:
            delivery.publication.trouble = unavailable(self._address, error)
            delivery.publication.trouble.__cause__ = error
        return delivery.publication

    async def _deliver(self, delivery: Delivery) -> None:
        """Send over the shared connection, once more if another's refusal ended it; then look into what was refused."""
        for last in (False, True):
            client = await self._connected()
            queues = await self._send_all(client, delivery)
            for queue in queues:
                if _refusal(queue.error) is not None:
                    await self._isolate(delivery, queue)
            trouble = [queue.error for queue in queues if queue.error is not None]
            if not trouble:
                return
            interrupted = client in self._ended_by_refusal and isinstance(trouble[0], _INTERRUPTIONS)
            if last or not interrupted:
                raise trouble[0]

    async def _send_all(self, client: AIOKafkaProducer, delivery: Delivery) -> list[Queue]:
        """Send what is left, topics and partitions at once; a refused request leaves a gap in its partition's sequence
        numbers, so the connection ends with it, as it does with any other failure.
        """
        topics: dict[str, list[int]] = {}
        for at in delivery.left():
            topics.setdefault(delivery.records[at].topic, []).append(at)
        queues: list[Queue] = []
        sound = False
        try:
            await _together([self._send_topic(client, delivery, *topic, queues) for topic in topics.items()])
            sound = all(queue.error is None for queue in queues)
        finally:
            if not sound:
                if any(_refusal(queue.error) for queue in queues):
                    self._ended_by_refusal.add(client)
                await self._discard(client)
        return queues

    async def _send_topic(
        self, client: AIOKafkaProducer, delivery: Delivery, topic: str, positions: list[int], queues: list[Queue]
    ) -> None:
        try:
            choices = await self._partitions(client, topic)
        except (UnknownTopicOrPartitionError, TopicAuthorizationFailedError) as error:
            delivery.refuse_all(Queue(topic, -1, positions), REFUSALS[error.errno])
            return
        places: dict[int, Queue] = {}
        for at in positions:
            partition = _place(delivery.records[at].key, choices)
            places.setdefault(partition, Queue(topic, partition)).rest.append(at)
        queues += places.values()
        await _together([_send_in_order(client, delivery, queue, self._most_bytes(topic)) for queue in places.values()])

    async def _partitions(self, client: AIOKafkaProducer, topic: str) -> tuple[int, ...]:
        """Return a topic's partitions.

        Raises:
            UnknownTopicOrPartitionError: brokers answer, and none knows the topic.
        """
        if time.monotonic() - self._missing.get(topic, -LONGEST_LOOKUP) < LONGEST_LOOKUP:
            raise UnknownTopicOrPartitionError
        try:
            async with asyncio.timeout(min(LONGEST_LOOKUP, self._ack_timeout / 2)):
                return tuple(sorted(await client.partitions_for(topic)))
        except TimeoutError as error:
            known = (await client.client.fetch_all_metadata()).partitions_for_topic(topic)
            if known:
                return tuple(sorted(known))
            self._missing[topic] = time.monotonic()
            raise UnknownTopicOrPartitionError from error

    async def _isolate(self, delivery: Delivery, queue: Queue) -> None:
        """Send a partition whose request was refused in smaller parts, over a connection that nobody shares."""
        client: AIOKafkaProducer | None = None
        try:
            while (refusal := _refusal(queue.error)) is not None:
                if queue.sent > 1 and refusal.reason == REFUSALS[MessageSizeTooLargeError.errno].reason:
                    self._batch_bytes[queue.topic] = max(SMALLEST_BATCH_BYTES, self._most_bytes(queue.topic) // 2)
                delivery.narrow(queue, refusal)
                if queue.refusals > MOST_REFUSALS:
                    return
                queue.error = None
                if queue.rest:
                    if client is not None:
                        await _end(client)
                    client = await self._started()
                    await _send_in_order(client, delivery, queue, self._most_bytes(queue.topic))
        finally:
            if client is not None:
                await _end(client)

    def _most_bytes(self, topic: str) -> int:
        return self._batch_bytes.get(topic, MAX_BATCH_BYTES)

    async def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._client is not None:
            await self._discard(self._client)

    async def _connected(self) -> AIOKafkaProducer:
        async with self._starting:
            if self._client is None:
                self._client = await self._started()
            return self._client

    async def _started(self) -> AIOKafkaProducer:
        client = AIOKafkaProducer(
            **self._address.client_arguments(),
            client_id=self._client_id,
            enable_idempotence=True,
            acks="all",
            linger_ms=0,
            max_batch_size=MAX_BATCH_BYTES,
            max_request_size=MAX_RECORD_BYTES,
        )
        started = False
        try:
            async with asyncio.timeout(self._ack_timeout):
                await client.start()
            started = True
        except (KafkaError, OSError, TimeoutError) as error:
            raise await not_connected(self._address, error) from error
        finally:
            if not started:
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


async def _together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first that raises ends the others."""
    if len(coroutines) == 1:
        return await coroutines[0]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    return None


async def _send_in_order(client: AIOKafkaProducer, delivery: Delivery, queue: Queue, most_bytes: int) -> None:
    """Send a partition's batches one after the other, until one fails.

    A batch that was queued behind one that the broker refuses would be taken (a broker that doesn't know the producer
    yet accepts any sequence number), and its records would stand before those that are sent again.
    """
    while queue.rest:
        batch, queue.sent = _batch(client, delivery.next_of(queue), most_bytes)
        if not queue.sent:
            return
        try:
            acknowledged = await client.send_batch(batch, queue.topic, partition=queue.partition)
            acknowledged.add_done_callback(_seen)
            await acknowledged
        except KafkaError as error:
            queue.error = error
            return
        delivery.acknowledge(queue, queue.sent)


def _seen(acknowledged: "asyncio.Future[Any]") -> None:
    """Look at an outcome that nobody may wait for any more, or Python reports it as an error of its own."""
    if not acknowledged.cancelled():
        acknowledged.exception()


def _batch(client: AIOKafkaProducer, records: Iterable[Record], most_bytes: int) -> tuple[BatchBuilder, int]:
    """Return a batch of as many records as fit, at least one, and their number."""
    batch = client.create_batch()
    count = size = 0
    for record in records:
        if size > most_bytes:
            break
        appended = batch.append(timestamp=None, key=record.key, value=record.value, headers=record.headers)
        if appended is None:
            break
        count += 1
        size += appended.size
    return batch, count


@lru_cache(maxsize=16384)
def _place(key: bytes, choices: tuple[int, ...]) -> int:
    """Return the partition of a key, as every client of Kafka computes it; the library's hash is slow Python."""
    partition: int = _PARTITION(key, choices, choices)
    return partition


def partition_of(key: bytes, partitions: Collection[int]) -> int:
    """Return the partition of a topic in which the records of a key stand.

    Args:
        key: the records' key.
        partitions: the numbers of the topic's partitions.
    """
    return _place(key, tuple(sorted(partitions)))


def _refusal(error: Exception | None) -> Refusal | None:
    return REFUSALS.get(error.errno) if isinstance(error, BrokerResponseError) else None
