"""A driver's book: its runs recorded, orders read, misfires claimed, each in a short transaction of its own.

Nothing here can break a cycle: a database that refuses or is away costs the record and nothing else.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, TypeVar
from uuid import UUID

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock
from chassis.db import DATABASE_ERRORS, Database
from chassis.ids import new_id
from chassis.job_records import SEEN_EVERY, Ending, JobRecords, Pause, Trigger, short_error

PRUNE_EVERY: Final = 50
Answer = TypeVar("Answer")
Missed = Callable[[datetime | None, datetime], int]
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """A run that this process has taken for itself, recorded already: nobody else does it."""

    run_id: UUID
    as_of: datetime


@dataclass(frozen=True, slots=True)
class Start:
    """What a driver finds when it starts.

    Attributes:
        missed: ticks since the last run.
        since: seconds since the last run began.
        claim: the one run that makes up for them, if this process got it.
        running: whether a cycle runs elsewhere, so that ticks were skipped for it and not missed.
    """

    missed: int = 0
    since: float = 0.0
    claim: Claim | None = None
    running: bool = False


class JobBook:
    """The book of one job in one process.

    Args:
        name: the job's name.
        database: the service's database under its system role.
        clock: the process's clock.
        records: the tables; None: there are none, and nothing is recorded or obeyed.
        missed: how many ticks have passed since a run began.
        makes_up: whether missed ticks are made up for by one run.
    """

    def __init__(
        self, name: str, database: Database, clock: Clock, records: JobRecords | None, missed: Missed, *, makes_up: bool
    ) -> None:
        self._name = name
        self._database = database
        self._clock = clock
        self._records = records
        self._missed = missed
        self._makes_up = makes_up
        self._pause: Pause | None = None
        self._runs = 0

    @property
    def is_kept(self) -> bool:
        """Whether there is anything to look at."""
        return self._records is not None

    async def start(self) -> Start:
        """Close the runs of dead processes, count what was missed, claim the run that makes up for it."""
        return await self._kept(self._start) or Start()

    async def find_pause(self) -> Pause | None:
        """Return the job's pause; the last one read while the orders can't be read."""
        await self._kept(self._read_pause)
        return self._pause

    async def look(self) -> Trigger | Claim | None:
        """Return what a resting driver has to do: a run that people want, or one that died and is made up for."""
        return await self._kept(self._look)

    @asynccontextmanager
    async def recording(self, run_id: UUID, as_of: datetime, trigger: Trigger | Claim) -> AsyncIterator["Page"]:
        """Record a cycle: its begin (unless it was claimed), signs of life, its end.

        The instants are reckoned from `as_of`, the one look at the clock that a cycle takes.
        """
        started = time.perf_counter()

        def now() -> datetime:
            return as_of + timedelta(seconds=time.perf_counter() - started)

        if not isinstance(trigger, Claim):
            await self._kept(lambda records: self._begin(records, run_id, as_of, trigger))
        page = Page()
        try:
            async with self._alive(run_id, now):
                yield page
        except Exception as failure:
            failed = Ending("failed", {}, short_error(failure))
            await self._kept(lambda records: self._finish(records, run_id, now(), failed))
            raise
        await self._kept(lambda records: self._finish(records, run_id, now(), page.ending))

    async def _kept(self, act: Callable[[JobRecords], Awaitable[Answer]]) -> Answer | None:
        if self._records is None:
            return None
        try:
            return await act(self._records)
        except DATABASE_ERRORS as error:
            log.warning("job not recorded", job=self._name, reason=str(error)[:300])
            return None

    async def _start(self, records: JobRecords) -> Start:
        async with self._database.write() as session:
            await records.lock(session, self._name)
            now = await self._clock.now(session)
            await self._close_abandoned(records, session, now)
            last = await records.find_last_started(session, self._name)
            if last is None:
                return Start()
            missed = self._missed(last, now)
            running = await records.is_running(session, self._name, now)
            claim = await self._claim(records, session, now) if missed and not running else None
            return Start(missed, (now - last).total_seconds(), claim, running)

    async def _claim(self, records: JobRecords, session: AsyncSession, now: datetime) -> Claim | None:
        if not self._makes_up or await records.find_pause(session, self._name):
            return None
        claim = Claim(new_id(), now)
        await records.begin(session, claim.run_id, self._name, "misfire", now)
        return claim

    async def _look(self, records: JobRecords) -> Trigger | Claim | None:
        async with self._database.write() as session:
            if await records.take_request(session, self._name):
                return "manual"
            now = await self._clock.now(session)
            if not await self._close_abandoned(records, session, now):
                return None
            await records.lock(session, self._name)
            last = await records.find_last_started(session, self._name)
            return await self._claim(records, session, now) if self._missed(last, now) else None

    async def _close_abandoned(self, records: JobRecords, session: AsyncSession, now: datetime) -> bool:
        abandoned = await records.abandon(session, self._name, now)
        if abandoned:
            log.error("run abandoned", job=self._name, runs=[str(run_id) for run_id in abandoned])
        return bool(abandoned)

    async def _read_pause(self, records: JobRecords) -> None:
        async with self._database.read() as session:
            self._pause = await records.find_pause(session, self._name)

    async def _begin(self, records: JobRecords, run_id: UUID, as_of: datetime, trigger: Trigger) -> None:
        self._runs += 1
        async with self._database.write() as session:
            await records.begin(session, run_id, self._name, trigger, as_of)
            if self._runs % PRUNE_EVERY == 1:
                await records.prune(session, self._name)

    @asynccontextmanager
    async def _alive(self, run_id: UUID, now: Callable[[], datetime]) -> AsyncIterator[None]:
        """Give signs of life while the block runs."""
        if self._records is None:
            yield
            return
        signalling = asyncio.create_task(self._signal(run_id, now))
        try:
            yield
        finally:
            signalling.cancel()
            await asyncio.wait([signalling])

    async def _signal(self, run_id: UUID, now: Callable[[], datetime]) -> None:
        while True:
            await asyncio.sleep(SEEN_EVERY)
            await self._kept(lambda records: self._renew(records, run_id, now()))

    async def _renew(self, records: JobRecords, run_id: UUID, now: datetime) -> None:
        async with self._database.write() as session:
            await records.renew(session, run_id, now)

    async def _finish(self, records: JobRecords, run_id: UUID, now: datetime, ending: Ending) -> None:
        async with self._database.write() as session:
            await records.finish(session, run_id, now, ending)


@dataclass
class Page:
    """The page of a run that is being recorded; who runs it writes the ending."""

    ending: Ending = field(default_factory=lambda: Ending("ok", {}))
