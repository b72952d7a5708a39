"""Reading the end of a topic without a group: every reader gets every record, and nothing is committed.

What a producer took back (an aborted transaction) is never read.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, NoOffsetForPartitionError, OffsetOutOfRangeError

from chassis.messaging.kafka.causes import not_connected
from chassis.messaging.records import BrokerUnavailable, KafkaAddress, OffsetsGone, Received, unavailable

LONGEST_START: Final = 30.0
LONGEST_CLOSE: Final = 5.0
log = structlog.get_logger(__name__)


class TailReader:
    """Reads all partitions of a topic from given positions, or from their ends.

    Args:
        address: where Kafka is.
        topic: what to read.
    """

    def __init__(self, address: KafkaAddress, topic: str) -> None:
        self._address = address
        self._topic = topic
        self._client = AIOKafkaConsumer(
            **address.client_arguments(),
            client_id=f"tail-of-{topic}",
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            fetch_max_wait_ms=500,
        )

    async def start(self, positions: Mapping[int, int]) -> dict[int, int]:
        """Connect, and return the offset from which each partition is read.

        Args:
            positions: next offset of each partition that was read before; others are read from their ends.

        Raises:
            BrokerUnavailable: no broker answers, or there is no such topic.
        """
        try:
            async with asyncio.timeout(LONGEST_START):
                await self._client.start()
                await self._client.topics()
                found = self._client.partitions_for_topic(self._topic)
                if not found:
                    raise BrokerUnavailable(f"{self._address.bootstrap}: there is no topic {self._topic}")
                places = [TopicPartition(self._topic, number) for number in sorted(found)]
                ends = await self._client.end_offsets(places)
        except (KafkaError, OSError, TimeoutError) as error:
            raise await not_connected(self._address, error) from error
        self._client.assign(places)
        begun = {place.partition: positions.get(place.partition, ends[place]) for place in places}
        for place in places:
            self._client.seek(place, begun[place.partition])
        return begun

    async def poll(self, seconds: float, limit: int) -> list[Received]:
        """Return the records that arrive within `seconds`, `limit` at most; each partition's in the order of offsets.

        Raises:
            OffsetsGone: what stood at a position is no longer there.
            BrokerUnavailable: the connection is broken.
        """
        try:
            found = await self._client.getmany(timeout_ms=int(seconds * 1000), max_records=limit)
        except (OffsetOutOfRangeError, NoOffsetForPartitionError) as error:
            raise OffsetsGone(str(error)) from error
        except (KafkaError, OSError) as error:
            raise unavailable(self._address, error) from error
        return [
            Received(r.topic, r.partition, r.offset, r.timestamp, r.key, r.value, tuple(r.headers))
            for records in found.values()
            for r in records
        ]

    async def close(self) -> None:
        """Disconnect; bounded in time."""
        try:
            async with asyncio.timeout(LONGEST_CLOSE):
                await self._client.stop()
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("tail not closed in good order", reason=str(error) or type(error).__name__)
