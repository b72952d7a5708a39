"""Membership in a consumer group: raw records out, offsets committed explicitly and per partition, nothing decoded.

What a producer took back (an aborted transaction) is never read.

Every failure of the client is `BrokerUnavailable`: whoever reads closes this reader and makes a new one. A partition
that is taken away is announced before it goes, so that a batch in hand can be finished first.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final

import structlog
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.errors import (
    CommitFailedError,
    IllegalStateError,
    KafkaError,
    RebalanceInProgressError,
)

from chassis.messaging.kafka.causes import not_connected
from chassis.messaging.records import KafkaAddress, Place, Received, unavailable

SESSION_SECONDS: Final = 45
LONGEST_BETWEEN_POLLS: Final = 300
REBALANCE_SECONDS: Final = 30
"""How long the group waits for a member that finishes its batch."""

LONGEST_CLOSE: Final = 5.0
NONE_DECLARED: Final[Mapping[str, Collection[str]]] = MappingProxyType({})
LONGEST_COMMIT: Final = 10.0
log = structlog.get_logger(__name__)


class GroupReader:
    """One member of a consumer group.

    Args:
        address: where Kafka is.
        group: the group's name, `pin.<context>.<consumer>`.
        topics: what to read; topics that don't exist are left out by whoever calls.
        on_revoked: awaited before partitions are given to another member.
        session_seconds: how long the group waits for a sign of life before it gives our partitions away.
    """

    def __init__(
        self,
        address: KafkaAddress,
        group: str,
        topics: Collection[str],
        on_revoked: Callable[[], Awaitable[None]],
        session_seconds: float = SESSION_SECONDS,
    ) -> None:
        self._address = address
        self._client = AIOKafkaConsumer(
            # The coordinator answers a join when the whole group has come, or after the rebalance time-out. Who asks
            # again sooner leaves a member behind that nobody is, and everybody waits for it.
            **address.client_arguments() | {"request_timeout_ms": (REBALANCE_SECONDS + 10) * 1000},
            client_id=group,
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            partition_assignment_strategy=[RangePartitionAssignor],
            session_timeout_ms=int(session_seconds * 1000),
            heartbeat_interval_ms=min(3000, int(session_seconds * 300)),
            max_poll_interval_ms=LONGEST_BETWEEN_POLLS * 1000,
            rebalance_timeout_ms=REBALANCE_SECONDS * 1000,
            fetch_max_wait_ms=500,
        )
        self._client.subscribe(list(topics), listener=_Listener(on_revoked))

    async def start(self) -> None:
        """Join the group, which waits for its other members.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        try:
            await self._client.start()
        except (KafkaError, OSError) as error:
            raise await not_connected(self._address, error) from error

    async def poll(self, seconds: float, limit: int) -> list[Received]:
        """Return the records that arrive within `seconds`, `limit` at most; each partition's in the order of offsets.

        Raises:
            BrokerUnavailable: the membership is broken.
        """
        try:
            found = await self._client.getmany(timeout_ms=int(seconds * 1000), max_records=limit)
        except (KafkaError, OSError) as error:
            raise unavailable(self._address, error) from error
        return [
            Received(
                place.topic,
                place.partition,
                record.offset,
                record.timestamp,
                record.key,
                record.value,
                tuple(record.headers),
            )
            for place, records in found.items()
            for record in records
        ]

    async def acknowledge(self, offsets: Mapping[Place, int]) -> bool:
        """Commit, per partition, the offset of the next record to read.

        Partitions that are no longer ours are left out: their records are read again by their new owner.

        Returns:
            Whether all were committed; if not, records will be read again.

        Raises:
            BrokerUnavailable: the membership is broken.
        """
        assigned = self.assigned()
        ours = {TopicPartition(*place): offset for place, offset in offsets.items() if place in assigned}
        if not ours:
            return not offsets
        try:
            # The library repeats a retriable error for ever, while a rebalance waits for the batch that is committing.
            async with asyncio.timeout(LONGEST_COMMIT):
                await self._client.commit(ours)
        except (CommitFailedError, IllegalStateError, RebalanceInProgressError, TimeoutError) as error:
            log.warning("offsets not committed", reason=type(error).__name__, partitions=len(ours))
            return False
        except (KafkaError, OSError) as error:
            raise unavailable(self._address, error) from error
        return len(ours) == len(offsets)

    def assigned(self) -> set[Place]:
        """Return the partitions that are this member's now."""
        return {Place(place.topic, place.partition) for place in self._client.assignment()}

    def seek(self, place: Place, offset: int) -> None:
        """Read a partition from an offset on; does nothing if it is no longer ours."""
        if place in self.assigned():
            self._client.seek(TopicPartition(*place), offset)

    def pause(self, places: Collection[Place]) -> None:
        """Leave partitions out of `poll` until they are resumed."""
        self._client.pause(*[TopicPartition(*place) for place in places if place in self.assigned()])

    def resume(self, places: Collection[Place]) -> None:
        """Read paused partitions again."""
        self._client.resume(*[TopicPartition(*place) for place in places if place in self.assigned()])

    async def behind(self, seconds: float = 10.0) -> bool:
        """Tell whether a partition that is read has records that have not been delivered.

        Raises:
            BrokerUnavailable: the broker doesn't say.
        """
        reading = self._client.assignment() - self._client.paused()
        if not reading:
            return False
        try:
            async with asyncio.timeout(seconds):
                ends = await self._client.end_offsets(reading)
                return any([await self._client.position(place) < end for place, end in ends.items()])
        except (KafkaError, OSError, TimeoutError) as error:
            raise unavailable(self._address, error) from error

    async def close(self) -> None:
        """Leave the group; bounded in time, whatever the broker does."""
        try:
            async with asyncio.timeout(LONGEST_CLOSE):
                await self._client.stop()
        except (KafkaError, OSError, TimeoutError) as error:
            log.warning("consumer not closed in good order", reason=str(error) or type(error).__name__)
            await self._end()

    async def _end(self) -> None:
        """End what an interrupted stop() leaves behind: the library's background tasks and connections."""
        coordinator, fetcher = self._client._coordinator, self._client._fetcher  # noqa: SLF001
        tasks = [getattr(coordinator, name, None) for name in ("_coordination_task", "_heartbeat_task")]
        tasks += [getattr(fetcher, "_fetch_task", None)]
        for task in tasks:
            if task is not None:
                task.cancel()
        await self._client._client.close()  # noqa: SLF001


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, on_revoked: Callable[[], Awaitable[None]]) -> None:
        self._on_revoked = on_revoked

    async def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        if revoked:
            await self._on_revoked()

    async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        log.info("partitions assigned", partitions=sorted(f"{place.topic}/{place.partition}" for place in assigned))


async def read_lag(
    address: KafkaAddress, prefix: str, declared: Mapping[str, Collection[str]] = NONE_DECLARED
) -> dict[str, dict[Place, int]]:
    """Return how many records each group has not committed yet, per partition.

    Args:
        address: where Kafka is.
        prefix: how the names of the groups begin; the groups may have no living member.
        declared: groups that count even if they never committed anything, with the topics that they read.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    admin = AIOKafkaAdminClient(**address.client_arguments())
    reader = AIOKafkaConsumer(**address.client_arguments(), enable_auto_commit=False)
    try:
        async with asyncio.timeout(30):
            await admin.start()
            await reader.start()
            existing = {name for name, *_ in await admin.list_consumer_groups() if name.startswith(prefix)}
            kept = {name: await admin.list_consumer_group_offsets(name) for name in sorted(existing)}
            offsets = {
                name: {place: entry.offset for place, entry in places.items() if entry.offset >= 0}
                for name, places in kept.items()
            }
            await _add_unread(reader, await admin.describe_topics(), offsets, declared)
            ends = await reader.end_offsets({place for places in offsets.values() for place in places})
    except (KafkaError, OSError, TimeoutError) as error:
        raise await not_connected(address, error) from error
    finally:
        await reader.stop()
        await admin.close()
    return {
        name: {
            Place(place.topic, place.partition): max(0, ends[place] - offset)
            for place, offset in places.items()
            if place in ends
        }
        for name, places in offsets.items()
    }


async def read_overdue(
    address: KafkaAddress, group: str, topics: Collection[str], before: datetime, patience: float = 5.0
) -> dict[Place, bool]:
    """Return for each partition of some topics whether records from before an instant wait there for a group.

    Args:
        address: where Kafka is.
        group: the group's name; one that has committed nothing has read nothing.
        topics: what it reads; a topic that doesn't exist is left out.
        before: records with a timestamp before it count.
        patience: seconds to wait for the broker.

    Raises:
        BrokerUnavailable: no broker answers in time.
    """
    admin = AIOKafkaAdminClient(**address.client_arguments())
    reader = AIOKafkaConsumer(**address.client_arguments(), enable_auto_commit=False)
    try:
        async with asyncio.timeout(patience):
            await admin.start()
            await reader.start()
            sizes = {topic["topic"]: len(topic["partitions"]) for topic in await admin.describe_topics()}
            places = [TopicPartition(topic, number) for topic in topics for number in range(sizes.get(topic, 0))]
            if not places:
                return {}
            known = {name for name, *_ in await admin.list_consumer_groups()}
            kept = await admin.list_consumer_group_offsets(group) if group in known else {}
            starts, ends = await reader.beginning_offsets(places), await reader.end_offsets(places)
            marks = await reader.offsets_for_times(dict.fromkeys(places, int(before.timestamp() * 1000)))
    except (KafkaError, OSError, TimeoutError) as error:
        raise await not_connected(address, error) from error
    finally:
        await reader.stop()
        await admin.close()
    overdue = {}
    for place in places:
        mark = marks.get(place)
        done = max(starts[place], kept[place].offset if place in kept else 0)
        overdue[Place(place.topic, place.partition)] = done < (ends[place] if mark is None else mark.offset)
    return overdue


async def _add_unread(
    reader: AIOKafkaConsumer,
    topics: Sequence[Mapping[str, Any]],
    offsets: dict[str, dict[TopicPartition, int]],
    declared: Mapping[str, Collection[str]],
) -> None:
    """Count the partitions of declared groups that nobody has committed yet from their beginning."""
    sizes = {topic["topic"]: len(topic["partitions"]) for topic in topics}
    missing = {
        name: [
            place
            for topic in wanted
            for place in (TopicPartition(topic, number) for number in range(sizes.get(topic, 0)))
            if place not in offsets.get(name, {})
        ]
        for name, wanted in declared.items()
    }
    if starts := await reader.beginning_offsets({place for places in missing.values() for place in places}):
        for name, places in missing.items():
            offsets.setdefault(name, {}).update({place: starts[place] for place in places})
