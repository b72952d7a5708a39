"""The one place that commits.

A write session commits when its block ends without an exception and rolls back otherwise; nobody else calls commit.
Who acts is set per transaction (`app.tenant` and its siblings), which row level security reads and a pooled connection
forgets.
"""

import asyncio
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from uuid import UUID

import asyncpg
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

if TYPE_CHECKING:
    _DriverConnection = asyncpg.Connection[asyncpg.Record]
else:
    _DriverConnection = asyncpg.Connection

Entity = TypeVar("Entity")
Answer = TypeVar("Answer")
Made = TypeVar("Made")
COMMAND_SECONDS: Final = 75.0
"""Longest wait for an answer of the database; above the server's own limit, for a network that is gone."""

LINES_AT_ONCE: Final = 64
LINES_IN_ONE_PIECE: Final = 1024
"""Lines that are made already are sent without a pause up to this number."""

STATEMENTS_KEPT: Final = 100
"""Prepared statements that a connection keeps."""

INFRASTRUCTURE_ERRORS: tuple[type[BaseException], ...] = (
    OSError,
    TimeoutError,
    PoolTimeout,
    asyncpg.PostgresConnectionError,
    asyncpg.InterfaceError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
)
"""What is raised when the database is away, full or restarting: nobody's data is at fault."""

DATABASE_ERRORS: tuple[type[Exception], ...] = (
    DBAPIError,
    PoolTimeout,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    OSError,
)
"""What a statement can raise, through SQLAlchemy or the driver; `is_infrastructure` tells its kinds apart."""

_OPEN = text(
    "select set_config('app.tenant', :tenant, true), set_config('app.partner', :partner, true),"
    " set_config('app.user', :user, true), set_config('app.roles', :roles, true),"
    " set_config('transaction_read_only', :read_only, true)"
)


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts in a transaction, as row level security and the audit see it.

    Attributes:
        tenant_id: the tenant whose rows are visible; None for a system worker.
        partner_id: the API client of a tenant, if one acts.
        user_id: subject of the access token; None for the system.
        roles: roles of the subject.
    """

    tenant_id: UUID | None = None
    partner_id: UUID | None = None
    user_id: str | None = None
    roles: frozenset[str] = field(default_factory=frozenset)


SYSTEM = Actor()


COPY_NULL = "\\N"
"""NULL in COPY's text format."""

_SPECIAL = re.compile(r"[\\\t\n\r]")
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


class _CommittingConnection(_DriverConnection):
    """A connection on which COMMIT commits or raises.

    The server answers the COMMIT of a transaction in which a statement failed with ROLLBACK, and no error: whoever
    caught the statement's error would go on as if all had been written.
    """

    async def execute(self, query: str, *args: object, timeout: float | None = None) -> str:  # noqa: ASYNC109 - the driver's signature
        status: str = await super().execute(query, *args, timeout=timeout)
        if status == "ROLLBACK" and query.startswith("COMMIT"):
            raise asyncpg.InFailedSQLTransactionError("rolled back at commit: an error of a statement was swallowed")
        return status


class Database:
    """Sessions on one database under one role.

    Args:
        url: `postgresql://role@host:port/name`; with `?pool_mode=transaction` behind a pooler that may give every
            transaction another server connection (pgbouncer): no statement is then kept prepared.
        application_name: shown in pg_stat_activity.
        pool_size: connections kept; as many again may be opened under load.
        on_commit: called after each commit of a session that emitted events (see `mark_emitted`).
    """

    def __init__(
        self,
        url: str,
        *,
        application_name: str,
        pool_size: int = 5,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        async def connect(**_: object) -> "asyncpg.Connection[asyncpg.Record]":
            return await open_connection(url, application_name=application_name)

        pooled = _split_pool_mode(url)[1]

        self.url = url
        self.on_commit = on_commit
        self.engine = create_async_engine(
            "postgresql+asyncpg://",
            connect_args={
                "async_creator_fn": connect,
                "prepared_statement_cache_size": 0 if pooled else STATEMENTS_KEPT,
            },
            isolation_level="READ COMMITTED",  # said, since a server's default may be another: claims would then fail
            pool_size=pool_size,
            max_overflow=pool_size,
            pool_pre_ping=True,
            pool_timeout=10,
            hide_parameters=True,
        )
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @asynccontextmanager
    async def write(self, actor: Actor = SYSTEM) -> AsyncIterator[AsyncSession]:
        """Open a transaction that commits at the end of the block, or rolls back if the block raises.

        Raises:
            sqlalchemy.exc.DBAPIError: the database refused or is away, or the block swallowed an error of a statement
                (outside a savepoint of its own); nothing was changed.
        """
        async with self._sessions() as session:
            await self._open(session, actor, read_only=False)
            yield session
            await session.commit()
            if self.on_commit is not None and session.info.get("emitted"):
                self.on_commit()

    @asynccontextmanager
    async def read(self, actor: Actor = SYSTEM) -> AsyncIterator[AsyncSession]:
        """Open a read-only transaction; a write in it is an error of the database."""
        async with self._sessions() as session:
            await self._open(session, actor, read_only=True)
            yield session

    async def ping(self) -> None:
        """Ask the database for one row.

        Raises:
            sqlalchemy.exc.DBAPIError, OSError: it can't be asked.
        """
        async with self.read() as session:
            await session.execute(text("select 1"))

    async def close(self) -> None:
        """Close every pooled connection."""
        await self.engine.dispose()

    @staticmethod
    async def _open(session: AsyncSession, actor: Actor, *, read_only: bool) -> None:
        await session.execute(
            _OPEN,
            {
                "tenant": str(actor.tenant_id or ""),
                "partner": str(actor.partner_id or ""),
                "user": actor.user_id or "",
                "roles": ",".join(sorted(actor.roles)),
                "read_only": "on" if read_only else "off",
            },
        )


async def open_connection(url: str, *, application_name: str = "") -> "asyncpg.Connection[asyncpg.Record]":
    """Open a plain connection of the driver to an address as `Database` takes it.

    The driver reads the address itself: it knows libpq's parameters (sslmode, ...), SQLAlchemy doesn't.

    Raises:
        OSError, asyncpg.PostgresError, TimeoutError: the database can't be reached.
    """
    address, pooled = _split_pool_mode(url)
    return await asyncpg.connect(
        address,
        connection_class=_CommittingConnection,
        timeout=10,
        command_timeout=COMMAND_SECONDS,
        server_settings={"application_name": application_name} if application_name else None,
        statement_cache_size=0 if pooled else STATEMENTS_KEPT,
    )


def _split_pool_mode(url: str) -> tuple[str, bool]:
    """Return the address as the driver knows it, and whether a transaction pooler stands before the server."""
    parts = make_url(url)
    if "pool_mode" not in parts.query:
        return url, False
    plain = parts.difference_update_query(["pool_mode"]).render_as_string(hide_password=False)
    return plain, parts.query["pool_mode"] == "transaction"


def mark_emitted(session: AsyncSession) -> None:
    """Note that this session put rows into the outbox, so that its commit wakes the relay."""
    session.info["emitted"] = True


async def flush(session: AsyncSession) -> None:
    """Send a session's changed entities to the database now, or at the end of the enclosing `gathered` block."""
    if "gathered" not in session.info:
        await session.flush()


def remember_locked(session: AsyncSession, entity: object, key: object) -> None:
    """Note that this session has locked an entity's row, so that `find_locked` gives it without asking again."""
    session.info.setdefault("locked", {})[type(entity), key] = entity


def find_locked(session: AsyncSession, kind: type[Entity], key: object) -> Entity | None:
    """Return the entity of a row that this session has locked and loaded already, or None."""
    locked: dict[Any, Entity] = session.info.get("locked", {})
    return locked.get((kind, key))


async def driver_connection(session: AsyncSession) -> "asyncpg.Connection[asyncpg.Record]":
    """Return the asyncpg connection of a session's open transaction, for set-based statements over arrays.

    Raises:
        RuntimeError: no transaction is open (the statement would commit by itself).
    """
    raw = await (await session.connection()).get_raw_connection()
    connection = cast("asyncpg.Connection[asyncpg.Record]", raw.driver_connection)
    if not connection.is_in_transaction():
        raise RuntimeError("no transaction is open on this session")
    return connection


async def meanwhile(statement: Awaitable[Answer], make: Callable[[], Made]) -> tuple[Answer, Made]:
    """Send a statement, and make something while the database works on it.

    Args:
        statement: a call of the driver's connection that has not been awaited.
        make: what to do meanwhile; it doesn't use the connection.

    Raises:
        BaseException: what the statement raised, else what `make` raised; the statement has ended by then.
    """

    async def made() -> Made:
        return make()

    answer, thing = await asyncio.gather(statement, made(), return_exceptions=True)
    if isinstance(answer, BaseException):
        raise answer
    if isinstance(thing, BaseException):
        raise thing
    return answer, thing


async def copy_lines(session: AsyncSession, table: str, columns: Sequence[str], lines: Iterable[str]) -> None:
    """Insert rows with COPY in the session's transaction: several times as fast as an INSERT from arrays.

    Needs no right to read the table, which the driver's own record-wise COPY does.

    Args:
        session: an open write session.
        table: `schema.table`.
        columns: the columns that get values.
        lines: one per row: the values in COPY's text format (`copy_text`, `copy_bytes`, COPY_NULL), separated by tabs.
            Up to LINES_AT_ONCE are made before anything is sent; an iterator of more is asked for the next ones while
            the server inserts the first. A list goes in one piece up to LINES_IN_ONE_PIECE.

    Raises:
        asyncpg.PostgresError: the database refused a row; none is inserted.
        Exception: whatever the iterator raised: within the first LINES_AT_ONCE lines nothing was written; later the
            transaction (or its savepoint) can only be rolled back.
    """
    waiting = session.info.get("gathered")
    if waiting is not None:
        made = list(lines)
        waiting.setdefault((table, tuple(columns)), []).extend(made)
        return
    most = LINES_IN_ONE_PIECE if isinstance(lines, list) else LINES_AT_ONCE
    rest = iter(lines)
    head = list(islice(rest, most + 1))
    schema, name = table.split(".")
    connection = await driver_connection(session)
    source = io.BytesIO(_piece(head)) if len(head) <= most else _chunks(chain(head, rest))
    await connection.copy_to_table(name, source=source, schema_name=schema, columns=list(columns), format="text")


async def _chunks(lines: Iterable[str]) -> AsyncIterator[bytes]:
    """Make lines while the server inserts those before them."""
    rest = iter(lines)
    while chunk := list(islice(rest, LINES_AT_ONCE)):
        yield _piece(chunk)


def _piece(lines: list[str]) -> bytes:
    return "\n".join([*lines, ""]).encode()


def copy_text(value: str) -> str:
    """Return any text as a value of COPY's text format."""
    return value.translate(_ESCAPES) if _SPECIAL.search(value) else value


def copy_bytes(value: bytes) -> str:
    """Return bytes as a value of COPY's text format, for a bytea column."""
    return "\\\\x" + value.hex()


def driver_error(error: BaseException) -> BaseException:
    """Return what the driver raised, where SQLAlchemy has wrapped it (twice); else the error itself."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        return error.orig.__cause__ or error.orig
    return error


def is_infrastructure(error: BaseException) -> bool:
    """Tell whether an error speaks of the database's availability and not of the data."""
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    return isinstance(driver_error(error), INFRASTRUCTURE_ERRORS)


def is_bad_value(error: BaseException) -> bool:
    """Tell whether the database refused a value as such: NUL in a text, NaN in JSON, a number out of range."""
    cause = driver_error(error)
    return isinstance(cause, asyncpg.DataError) and not isinstance(cause, asyncpg.DivisionByZeroError)


def safe_address(url: str) -> str:
    """Return `host:port/database` of a database address, for logs and messages: no user, no password."""
    parts = make_url(url)
    return f"{parts.host or 'local socket'}:{parts.port or 5432}/{parts.database or ''}"
