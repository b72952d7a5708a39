"""What is remembered of jobs: the control row that people write, and one record per run.

Both live in the database, so that every process of a service obeys the same pause, a requested run happens once, and
a run whose process died is seen by whoever looks next: a running cycle renews `seen_at`, a dead one doesn't.
"""

import os
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

import asyncpg
import orjson
from sqlalchemy import CheckConstraint, Column, DateTime, Index, MetaData, Table, Text, Uuid, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection

Trigger = Literal["schedule", "manual", "cli", "misfire"]
Result = Literal["ok", "failed", "stopped"]
SEEN_EVERY: Final = 20.0
"""Seconds between two signs of life of a running cycle."""

ABANDONED_AFTER: Final = timedelta(seconds=90)
"""A run without finish that has given no sign of life for so long belongs to a process that is dead."""

KEPT_RUNS: Final = 2000
"""Newest runs of a job that are kept."""

MOST_DELETED: Final = 500


def job_control_table(metadata: MetaData) -> Table:
    """Return the table of what people have ordered: one row per job that was ever paused or started by hand."""
    return Table(
        "job_control",
        metadata,
        Column("name", Text, primary_key=True),
        Column("paused_at", DateTime(timezone=True)),
        Column("paused_by", Text),
        Column("pause_reason", Text),
        Column("run_requested_at", DateTime(timezone=True)),
        Column("run_requested_by", Text),
        CheckConstraint("(paused_at is null) = (paused_by is null)", name="ck_paused_by_somebody"),
    )


def job_run_table(metadata: MetaData) -> Table:
    """Return the table of runs."""
    return Table(
        "job_run",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("name", Text, nullable=False),
        Column("trigger", Text, nullable=False),
        Column("as_of", DateTime(timezone=True), nullable=False),
        Column("started_at", DateTime(timezone=True), nullable=False),
        Column("seen_at", DateTime(timezone=True), nullable=False),
        Column("finished_at", DateTime(timezone=True)),
        Column("result", Text),
        Column("counts", JSONB, nullable=False),
        Column("error", Text),
        Column("process", Text, nullable=False),
        CheckConstraint("trigger in ('schedule', 'manual', 'cli', 'misfire')", name="ck_trigger_known"),
        CheckConstraint("result in ('ok', 'failed', 'stopped', 'abandoned')", name="ck_result_known"),
        CheckConstraint("(finished_at is null) = (result is null)", name="ck_finished_with_result"),
        Index("ix_job_run_name_id", "name", "id"),
        Index("ix_job_run_unfinished", "name", "seen_at", postgresql_where=text("finished_at is null")),
    )


@dataclass(frozen=True, slots=True)
class Pause:
    """Since when a job is paused, by whom and why."""

    at: datetime
    by: str
    reason: str | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: its result, its counts, and the short text of its error."""

    result: Result
    counts: dict[str, int]
    error: str | None = None


_PAUSED = (
    "select paused_at, paused_by, pause_reason from {schema}.job_control where name = $1 and paused_at is not null"
)
_PAUSE = """
insert into {schema}.job_control as c (name, paused_at, paused_by, pause_reason) values ($1, $2, $3, $4)
on conflict (name) do update set paused_at = excluded.paused_at, paused_by = excluded.paused_by,
  pause_reason = excluded.pause_reason, run_requested_at = null, run_requested_by = null
where c.paused_at is null returning name
"""
_RESUME = """
update {schema}.job_control set paused_at = null, paused_by = null, pause_reason = null
where name = $1 and paused_at is not null returning name
"""
_REQUEST = """
insert into {schema}.job_control as c (name, run_requested_at, run_requested_by) values ($1, $2, $3)
on conflict (name) do update set run_requested_at = excluded.run_requested_at,
  run_requested_by = excluded.run_requested_by
where c.paused_at is null and c.run_requested_at is null returning name
"""
_TAKE = """
update {schema}.job_control set run_requested_at = null, run_requested_by = null
where name = $1 and run_requested_at is not null and paused_at is null returning name
"""
_LOCK = "select pg_advisory_xact_lock(hashtext('{schema}.job_run'), hashtext($1))"
_BEGIN = """
insert into {schema}.job_run (id, name, trigger, as_of, started_at, seen_at, counts, process)
values ($1, $2, $3, $4, $4, $4, '{{}}', $5)
"""
_SEEN = "update {schema}.job_run set seen_at = $2 where id = $1 and finished_at is null"
_FINISH = "update {schema}.job_run set finished_at = $2, result = $3, counts = $4::jsonb, error = $5 where id = $1"
_ABANDON = """
update {schema}.job_run set finished_at = $3, result = 'abandoned', error = $4
where name = $1 and finished_at is null and seen_at < $2 returning id
"""
_PRUNE = """
delete from {schema}.job_run where id in (
  select id from {schema}.job_run where name = $1 order by id desc offset $2 limit $3)
"""
_LAST_STARTED = """
select started_at from {schema}.job_run
where name = $1 and (result is null or result in ('ok', 'failed')) order by id desc limit 1
"""
_IS_RUNNING = "select exists (select from {schema}.job_run where name = $1 and finished_at is null and seen_at >= $2)"
_OVERVIEW = """
select n.name, c.paused_at, c.paused_by, c.pause_reason, c.run_requested_at, c.run_requested_by,
  r.id, r.trigger, r.started_at, r.finished_at, r.result, r.counts::text as counts, r.error, r.process,
  exists (select from {schema}.job_run u where u.name = n.name and u.finished_at is null and u.seen_at >= $2)
    as running,
  (select max(started_at) from {schema}.job_run s where s.name = n.name and s.trigger in ('schedule', 'misfire'))
    as ticked_at
from unnest($1::text[]) with ordinality as n(name, place)
left join {schema}.job_control c on c.name = n.name
left join lateral (select * from {schema}.job_run j where j.name = n.name order by j.id desc limit 1) as r on true
order by n.place
"""


class JobRecords:
    """Reads and writes the control and the runs of one service's jobs, each in the caller's transaction.

    Args:
        schema: the service's schema.
    """

    def __init__(self, schema: str) -> None:
        self.process = f"{socket.gethostname()}/{os.getpid()}"
        self._schema = schema

    def _sql(self, statement: str) -> str:
        return statement.format(schema=self._schema)

    async def find_pause(self, session: AsyncSession, name: str) -> Pause | None:
        """Return a job's pause, or None."""
        row = await (await driver_connection(session)).fetchrow(self._sql(_PAUSED), name)
        return Pause(row["paused_at"], row["paused_by"], row["pause_reason"]) if row else None

    async def pause(self, session: AsyncSession, name: str, now: datetime, by: str, reason: str) -> bool:
        """Pause a job and drop a run that was asked for; False if it is paused already (the first pause stands)."""
        return await self._changed(session, _PAUSE, name, now, by, reason)

    async def resume(self, session: AsyncSession, name: str) -> bool:
        """End a job's pause; False if there is none."""
        return await self._changed(session, _RESUME, name)

    async def request_run(self, session: AsyncSession, name: str, now: datetime, by: str) -> bool:
        """Ask for a run as soon as a driver rests; False if the job is paused or a run is asked for already."""
        return await self._changed(session, _REQUEST, name, now, by)

    async def take_request(self, session: AsyncSession, name: str) -> bool:
        """Take a run that was asked for; of all processes one gets True."""
        return await self._changed(session, _TAKE, name)

    async def lock(self, session: AsyncSession, name: str) -> None:
        """Let one transaction at a time decide about a job's missed ticks."""
        await (await driver_connection(session)).execute(self._sql(_LOCK), name)

    async def begin(self, session: AsyncSession, run_id: UUID, name: str, trigger: Trigger, as_of: datetime) -> None:
        """Record that a run has begun."""
        connection = await driver_connection(session)
        await connection.execute(self._sql(_BEGIN), run_id, name, trigger, as_of, self.process)

    async def renew(self, session: AsyncSession, run_id: UUID, now: datetime) -> None:
        """Record a sign of life of a running cycle."""
        await (await driver_connection(session)).execute(self._sql(_SEEN), run_id, now)

    async def finish(self, session: AsyncSession, run_id: UUID, now: datetime, ending: Ending) -> None:
        """Record how a run ended."""
        connection = await driver_connection(session)
        counts = orjson.dumps(ending.counts).decode()
        await connection.execute(self._sql(_FINISH), run_id, now, ending.result, counts, ending.error)

    async def abandon(self, session: AsyncSession, name: str, now: datetime) -> list[UUID]:
        """Close the runs of dead processes and return their ids; of all processes one gets each."""
        connection = await driver_connection(session)
        said = f"no sign of life for {ABANDONED_AFTER.total_seconds():.0f} s; closed by {self.process}"
        rows = await connection.fetch(self._sql(_ABANDON), name, now - ABANDONED_AFTER, now, said)
        return [row["id"] for row in rows]

    async def prune(self, session: AsyncSession, name: str, kept: int = KEPT_RUNS) -> None:
        """Delete what is older than the newest runs, a bounded number of rows at a time."""
        await (await driver_connection(session)).execute(self._sql(_PRUNE), name, kept, MOST_DELETED)

    async def find_last_started(self, session: AsyncSession, name: str) -> datetime | None:
        """Return when the last run began that is running or came to its own end, well or not."""
        started: datetime | None = await (await driver_connection(session)).fetchval(self._sql(_LAST_STARTED), name)
        return started

    async def is_running(self, session: AsyncSession, name: str, now: datetime) -> bool:
        """Tell whether a cycle of the job is running in a process that lives, as far as can be told."""
        connection = await driver_connection(session)
        running: bool = await connection.fetchval(self._sql(_IS_RUNNING), name, now - ABANDONED_AFTER)
        return running

    async def overview(self, session: AsyncSession, names: list[str], now: datetime) -> list[dict[str, Any]]:
        """Return control and last run of jobs, in the given order."""
        connection = await driver_connection(session)
        rows: list[asyncpg.Record] = await connection.fetch(self._sql(_OVERVIEW), names, now - ABANDONED_AFTER)
        return [dict(row) | {"counts": orjson.loads(row["counts"] or b"{}")} for row in rows]

    async def _changed(self, session: AsyncSession, statement: str, *values: object) -> bool:
        return await (await driver_connection(session)).fetchval(self._sql(statement), *values) is not None


def short_error(error: BaseException) -> str:
    """Return an error's first line as Postgres can keep it: at most 500 characters, no NUL, no half a surrogate.

    The lines after the first are where the database quotes the values of a row.
    """
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:500].encode(errors="replace").decode().replace("\0", "?")
