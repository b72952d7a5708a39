"""Background loops of a process: started together, restarted when they fail, stopped in good order.

A loop that raises never takes the others down, and a loop that makes no progress makes the process unhealthy: a process
that lives while its loops are dead is the fault this module prevents.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from weakref import WeakSet

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

FIRST_RESTART_DELAY: Final = 0.5
LONGEST_RESTART_DELAY: Final = 15.0
HEALTHY_AFTER: Final = 60.0
LAST_SECONDS: Final = 5.0
log = structlog.get_logger(__name__)


class Stop:
    """A request to stop, which loops look at between units of work and can wait for."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._children: WeakSet[Stop] = WeakSet()

    @property
    def requested(self) -> bool:
        """True once stopping has been asked for."""
        return self._event.is_set()

    def request(self) -> None:
        """Ask every holder of this object to stop, and of its children."""
        self._event.set()
        for child in list(self._children):
            child.request()

    def child(self) -> "Stop":
        """Return a request that can be made by itself and follows this one."""
        child = Stop()
        self._children.add(child)
        if self.requested:
            child.request()
        return child

    async def wait(self, seconds: float) -> bool:
        """Wait until stopping is asked for, `seconds` at most; return whether it was."""
        try:
            async with asyncio.timeout(max(seconds, 0)):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class Heartbeat:
    """When a loop last made progress, by the monotonic clock.

    Args:
        longest_silence: seconds without a beat after which the loop counts as dead.
    """

    def __init__(self, longest_silence: float) -> None:
        self.longest_silence = longest_silence
        self._last = time.monotonic()

    def beat(self) -> None:
        """Note progress."""
        self._last = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the last beat."""
        return time.monotonic() - self._last

    @property
    def alive(self) -> bool:
        """Whether the last beat is recent enough."""
        return self.silence <= self.longest_silence


class Loop(Protocol):
    """One background activity; `run` returns only when stopping was asked for."""

    name: str
    heartbeat: Heartbeat

    async def run(self, stop: Stop) -> None:
        """Work until `stop` is requested; an exception restarts the loop after a delay."""
        ...


@dataclass
class Background:
    """The loops of one process.

    Attributes:
        loops: what runs.
        registry: where restarts (`pin_background_restarts_total{loop}`) and `pin_background_dead_loops` are shown.
        grace: seconds that running work gets at stop before it is cancelled (it then rolls back whole).
    """

    loops: Sequence[Loop]
    registry: CollectorRegistry
    grace: float = 20.0
    _stop: Stop = field(default_factory=Stop, init=False)
    _asked_at: float = field(default=0.0, init=False)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._restarts = Counter(
            "pin_background_restarts_total",
            "Background loops restarted after an error.",
            ["loop"],
            registry=self.registry,
        )
        dead = Gauge("pin_background_dead_loops", "Loops that make no progress.", registry=self.registry)
        dead.set_function(lambda: len(self.dead()))

    def start(self) -> None:
        """Start every loop as a task of the running event loop."""
        for loop in self.loops:
            self._restarts.labels(loop.name)
            self._tasks.append(asyncio.create_task(self._supervise(loop), name=loop.name))

    def ask_to_stop(self) -> None:
        """Ask every loop to stop; what `grace` gives it begins now."""
        self._asked_at = self._asked_at or time.monotonic()
        self._stop.request()

    async def stop(self) -> None:
        """Ask every loop to stop, unless that was done, and wait for them.

        What has not ended `grace` seconds after it was asked is cancelled; LAST_SECONDS more are left to it.
        """
        self.ask_to_stop()
        if not self._tasks:
            return
        left = self._asked_at + self.grace - time.monotonic()
        _, late = await asyncio.wait(self._tasks, timeout=max(left, 0))
        for task in late:
            log.warning("loop cancelled at stop", loop=task.get_name(), grace=self.grace)
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=LAST_SECONDS)

    def dead(self) -> dict[str, float]:
        """Return the loops without progress and their silence in seconds."""
        return {loop.name: loop.heartbeat.silence for loop in self.loops if not loop.heartbeat.alive}

    async def _supervise(self, loop: Loop) -> None:
        delay = FIRST_RESTART_DELAY
        while True:
            started = time.monotonic()
            try:
                await loop.run(self._stop)
                if self._stop.requested:
                    return
                log.error("loop ended by itself", loop=loop.name)
            except asyncio.CancelledError:
                if _is_being_cancelled():
                    raise
                log.exception("loop cancelled from within", loop=loop.name)
            except Exception:
                log.exception("loop failed", loop=loop.name)
            if time.monotonic() - started > HEALTHY_AFTER:
                delay = FIRST_RESTART_DELAY
            self._restarts.labels(loop.name).inc()
            log.warning("loop restarts", loop=loop.name, delay=delay)
            if await self._stop.wait(delay):
                return
            delay = min(delay * 2, LONGEST_RESTART_DELAY)


def _is_being_cancelled() -> bool:
    """Tell a cancellation of this task from a CancelledError that something inside it let out."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
