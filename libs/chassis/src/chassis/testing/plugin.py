"""Pytest plugin: a Postgres per worker whose databases are built by Alembic, a broker, a clock that moves, and waiting
without sleeping.

    pytest -p chassis.testing.plugin

Servers are started when the first test asks for them and end with the worker.
"""

import asyncio
import inspect
import os
import re
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import asyncpg
import pytest

from chassis import contracts, db, migrations
from chassis.clock import MovableClock
from chassis.messaging import KafkaAddress
from chassis.testing.kafka import Event, RunningBroker, TopicReader, cache_folder
from chassis.testing.pooler import CHOICE as POOLER_CHOICE
from chassis.testing.pooler import PgBouncer
from chassis.testing.processes import HOST, CannotStart, service_variables
from chassis.testing.servers import FAST_AND_UNSAFE, EmbeddedPostgres

START: Final = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
"""Where the test clock stands at the beginning: a Monday morning."""


@dataclass(frozen=True, slots=True)
class TestDatabase:
    """One database of a test, with the addresses of a service's three roles."""

    __test__ = False
    name: str
    schema: str
    server: EmbeddedPostgres
    pooler: PgBouncer | None = None

    @property
    def system_url(self) -> str:
        """Address for workers."""
        return self._url(f"{self.schema}_system")

    @property
    def api_url(self) -> str:
        """Address for HTTP, under row level security."""
        return self._url(f"{self.schema}_api")

    def _url(self, role: str) -> str:
        if self.pooler is None or role.endswith("_owner"):
            return self.direct_url(role)
        return f"postgresql://{role}@{HOST}:{self.pooler.port}/{self.name}?pool_mode=transaction"

    @property
    def owner_url(self) -> str:
        """Address for migrations."""
        return self.server.url(f"{self.schema}_owner", self.name)

    def direct_url(self, role: str) -> str:
        """Return a role's address past the pooler, for tests that look at or set what belongs to a server session."""
        return self.server.url(role, self.name)

    def variables(self, bootstrap: str) -> dict[str, str]:
        """Return the environment variables with which the service runs on this database and a broker."""
        return service_variables(self.schema, self._url, bootstrap)

    @property
    def admin_url(self) -> str:
        """The superuser's address: for arranging and looking, never for the code under test."""
        return self.server.url("postgres", self.name)


class DatabaseTemplates:
    """Migrated template databases of a worker, one per service; every test gets a copy."""

    def __init__(self, server: EmbeddedPostgres, roles_sql: str, pooler: PgBouncer | None = None) -> None:
        self.server = server
        self._pooler = pooler
        self._roles_sql = roles_sql
        self._templates: dict[str, str] = {}

    async def make(self, schema: str, folder: Path) -> TestDatabase:
        """Return a fresh database with the schema at its newest revision."""
        if schema not in self._templates:
            self._templates[schema] = await self._build(schema, folder)
        name = f"test_{uuid4().hex[:12]}"
        await self._admin(f'create database "{name}" template "{self._templates[schema]}" strategy file_copy')
        return TestDatabase(name, schema, self.server, self._pooler)

    async def empty(self, schema: str) -> TestDatabase:
        """Return a fresh database with roles and schemas and nothing in them."""
        name = f"test_{uuid4().hex[:12]}"
        await self._admin(f'create database "{name}"')
        database = TestDatabase(name, schema, self.server, self._pooler)
        await self._script(database, self._roles_sql)
        return database

    async def drop(self, database: TestDatabase) -> None:
        """Drop a database, ending whatever is still connected to it."""
        await self._admin(f'drop database if exists "{database.name}" with (force)')

    async def _build(self, schema: str, folder: Path) -> str:
        database = await self.empty(schema)
        await asyncio.to_thread(migrations.upgrade, folder, database.owner_url)
        return database.name

    async def _admin(self, statement: str) -> None:
        connection = await asyncpg.connect(self.server.url())
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    async def _script(self, database: TestDatabase, sql: str) -> None:
        connection = await asyncpg.connect(database.admin_url)
        try:
            await connection.execute(sql)
        finally:
            await connection.close()


@dataclass
class TestBroker:
    """The worker's broker with the contracts' topics."""

    __test__ = False
    running: RunningBroker

    @property
    def address(self) -> KafkaAddress:
        """For the code under test."""
        return KafkaAddress(self.running.bootstrap)

    @contextmanager
    def reading(self, *topics: str, from_beginning: bool = False) -> Iterator[TopicReader]:
        """Read topics from now on with a consumer that shares no code with ours."""
        reader = TopicReader(self.running.bootstrap, topics, from_beginning)
        try:
            yield reader
        finally:
            reader.close()

    def expect(
        self, topic: str, kind: str, match: Callable[[Event], bool] = lambda _: True, seconds: float = 20.0
    ) -> Event:
        """Return the first event of a type on a topic that matches, waiting for it.

        Raises:
            AssertionError: none came in time.
        """

        def hits(events: list[Event]) -> list[Event]:
            return [event for event in events if event.type == kind and match(event)]

        with self.reading(topic, from_beginning=True) as reader:
            return hits(reader.until(lambda events: bool(hits(events)), seconds))[0]


def _root(config: pytest.Config) -> Path:
    return config.rootpath


@pytest.fixture(scope="session")
def postgres_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EmbeddedPostgres]:
    """The worker's Postgres server."""
    home = tmp_path_factory.mktemp("postgres") / "server"
    server = EmbeddedPostgres.start(home, settings=FAST_AND_UNSAFE)
    yield server
    server.stop()
    shutil.rmtree(server.home, ignore_errors=True)


@pytest.fixture(scope="session")
def databases(postgres_server: EmbeddedPostgres, pytestconfig: pytest.Config) -> Iterator[DatabaseTemplates]:
    """Makes databases on the worker's server; with PIN_POOLER=pgbouncer the services' roles reach them through that."""
    roles_sql = (_root(pytestconfig) / "deploy/postgres/roles.sql").read_text()
    if os.environ.get(POOLER_CHOICE) != "pgbouncer":
        yield DatabaseTemplates(postgres_server, roles_sql)
        return
    schemas = re.findall(r"'(\w+)'", re.search(r"array\[(.*?)\]", roles_sql)[1])  # type: ignore[index]
    pooler = PgBouncer.start(postgres_server, [f"{schema}_{kind}" for schema in schemas for kind in ("api", "system")])
    yield DatabaseTemplates(postgres_server, roles_sql, pooler)
    pooler.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[TestBroker]:
    """The worker's broker (see PIN_KAFKA), with every topic of the contracts."""
    root = _root(pytestconfig)
    try:
        running = RunningBroker.start(tmp_path_factory.mktemp("kafka"), cache_folder(root))
    except CannotStart as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
    asyncio.run(contracts.ensure_topics(root / "contracts", KafkaAddress(running.bootstrap), replicas=1))
    yield TestBroker(running)
    running.stop()


@pytest.fixture
def clock() -> MovableClock:
    """A clock at Monday 2026-11-30 09:00 UTC that moves only when told to."""
    return MovableClock(START)


@pytest.fixture
def eventually() -> Callable[..., Awaitable[Any]]:
    """Waits, without sleeping in the test, until a (possibly async) condition returns something true."""
    return _eventually


async def _eventually(
    condition: Callable[[], Any], seconds: float = 20.0, describe: Callable[[], Any] = lambda: ""
) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        outcome = condition()
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if outcome:
            return outcome
        assert time.monotonic() < deadline, f"not true within {seconds} s: {describe() or condition}"
        await asyncio.sleep(0.02)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[str], Awaitable["asyncpg.Connection[asyncpg.Record]"]]]:
    """Opens plain connections that are closed after the test."""
    opened: list[asyncpg.Connection[asyncpg.Record]] = []

    async def open_connection(url: str) -> "asyncpg.Connection[asyncpg.Record]":
        connection = await db.open_connection(url)
        opened.append(connection)
        return connection

    yield open_connection
    for connection in opened:
        await connection.close()


def pytest_report_header(config: pytest.Config) -> str:  # noqa: ARG001 - pytest's signature
    """Say which broker is used."""
    pooler = f", behind {os.environ[POOLER_CHOICE]}" if os.environ.get(POOLER_CHOICE) else ""
    return f"kafka: {os.environ.get('PIN_KAFKA') or 'embedded'}; postgres: embedded{pooler}"
