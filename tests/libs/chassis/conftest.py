"""A schema made of what chassis itself declares, on Postgres, and a broker's topics made for one test."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
import structlog
from sqlalchemy import MetaData, create_mock_engine

from chassis.audit import audit_seal_table, audit_table
from chassis.batching import job_poison_table
from chassis.consumers.tables import dead_letter_table, inbox_table, parked_key_table
from chassis.db import Database
from chassis.ddl import idempotency
from chassis.job_records import job_control_table, job_run_table
from chassis.messaging import TopicSpec, create_topics
from chassis.outbox import EventType, Message, outbox_parked_key_table, outbox_table
from chassis.testing.plugin import DatabaseTemplates, TestBroker, TestDatabase
from chassis.testing.servers import EmbeddedBroker

sys.path.insert(0, str(Path(__file__).parent))

from relay_scene import Scene

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)

_THING = """
create table crm.thing (
  id uuid primary key,
  rank integer not null,
  state text not null default 'new',
  note text not null default '',
  worth integer constraint ck_worth check (worth is null or worth >= 0)
);
grant usage on schema crm to crm_api, crm_system;
grant select, insert, update, delete on all tables in schema crm to crm_system;
grant insert on crm.outbox, crm.audit_log, crm.thing to crm_api;
"""


def _tables() -> str:
    """Return the DDL of chassis's tables in the schema crm."""
    metadata = MetaData(schema="crm")
    outbox_table(metadata)
    outbox_parked_key_table(metadata)
    audit_table(metadata)
    audit_seal_table(metadata)
    job_poison_table(metadata)
    inbox_table(metadata)
    dead_letter_table(metadata)
    parked_key_table(metadata)
    job_control_table(metadata)
    job_run_table(metadata)
    statements: list[str] = []
    engine = create_mock_engine(
        "postgresql+asyncpg://", lambda sql, *_, **__: statements.append(str(sql.compile(dialect=engine.dialect)))
    )
    metadata.create_all(engine, checkfirst=False)
    return ";\n".join(statements)


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    """Log lines without coloured tracebacks, which take longer than the tests; and as they were, afterwards."""
    before = structlog.get_config()
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, renderer])
    yield
    structlog.configure(**before)


@pytest.fixture(scope="session")
def chassis_database(databases: DatabaseTemplates) -> TestDatabase:
    """The worker's database with chassis's tables and one table to work on, `crm.thing`."""

    async def build() -> TestDatabase:
        database = await databases.empty("crm")
        owner = await asyncpg.connect(database.owner_url)
        await owner.execute(";".join([_tables(), _THING, *idempotency.upgrade("crm")]))
        await owner.close()
        return database

    return asyncio.run(build())


@pytest.fixture
async def scratch(chassis_database: TestDatabase, eventually: Callable) -> TestDatabase:
    """That database, emptied, and without the connections of the test before."""
    admin = await asyncpg.connect(chassis_database.admin_url)
    others = "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"

    async def alone() -> bool:
        return not await admin.fetchval(f"select count(pg_terminate_backend(pid)) {others}")

    await eventually(alone)
    tables = (
        "thing, outbox, outbox_parked_key, audit_log, audit_seal, job_poison, job_control, job_run, inbox, dead_letter,"
        " parked_key, idempotency_key"
    )
    await admin.execute(f"truncate {', '.join(f'crm.{table}' for table in tables.split(', '))} restart identity")
    await admin.close()
    return chassis_database


@pytest.fixture
async def alter(admin: "asyncpg.Connection[asyncpg.Record]") -> AsyncIterator[Callable[[str, str], Awaitable[None]]]:
    """Changes the schema for one test: `await alter(statement, what undoes it)`."""
    undo: list[str] = []

    async def apply(statement: str, undoing: str) -> None:
        undo.append(undoing)
        await admin.execute(statement)

    yield apply
    for statement in reversed(undo):
        await admin.execute(statement)


@pytest.fixture
async def opened() -> AsyncIterator[Callable[..., Database]]:
    """Opens sessions on an address; they are closed after the test."""
    made: list[Database] = []

    def open_sessions(url: str, **arguments: object) -> Database:
        made.append(Database(url, **{"application_name": "test", **arguments}))
        return made[-1]

    yield open_sessions
    for database in made:
        await database.close()


@pytest.fixture
def system(scratch: TestDatabase, opened: Callable[..., Database]) -> Database:
    """Sessions of the system role."""
    return opened(scratch.system_url)


@pytest.fixture
async def admin(
    scratch: TestDatabase, connect: Callable[[str], Awaitable["asyncpg.Connection[asyncpg.Record]"]]
) -> "asyncpg.Connection[asyncpg.Record]":
    """A superuser's connection, for arranging and looking."""
    return await connect(scratch.admin_url)


@pytest.fixture
async def topic(broker: TestBroker) -> str:
    """A topic of one partition that only this test uses."""
    name = f"pin.test.{uuid4().hex[:12]}.v1"
    await create_topics(broker.address, [TopicSpec(name, 1)])
    return name


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker that the test may stop and resume."""
    server = EmbeddedBroker.start(tmp_path / "broker")
    yield server
    server.stop()


@pytest.fixture
def note() -> Callable[..., Message]:
    """Makes small messages: `note(topic, key, number)`."""

    def make(topic: str, key: str, number: int, **fields: object) -> Message:
        event = EventType(topic, "test.noted", "/pin/test", "Note", "domain")
        return Message(event, key, {"number": number}, NOW, **fields)

    return make


@pytest.fixture
async def scene(scratch: TestDatabase, opened: Callable[..., Database]) -> AsyncIterator[Scene]:
    """Relays of a test; their producers are closed afterwards."""
    made = Scene(opened(scratch.system_url, application_name="relay"), scratch.system_url, opened)
    yield made
    for producer in made.producers:
        await producer.close()
