"""The poll loop of one consumer: read a batch, take it through, commit its offsets, and show progress or be replaced.

Offsets are committed only after the database has committed. A broken membership is closed and made anew; one that
delivers nothing although records wait counts as broken. Nothing here gives up: backoff, then again.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import structlog

from chassis.consumers.batches import Batches, Waiting
from chassis.consumers.handling import Handling
from chassis.messaging import (
    SESSION_SECONDS,
    BrokerUnavailable,
    GroupReader,
    KafkaAddress,
    Place,
    Received,
    read_topics,
)
from chassis.runtime import Heartbeat, Stop

POLL_SECONDS: Final = 1.0
FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 10.0
LONGEST_STALL: Final = 30.0
"""Seconds without a record after which the broker is asked whether some wait."""

LOOK_FOR_TOPICS: Final = 15.0
JOIN_SECONDS: Final = 120.0
PAUSE_SECONDS: Final = 15.0
REVOCATION_SECONDS: Final = 25.0
"""How long partitions are held back for the batch in hand; below the group's rebalance time-out."""

log = structlog.get_logger(__name__)


class ConsumerLoop:
    """Reads one consumer's topics until stopped.

    Args:
        handling: of the consumer.
        address: where Kafka is.
        session_seconds: how soon a dead member's partitions go to another one.
    """

    def __init__(self, handling: Handling, address: KafkaAddress, session_seconds: float = SESSION_SECONDS) -> None:
        self.consumer = handling.consumer
        self.name = f"consumer {self.consumer.group}"
        self.heartbeat = Heartbeat(longest_silence=240.0)
        self._batches = Batches(handling)
        self._address = address
        self._session_seconds = session_seconds
        self._metrics = handling.metrics
        self._working = asyncio.Lock()
        self._turn = Stop()
        self._paused: dict[Place, float] = {}

    async def run(self, stop: Stop) -> None:
        """Consume until stopped; what is away is waited for with growing, jittered pauses."""
        backoff = FIRST_BACKOFF
        while not stop.requested:
            started = time.monotonic()
            try:
                await self._consume(stop)
            except BrokerUnavailable as error:
                if time.monotonic() - started > LONGEST_BACKOFF * 3:
                    backoff = FIRST_BACKOFF
                backoff = await self._wait(error, backoff, stop)

    async def _wait(self, error: Exception, backoff: float, stop: Stop) -> float:
        """Wait out what is away; return how long to wait the next time."""
        log.warning("consumer waits", consumer=self.consumer.group, reason=str(error)[:300], backoff=backoff)
        self.heartbeat.beat()
        await stop.wait(backoff * random.uniform(0.5, 1.5))  # noqa: S311 - jitter, not a secret
        return min(backoff * 2, LONGEST_BACKOFF)

    async def _consume(self, stop: Stop) -> None:
        topics = await self._topics_there_are(stop)
        if not topics:
            return
        look_again = time.monotonic() + LOOK_FOR_TOPICS
        async with self._member(topics, stop) as reader:
            arrived, backoff = time.monotonic(), FIRST_BACKOFF
            while not stop.requested:
                records = await reader.poll(POLL_SECONDS, self.consumer.batch_size)
                self._show(reader)
                now = time.monotonic()
                if records:
                    arrived = now
                    try:
                        await self._take(reader, records, stop)
                        backoff = FIRST_BACKOFF
                    except Waiting as error:
                        backoff = await self._wait(error, backoff, stop)
                elif now - arrived > LONGEST_STALL:
                    if await reader.behind():
                        raise BrokerUnavailable("records wait and none is delivered")
                    arrived = now
                if topics != self.consumer.topics and now > look_again:
                    if topics != await self._existing():
                        return
                    look_again = now + LOOK_FOR_TOPICS

    async def _take(self, reader: GroupReader, records: list[Received], stop: Stop) -> None:
        """Take a batch through; on trouble nothing of it is committed and it is read again.

        The membership is kept while the database is away: leaving would only move the trouble to another member.
        """
        async with self._working:
            assigned = reader.assigned()
            ours = [record for record in records if record.place in assigned]
            self._turn = stop.child()
            if not ours:
                return
            try:
                progress = await self._batches.take(ours, self._turn)
            except Waiting:
                for record in reversed(ours):
                    reader.seek(record.place, record.offset)
                raise
            for place in progress.behind:
                reader.seek(place, progress.commit[place])
            self._pause(reader, progress.full)
            await reader.acknowledge(progress.commit)

    def _pause(self, reader: GroupReader, full: frozenset[Place]) -> None:
        for place in full:
            log.error("partition paused", consumer=self.consumer.group, topic=place.topic, partition=place.partition)
            self._paused[place] = time.monotonic() + PAUSE_SECONDS
        reader.pause(full)

    def _show(self, reader: GroupReader) -> None:
        """Note progress, and read partitions again whose pause is over."""
        self.heartbeat.beat()
        over = [place for place, until in self._paused.items() if until < time.monotonic()]
        for place in over:
            del self._paused[place]
        reader.resume(over)
        self._metrics.assigned.labels(self.consumer.group).set(len(reader.assigned()))
        self._metrics.paused.labels(self.consumer.group).set(len(self._paused))

    @asynccontextmanager
    async def _member(self, topics: frozenset[str], stop: Stop) -> AsyncIterator[GroupReader]:
        reader = GroupReader(self._address, self.consumer.group, topics, self._finish_batch, self._session_seconds)
        try:
            await self._joined(reader, stop)
            yield reader
        finally:
            self._paused.clear()
            self._metrics.assigned.labels(self.consumer.group).set(0)
            self._metrics.paused.labels(self.consumer.group).set(0)
            await reader.close()

    async def _joined(self, reader: GroupReader, stop: Stop) -> None:
        """Join the group, which may have to wait for other members; a stop doesn't wait for them."""
        joining = asyncio.ensure_future(reader.start())
        stopping = asyncio.ensure_future(stop.wait(JOIN_SECONDS))
        await asyncio.wait((joining, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if joining.done():
            joining.result()
            return
        joining.cancel()
        await asyncio.wait((joining,))
        raise BrokerUnavailable("the group was not joined")

    async def _finish_batch(self) -> None:
        """Let the batch in hand commit before its partitions go to another member; what fails is left to that one."""
        self._turn.request()
        try:
            async with asyncio.timeout(REVOCATION_SECONDS), self._working:
                return
        except TimeoutError:
            log.warning("partitions revoked within a batch", consumer=self.consumer.group)

    async def _existing(self) -> frozenset[str]:
        return self.consumer.topics & frozenset(await read_topics(self._address))

    async def _topics_there_are(self, stop: Stop) -> frozenset[str]:
        """Return those of the topics that exist; a missing one never keeps the others from being read."""
        existing = await self._existing()
        if missing := self.consumer.topics - existing:
            log.error("topics missing", consumer=self.consumer.group, missing=sorted(missing))
        if not existing:
            self.heartbeat.beat()
            await stop.wait(LOOK_FOR_TOPICS / 3)
        return existing
