"""Fixtures of the tests of crm."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from chassis.clock import MovableClock
from chassis.migrations import migrations_of
from chassis.testing.plugin import DatabaseTemplates, TestBroker, TestDatabase

sys.path.insert(0, str(Path(__file__).parent))

from crm_world import World

import crm

MIGRATIONS = migrations_of(crm.__file__)
EMPTY = (
    "truncate crm.deal, crm.deal_timeline_event, crm.outbox, crm.audit_log, crm.job_poison, crm.idempotency_key"
    " restart identity cascade"
)
LOOSEN = "alter table crm.deal_timeline_event drop constraint ck_type_known, drop constraint fk_step_deal_tenant"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell has set must not reach the service under test."""
    for name in [name for name in os.environ if name.startswith("PIN_") and name not in ("PIN_KAFKA", "PIN_CASES")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def shared_database(databases: DatabaseTemplates) -> Iterator[TestDatabase]:
    """One database for all tests of a worker that leave the schema as it is."""
    database = asyncio.run(databases.make("crm", MIGRATIONS))
    yield database
    asyncio.run(databases.drop(database))


@pytest.fixture(scope="session")
def loose_database(databases: DatabaseTemplates) -> Iterator[TestDatabase]:
    """One without the constraints that keep out rows which the domain doesn't know."""
    database = asyncio.run(databases.make("crm", MIGRATIONS))
    asyncio.run(_execute(database, LOOSEN))
    yield database
    asyncio.run(databases.drop(database))


@pytest.fixture
async def world(shared_database: TestDatabase, clock: MovableClock) -> AsyncIterator[World]:
    """An empty database and no broker; the test leaves the schema as it is."""
    async with _world(shared_database, clock) as made:
        yield made


@pytest.fixture
async def loose_world(loose_database: TestDatabase, clock: MovableClock) -> AsyncIterator[World]:
    """The same without some constraints."""
    async with _world(loose_database, clock) as made:
        yield made


@pytest.fixture
async def own_world(databases: DatabaseTemplates, clock: MovableClock) -> AsyncIterator[World]:
    """A database of the test's own, whose schema it may change."""
    database = await databases.make("crm", MIGRATIONS)
    async with _world(database, clock) as made:
        yield made
    await databases.drop(database)


@pytest.fixture
def connected(world: World, broker: TestBroker) -> World:
    """The shared database, and the broker."""
    world.bootstrap = broker.address.bootstrap
    return world


@asynccontextmanager
async def _world(database: TestDatabase, clock: MovableClock) -> AsyncIterator[World]:
    admin = await asyncpg.connect(database.admin_url)
    await admin.execute(EMPTY)
    made = World(database, admin, clock)
    yield made
    await made.close()
    await admin.close()


async def _execute(database: TestDatabase, script: str) -> None:
    admin = await asyncpg.connect(database.admin_url)
    await admin.execute(script)
    await admin.close()
