"""A proxy between Kafka clients and a broker that delays, cuts, swallows and forges; for tests of what a producer does.

Clients learn the broker's address from its Metadata answers, so the proxy puts its own port in place of the broker's.
"""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

HOST: Final = "127.0.0.1"
PRODUCE: Final = 0
INIT_PRODUCER_ID: Final = 22


class Fate(Enum):
    """What becomes of a request."""

    PASS = auto()
    SWALLOW_ANSWER = auto()  # the broker acts on it, the client's connection is cut instead of an answer
    CUT = auto()  # the broker never sees it
    HANG = auto()  # the broker never sees it and the client waits


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it passes."""

    api: int
    version: int
    correlation: int
    frame: bytes

    @property
    def produced(self) -> list[tuple[str, int]]:
        """Topic and partition of each batch of a Produce request (versions 3 to 8)."""
        view = _Reader(self.frame, 8)
        view.text()
        view.text()
        view.skip(6)
        found = []
        for _ in range(view.int32()):
            topic = view.text()
            for _ in range(view.int32()):
                found.append((topic, view.int32()))
                view.skip(view.int32())
        return found

    def refusal(self, code: int) -> bytes:
        """Return the Produce answer (version 5 to 7) that refuses every batch with an error code."""
        body = struct.pack(">ii", self.correlation, len(self.produced))
        for topic, partition in self.produced:
            name = topic.encode()
            body += struct.pack(f">h{len(name)}si", len(name), name, 1)
            body += struct.pack(">ihqqq", partition, code, -1, -1, -1)
        return body + struct.pack(">i", 0)


class _Reader:
    def __init__(self, data: bytes, position: int) -> None:
        self._data = data
        self._at = position

    def int32(self) -> int:
        value: int = struct.unpack_from(">i", self._data, self._at)[0]
        self._at += 4
        return value

    def text(self) -> str:
        (size,) = struct.unpack_from(">h", self._data, self._at)
        self._at += 2 + max(size, 0)
        return self._data[self._at - max(size, 0) : self._at].decode()

    def skip(self, count: int) -> None:
        self._at += count


@dataclass
class KafkaProxy:
    """A running proxy.

    Attributes:
        upstream: the broker's port.
        port: the proxy's port.
        delay: longest delay of a frame, in seconds, each way.
        judge: decides about each request; bytes are sent to the client in place of the broker's answer.
        chance: where delays come from.
        requests: how many requests of each API have passed.
        connections: what is open: the tasks that carry it, each with its two ends.
    """

    upstream: int
    port: int = 0
    delay: float = 0.0
    judge: Callable[[Request], Fate | bytes] = lambda _: Fate.PASS
    chance: random.Random = field(default_factory=lambda: random.Random(20261130))
    requests: dict[int, int] = field(default_factory=dict)
    connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = field(default_factory=dict)

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self.port}"

    async def serve(self, client: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        """Carry one client's connection until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self.connections[task] = [answers]
        try:
            with contextlib.suppress(OSError):
                broker, requests = await asyncio.open_connection(HOST, self.upstream)
                self.connections[task].append(requests)
                await self._carry(client, requests, broker, answers)
        finally:
            for end in self.connections.pop(task):
                end.close()

    async def close(self) -> None:
        """End every connection."""
        for ends in self.connections.values():
            for end in ends:
                end.close()
        if self.connections:
            await asyncio.wait(self.connections)

    async def _carry(
        self,
        client: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
        broker: asyncio.StreamReader,
        answers: asyncio.StreamWriter,
    ) -> None:
        swallow: set[int] = set()
        pumps = [
            asyncio.ensure_future(self._requests(client, requests, answers, swallow)),
            asyncio.ensure_future(self._answers(broker, answers, swallow)),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)

    async def _requests(
        self,
        client: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
        answers: asyncio.StreamWriter,
        swallow: set[int],
    ) -> None:
        while (frame := await _frame(client)) is not None:
            request = Request(*struct.unpack_from(">hhi", frame), frame)
            self.requests[request.api] = self.requests.get(request.api, 0) + 1
            fate = self.judge(request)
            await self._pause()
            if isinstance(fate, bytes):
                answers.write(struct.pack(">i", len(fate)) + fate)
                continue
            if fate is Fate.CUT:
                return
            if fate is Fate.HANG:
                continue
            if fate is Fate.SWALLOW_ANSWER:
                swallow.add(request.correlation)
            requests.write(struct.pack(">i", len(frame)) + frame)
            await requests.drain()

    async def _answers(self, broker: asyncio.StreamReader, answers: asyncio.StreamWriter, swallow: set[int]) -> None:
        real, ours = (HOST.encode() + struct.pack(">i", port) for port in (self.upstream, self.port))
        while (frame := await _frame(broker)) is not None:
            if struct.unpack_from(">i", frame)[0] in swallow:
                return
            await self._pause()
            answers.write(struct.pack(">i", len(frame)) + frame.replace(real, ours))
            await answers.drain()

    async def _pause(self) -> None:
        if self.delay:
            await asyncio.sleep(self.chance.uniform(0, self.delay))


async def _frame(stream: asyncio.StreamReader) -> bytes | None:
    try:
        (size,) = struct.unpack(">i", await stream.readexactly(4))
        return await stream.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None


@asynccontextmanager
async def kafka_proxy(upstream: int) -> AsyncIterator[KafkaProxy]:
    """Run a proxy in front of a broker on loopback for the length of a block."""
    proxy = KafkaProxy(upstream)
    server = await asyncio.start_server(proxy.serve, HOST, 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
