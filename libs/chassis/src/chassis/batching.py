"""Skip-locked batches: many rows claimed, judged and written together, and one bad row never stops the rest.

A claim is one SELECT ... FOR UPDATE SKIP LOCKED. The domain's guard runs in Python for each row; the writes are
set-based. A row whose guard raises is left out and remembered in `job_poison`: it is tried once per cycle and fills
at most a tenth of a batch (one row in a batch of two to nine, none in a batch of one), so that poison at the head of
the order can't starve what stands behind it. A database error in the set-based write is narrowed down with one
savepoint per row, for that batch only.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from uuid import UUID

import asyncpg
import structlog
from sqlalchemy import Column, DateTime, Integer, MetaData, Table, Text, Uuid
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection, driver_error
from chassis.jobs import Run
from chassis.outbox import MessageRefused

Effect = TypeVar("Effect")
WRITE_ERRORS = (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, MessageRefused, OverflowError)
"""What a set-based write may raise; `_is_a_rows_fault` tells which of them speak of a row."""

ROW_FAULTS = ("22", "23", "P0001")
"""SQLSTATEs of a row's own fault: data exceptions, constraints, a trigger's refusal. All others (a missing grant or
table, a full disk, a deadlock) would fail every row, and no row is to blame."""

POISON_SHARE = 10
log = structlog.get_logger(__name__)


def job_poison_table(metadata: MetaData) -> Table:
    """Return the table of rows that a job could not handle, one per (job, row)."""
    return Table(
        "job_poison",
        metadata,
        Column("job", Text, primary_key=True),
        Column("id", Uuid, primary_key=True),
        Column("failures", Integer, nullable=False),
        Column("last_error", Text, nullable=False),
        Column("last_run_id", Uuid, nullable=False),
        Column("first_failed_at", DateTime(timezone=True), nullable=False),
        Column("last_failed_at", DateTime(timezone=True), nullable=False),
    )


@dataclass(frozen=True, slots=True)
class Claimed:
    """Rows locked by this transaction.

    Attributes:
        rows: at most as many as were asked for, in the claim's order (rows poisoned before come last).
        skipped_locked: rows among the first of that order that another transaction holds.
        limit: how many were asked for.
    """

    rows: list[asyncpg.Record]
    skipped_locked: int
    limit: int

    @property
    def has_more(self) -> bool:
        """Whether the claim was filled, so that another one may find rows."""
        return len(self.rows) == self.limit


@dataclass(frozen=True, slots=True)
class BatchOutcome(Generic[Effect]):
    """What became of a claimed batch: effects written, and rows left out with their error."""

    written: list[Effect]
    failed: list[tuple[UUID, BaseException]] = field(default_factory=list)


_CLAIM = """
with poisoned as (
  select {columns} from {schema}.job_poison p join {table} t on t.id = p.id
  where p.job = $2 and p.last_run_id <> $3 and {where}
  order by p.last_failed_at, p.id limit greatest($1 / {share}, ($1 > 1)::int) for update of t skip locked
), healthy as (
  select {columns} from {table} t
  where {where} and {after} and t.id not in (select p.id from {schema}.job_poison p where p.job = $2)
  order by {order} limit $1 - (select count(*) from poisoned) for update of t skip locked
), head as (
  select t.id from {table} t
  where {where} and {after} and t.id not in (select p.id from {schema}.job_poison p where p.job = $2)
  order by {order} limit $1 - (select count(*) from poisoned)
), skipped as (
  select count(*) as n from head where id not in (select id from healthy)
)
select s.n as skipped_locked, c.* from skipped s left join (
  select false as was_poisoned, healthy.* from healthy union all select true, poisoned.* from poisoned
) as c on true
"""
_REMEMBER = """
insert into {schema}.job_poison as p (job, id, failures, last_error, last_run_id, first_failed_at, last_failed_at)
select $1, f.id, 1, f.error, $4, $5, $5 from unnest($2::uuid[], $3::text[]) as f(id, error)
on conflict (job, id) do update set failures = p.failures + 1, last_error = excluded.last_error,
  last_run_id = excluded.last_run_id, last_failed_at = excluded.last_failed_at
"""
# $1 is there only to keep the numbers of the predicate's parameters the same as in the claim.
_FORGET_SETTLED = """
delete from {schema}.job_poison p where $1::int > 0 and p.job = $2 and p.last_run_id <> $3
and not exists (select from {table} t where t.id = p.id and {where})
"""
_FORGET = "delete from {schema}.job_poison where job = $1 and id = any($2::uuid[])"


class SkipLocked:
    """The claim of one job over one table whose primary key is `id uuid`.

    Args:
        schema: the service's schema, which also holds `job_poison`.
        job: the job's name.
        table: schema-qualified table; its alias in the conditions is `t`.
        columns: what the guard needs, each with the alias `t`; must contain `t.id`.
        where: the predicate; its parameters start at `$4`.
        order: the columns of the order, each with the alias `t`; together unique.
        arguments: how many parameters `where` has.
        cursor_types: Postgres types of the order's columns, for a cycle that continues after its last row.
        logged_as: the names under which the log line of a failed row gives its id and its error.
    """

    def __init__(
        self,
        *,
        schema: str,
        job: str,
        table: str,
        columns: Sequence[str],
        where: str,
        order: Sequence[str],
        arguments: int,
        cursor_types: Sequence[str],
        logged_as: tuple[str, str] = ("id", "error"),
    ) -> None:
        self.job = job
        self._id_name, self._error_name = logged_as
        first = 4 + arguments
        cursor = ", ".join(f"${first + n}::{kind}" for n, kind in enumerate(cursor_types))
        parts = {
            "columns": ", ".join(columns),
            "schema": schema,
            "table": table,
            "where": where,
            "order": ", ".join(order),
            "share": POISON_SHARE,
        }
        self._first = _CLAIM.format(**parts, after="true")
        self._next = _CLAIM.format(**parts, after=f"({', '.join(order)}) > ({cursor})")
        self._remember = _REMEMBER.format(schema=schema)
        self._forget_settled = _FORGET_SETTLED.format(**parts)
        self._forget = _FORGET.format(schema=schema)

    async def claim(
        self,
        session: AsyncSession,
        run: Run,
        *,
        limit: int,
        arguments: Sequence[Any],
        after: Sequence[Any] | None = None,
    ) -> Claimed:
        """Lock up to `limit` rows that satisfy the predicate and that nobody else holds.

        At the beginning of a cycle poisoned rows that somebody settled (they no longer satisfy the predicate) are
        forgotten.

        Args:
            session: an open write session; the locks last until it ends.
            run: the job's run; a poisoned row that it has tried already is left alone.
            limit: largest number of rows.
            arguments: values of the predicate's parameters.
            after: the order's values of the last row of this cycle; None at its beginning.

        Raises:
            sqlalchemy.exc.DBAPIError, asyncpg.PostgresError: the database failed.
        """
        connection = await driver_connection(session)
        if after is None:
            await connection.execute(self._forget_settled, limit, self.job, run.id, *arguments)
            rows = await connection.fetch(self._first, limit, self.job, run.id, *arguments)
        else:
            rows = await connection.fetch(self._next, limit, self.job, run.id, *arguments, *after)
        return Claimed([row for row in rows if row["id"] is not None], rows[0]["skipped_locked"], limit)

    async def apply(
        self,
        session: AsyncSession,
        run: Run,
        claimed: Claimed,
        *,
        guard: Callable[[asyncpg.Record], Effect],
        write: Callable[[AsyncSession, Sequence[Effect]], Awaitable[None]],
    ) -> BatchOutcome[Effect]:
        """Judge every claimed row with `guard` and write the accepted ones together.

        Args:
            session: the session that claimed.
            run: the job's run.
            claimed: the rows.
            guard: turns a row into an effect, or raises: the row is then left out, logged and remembered.
            write: writes effects with set-based statements; called once, or once per row after a database error.

        Returns:
            What was written and what was left out.

        Raises:
            sqlalchemy.exc.DBAPIError, asyncpg.PostgresError: the database is at fault, not a row; nothing is kept.
        """
        judged: list[tuple[UUID, Effect]] = []
        failed: list[tuple[UUID, BaseException]] = []
        for row in claimed.rows:
            try:
                judged.append((row["id"], guard(row)))
            except Exception as error:
                failed.append((row["id"], error))
        written = await self._write(session, judged, failed, write)
        healed = [row["id"] for row in claimed.rows if row["was_poisoned"]]
        await self._keep_book(session, run, healed, failed)
        return BatchOutcome(written, failed)

    async def _write(
        self,
        session: AsyncSession,
        judged: Sequence[tuple[UUID, Effect]],
        failed: list[tuple[UUID, BaseException]],
        write: Callable[[AsyncSession, Sequence[Effect]], Awaitable[None]],
    ) -> list[Effect]:
        if not judged:
            return []
        effects = [effect for _, effect in judged]
        try:
            async with session.begin_nested():
                await write(session, effects)
        except WRITE_ERRORS as error:
            if not _is_a_rows_fault(error):
                raise
            log.warning("batch write failed, row by row", job=self.job, error=_short(error), rows=len(effects))
        else:
            return effects
        written: list[Effect] = []
        for row_id, effect in judged:
            try:
                async with session.begin_nested():
                    await write(session, [effect])
            except WRITE_ERRORS as error:
                if not _is_a_rows_fault(error):
                    raise
                failed.append((row_id, error))
            else:
                written.append(effect)
        return written

    async def _keep_book(
        self,
        session: AsyncSession,
        run: Run,
        poisoned_before: Sequence[UUID],
        failed: Sequence[tuple[UUID, BaseException]],
    ) -> None:
        connection = await driver_connection(session)
        bad = {row_id for row_id, _ in failed}
        healed = [row_id for row_id in poisoned_before if row_id not in bad]
        if healed:
            await connection.execute(self._forget, self.job, healed)
        if failed:
            ids, errors = [row_id for row_id, _ in failed], [_short(error) for _, error in failed]
            await connection.execute(self._remember, self.job, ids, errors, run.id, run.as_of)
        for row_id, error in failed:
            said = {self._id_name: str(row_id), self._error_name: _short(error)}
            log.error("item failed", job=self.job, run_id=str(run.id), **said)


def _is_a_rows_fault(error: BaseException) -> bool:
    if isinstance(error, (MessageRefused, OverflowError)):
        return True
    return str(getattr(driver_error(error), "sqlstate", None) or "").startswith(ROW_FAULTS)


def _short(error: BaseException) -> str:
    """Return an error's text as Postgres can keep it: at most 500 characters, no NUL, no half of a surrogate pair."""
    text = f"{type(error).__name__}: {error}"[:500]
    return text.encode(errors="replace").decode().replace("\0", "?")
