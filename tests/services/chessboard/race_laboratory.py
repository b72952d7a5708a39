"""Interleavings made on purpose: actors on a real database that go on only when they are told to.

An actor is code of the service on a `Stepwise` database: it halts before each of its transactions begins and again
before it commits, and in between it may wait for another's lock, as the server says. `explore` plays every order in
which they can go on. A schedule is a list of names, one for each step; played again it gives the same run.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import SYSTEM, Actor, Database

Schedule = tuple[str, ...]
Act = Callable[[Database], Awaitable[None]]
_LOOK_EVERY = 0.003
_IS_BLOCKED = (
    "select exists (select from pg_locks l join pg_stat_activity a on a.pid = l.pid"
    " where a.application_name = $1 and a.datname = current_database() and not l.granted)"
)


class Stepwise(Database):
    """A database whose write sessions halt before they open and before they commit."""

    def __init__(self, url: str, name: str, halt: Callable[[str], Awaitable[None]]) -> None:
        super().__init__(url, application_name=name, pool_size=1)
        self._halt = halt

    @asynccontextmanager
    async def write(self, actor: Actor = SYSTEM) -> AsyncIterator[AsyncSession]:
        """Open a session as `Database.write`, with two halts."""
        await self._halt("begin")
        async with super().write(actor) as session:
            yield session
            await self._halt("commit")


class Stepper:
    """One actor of a schedule."""

    def __init__(self, name: str, act: Act, url: str) -> None:
        self.name = name
        self.at: str | None = None
        self._settled, self._go = asyncio.Event(), asyncio.Event()
        self.database = Stepwise(url, f"lab {name}", self._halt)
        self.task = asyncio.create_task(self._run(act))

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self.task.done()

    def go(self) -> None:
        """Let it go on to its next halt, or to its end."""
        self.at = None
        self._settled.clear()
        self._go.set()

    async def settle(self, looks: asyncpg.Connection) -> None:
        """Wait until it halts, has ended, or waits for a lock that another actor holds."""
        async with asyncio.timeout(30):
            while not (self.is_done or self.at):
                waiting = asyncio.ensure_future(self._settled.wait())
                await asyncio.wait({waiting, self.task}, timeout=_LOOK_EVERY, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if not self.is_done and not self.at and await looks.fetchval(_IS_BLOCKED, f"lab {self.name}"):
                    return

    async def _halt(self, where: str) -> None:
        self.at = where
        self._go.clear()
        self._settled.set()
        await self._go.wait()

    async def _run(self, act: Act) -> None:
        try:
            await act(self.database)
        finally:
            await self.database.close()


@dataclass
class Played:
    """One schedule as it went.

    Attributes:
        choices: who went on at each step.
        possible: who could have, at each step.
        blocked: how often an actor waited for a lock.
    """

    choices: list[str] = field(default_factory=list)
    possible: list[list[str]] = field(default_factory=list)
    blocked: int = 0

    @property
    def schedule(self) -> Schedule:
        """What `play` takes to do it again."""
        return tuple(self.choices)


async def play(actors: Mapping[str, Act], url: str, looks: asyncpg.Connection, schedule: Sequence[str] = ()) -> Played:
    """Run actors step by step as a schedule says, and from its end on in the order in which they are given.

    Args:
        actors: what each does with its own database; what it raises is raised here.
        url: the database's address.
        looks: a connection that sees who waits.
        schedule: whose turn it is, step by step.

    Raises:
        LookupError: the schedule names an actor that can't go on at that step.
    """
    played = Played()
    steppers = {name: Stepper(name, act, url) for name, act in actors.items()}
    try:
        while True:
            for stepper in steppers.values():
                await stepper.settle(looks)
            ready = [name for name, stepper in steppers.items() if stepper.at and not stepper.is_done]
            played.blocked += sum(not stepper.at and not stepper.is_done for stepper in steppers.values())
            if not ready:
                break
            step = len(played.choices)
            chosen = schedule[step] if step < len(schedule) else ready[0]
            if chosen not in ready:
                raise LookupError(f"{chosen} can't go on at step {step}; {', '.join(ready)} can")
            played.possible.append(ready)
            played.choices.append(chosen)
            steppers[chosen].go()
        for stepper in steppers.values():
            await asyncio.wait_for(stepper.task, 10)
    finally:
        for stepper in steppers.values():
            stepper.task.cancel()
        await asyncio.gather(*(stepper.task for stepper in steppers.values()), return_exceptions=True)
    return played


async def explore(run: Callable[[Schedule], Awaitable[Played]]) -> list[Played]:
    """Call `run` once for each schedule that is possible, each on a scene of its own, and return all of them."""
    done: list[Played] = []
    open_prefixes: list[Schedule] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        played = await run(prefix)
        done.append(played)
        for step in itertools.islice(range(len(played.choices)), len(prefix), None):
            others = [name for name in played.possible[step] if name != played.choices[step]]
            open_prefixes += [(*played.choices[:step], other) for other in others]
    return done
