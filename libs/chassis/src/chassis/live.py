"""What happens now, for people who watch: a process tails a topic and hands each event to those whom it concerns.

Everybody sees the events of an audience in their order, each once, or is told to read anew (`resync`): who comes back
with a position that the ring no longer covers, and who reads so slowly that its buffer is full. Nobody waits for a slow
reader. An event's id is the position in all partitions after it.
"""

import asyncio
import re
from collections import Counter as Count
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from chassis.messaging import BrokerUnavailable, KafkaAddress, OffsetsGone, Received, TailReader
from chassis.runtime import Heartbeat, Stop

RING: Final = 10_000
"""Events kept for those who come back."""

BUFFER: Final = 256
"""Events that wait for one reader."""

MOST_STREAMS: Final = 1000
MOST_OF_ONE: Final = 20
HEARTBEAT_SECONDS: Final = 15.0
RETRY_MS: Final = 2000
"""After which a client that lost its stream opens another one."""

POLL_SECONDS: Final = 0.5
AFTER_TROUBLE: Final = 1.0
_BATCH: Final = 500
_POSITION: Final = re.compile(r"[0-9]{1,5}:[0-9]{1,18}(?:,[0-9]{1,5}:[0-9]{1,18})*")
log = structlog.get_logger(__name__)


class StreamUnavailable(Exception):
    """The process doesn't know yet what happens now; try again in a moment."""


class TooManyStreams(Exception):
    """The caller, or all callers together, have as many streams open as the process takes."""


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """An event as watchers get it.

    Attributes:
        audience: whom it concerns; equal for those who get the same events.
        name: of its kind.
        data: one line of JSON.
    """

    audience: Hashable
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    partition: int
    offset: int
    event: LiveEvent


class Subscription:
    """One watcher: what waits for it, and whether it must read anew.

    Args:
        position: returns the position up to which the process has read.
        size: events that may wait.
        first: what is sent first.
    """

    def __init__(self, position: Callable[[], str], size: int, first: bytes = b"") -> None:
        self._position = position
        self._size = size
        self._waiting: deque[bytes] = deque()
        self._first = first
        self._resync = False
        self._end = asyncio.Event()
        self._news = asyncio.Event()

    def give(self, *frames: bytes) -> bool:
        """Let frames wait; return False if they are too many, which tells the watcher to read anew."""
        if len(self._waiting) + len(frames) > self._size:
            self.resync()
            return False
        self._waiting.extend(frames)
        self._news.set()
        return True

    def resync(self) -> None:
        """Tell the watcher to read anew; what waits is worth nothing then."""
        self._waiting.clear()
        self._resync = True
        self._news.set()

    def end(self) -> None:
        """End the stream."""
        self._end.set()
        self._news.set()

    async def ended(self) -> None:
        """Wait for the end."""
        await self._end.wait()

    async def next(self, seconds: float = HEARTBEAT_SECONDS) -> bytes | None:
        """Return what is to be sent now, waiting for it; after `seconds` a heartbeat; None at the end.

        A heartbeat is a comment, and an id by which a watcher of a quiet audience stays up to date.
        """
        if not (self._first or self._waiting or self._resync or self._end.is_set()):
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                return f": heartbeat\nid: {self._position()}\n\n".encode()
        if self._end.is_set():
            return None
        parts = [self._first, *self._waiting]
        self._first = b""
        self._waiting.clear()
        if self._resync:
            self._resync = False
            parts = [parts[0], _frame("resync", b"{}", self._position())]
        return b"".join(parts)


class LiveTail:
    """Tails a topic and feeds the watchers of this process.

    Args:
        address: where Kafka is.
        topic: what to tail.
        read: returns the event of a record, or None if nobody watches for such; raises ValueError, TypeError,
            LookupError or AttributeError for what it can't read.
        registry: where `pin_live_streams` and the counters are registered.
        ring: events kept for those who come back.
        buffer: events that may wait for one watcher.
    """

    name = "live tail"

    def __init__(
        self,
        address: KafkaAddress,
        topic: str,
        read: Callable[[Received], LiveEvent | None],
        registry: CollectorRegistry,
        ring: int = RING,
        buffer: int = BUFFER,
    ) -> None:
        self.heartbeat = Heartbeat(longest_silence=120.0)
        self._address, self._topic, self._read = address, topic, read
        self._size, self._buffer = ring, buffer
        self._ring: deque[_Kept] = deque()
        self._next: dict[int, int] = {}
        self._floor: dict[int, int] = {}
        self._watchers: dict[Hashable, set[Subscription]] = {}
        self._owners: Count[Hashable] = Count()
        self._gap = False
        self._stopped = False
        streams = Gauge("pin_live_streams", "Streams of live events that are open.", registry=registry)
        streams.set_function(self._owners.total)
        self._resyncs = Counter("pin_live_resyncs_total", "Watchers told to read anew.", ["reason"], registry=registry)
        for reason in ("too-old", "too-slow", "gap"):
            self._resyncs.labels(reason)
        self._unreadable = Counter(
            "pin_live_unreadable_total", "Records of the tailed topic that could not be read.", registry=registry
        )

    @property
    def streams(self) -> int:
        """How many streams are open."""
        return self._owners.total()

    def position(self) -> str:
        """Return up to where the process has read, as an event's id says it."""
        return _position(self._next)

    def check(self, owner: Hashable) -> None:
        """Check that a stream may be opened.

        Args:
            owner: who opens it.

        Raises:
            StreamUnavailable: the topic hasn't been reached since the process began, or the process stops.
            TooManyStreams: its owner, or all of them, have too many.
        """
        if not self._next or self._stopped:
            raise StreamUnavailable("live events can't be had at the moment")
        if self._owners[owner] >= MOST_OF_ONE:
            raise TooManyStreams(f"a caller may have {MOST_OF_ONE} streams open")
        if self.streams >= MOST_STREAMS:
            raise TooManyStreams("too many streams are open")

    @contextmanager
    def watching(self, owner: Hashable, audience: Hashable, seen: str | None) -> Iterator[Subscription]:
        """Watch an audience's events for the length of a block.

        Args:
            owner: who watches.
            audience: whose events.
            seen: id of the last event that the watcher has; None: it begins now.
        """
        watcher = Subscription(self.position, self._buffer, f"retry: {RETRY_MS}\n\n".encode())
        if seen is None:
            watcher.give(f"id: {self.position()}\n\n".encode())
        else:
            missed = self._missed(audience, seen)
            if missed is None or not watcher.give(*missed):
                self._resyncs.labels("too-old").inc()
                watcher.resync()
        if self._stopped:
            watcher.end()
        self._owners[owner] += 1
        self._watchers.setdefault(audience, set()).add(watcher)
        try:
            yield watcher
        finally:
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]
            self._watchers[audience].discard(watcher)
            if not self._watchers[audience]:
                del self._watchers[audience]

    async def run(self, stop: Stop) -> None:
        """Tail until stopped; then all streams end at once. While the broker is away they stay open and quiet."""
        self._stopped = stop.requested
        ending = asyncio.create_task(self._end_with(stop))
        try:
            while not stop.requested:
                self.heartbeat.beat()
                await self._follow(stop)
        finally:
            ending.cancel()
            await asyncio.wait([ending])
            self._end()

    async def _follow(self, stop: Stop) -> None:
        reader = TailReader(self._address, self._topic)
        try:
            begun = await reader.start(self._next)
            self._floor = {number: self._floor.get(number, offset) for number, offset in begun.items()}
            self._next = begun
            self._tell_of_a_gap()
            while not stop.requested:
                self.heartbeat.beat()
                for record in await reader.poll(POLL_SECONDS, _BATCH):
                    self.take(record)
        except OffsetsGone as error:
            log.warning("live events lost", topic=self._topic, reason=str(error)[:300])
            self._begin_anew()
        except BrokerUnavailable as error:
            log.warning("live events not read", topic=self._topic, reason=str(error)[:300])
            await stop.wait(AFTER_TROUBLE)
        finally:
            await reader.close()

    def take(self, record: Received) -> None:
        """Hand a record's event to those whom it concerns, and keep it for those who come back."""
        self._next[record.partition] = record.offset + 1
        try:
            event = self._read(record)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            self._unreadable.inc()
            log.warning("live event not readable", partition=record.partition, offset=record.offset, error=str(error))
            return
        if event is None:
            return
        self._ring.append(_Kept(record.partition, record.offset, event))
        if len(self._ring) > self._size:
            gone = self._ring.popleft()
            self._floor[gone.partition] = gone.offset + 1
        watchers = self._watchers.get(event.audience)
        if watchers:
            frame = _frame(event.name, event.data, self.position())
            for watcher in watchers:
                if not watcher.give(frame):
                    self._resyncs.labels("too-slow").inc()

    def _missed(self, audience: Hashable, seen: str) -> list[bytes] | None:
        """Return the frames since a position; None if the ring doesn't cover it."""
        known = _parse(seen)
        if known.keys() != self._next.keys():
            return None
        if any(not self._floor[number] <= offset <= self._next[number] for number, offset in known.items()):
            return None
        frames = []
        for kept in self._ring:
            if kept.offset >= known[kept.partition]:
                known[kept.partition] = kept.offset + 1
                if kept.event.audience == audience:
                    frames.append(_frame(kept.event.name, kept.event.data, _position(known)))
        return frames

    def _begin_anew(self) -> None:
        self._ring.clear()
        self._next, self._floor, self._gap = {}, {}, True

    def _tell_of_a_gap(self) -> None:
        """Let all read anew, now that nothing will be missed after it."""
        if self._gap:
            self._gap = False
            for watcher in self._all():
                watcher.resync()
                self._resyncs.labels("gap").inc()

    def _all(self) -> Iterator[Subscription]:
        for watchers in self._watchers.values():
            yield from watchers

    async def _end_with(self, stop: Stop) -> None:
        while not await stop.wait(3600):
            pass
        self._end()

    def _end(self) -> None:
        self._stopped = True
        for watcher in self._all():
            watcher.end()


def _frame(name: str, data: bytes, position: str) -> bytes:
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (position.encode(), name.encode(), data)


def _position(following: Mapping[int, int]) -> str:
    return ",".join(f"{number}:{offset}" for number, offset in sorted(following.items()))


def _parse(position: str) -> dict[int, int]:
    if not _POSITION.fullmatch(position):
        return {}
    pairs = (pair.split(":") for pair in position.split(","))
    return {int(number): int(offset) for number, offset in pairs}
