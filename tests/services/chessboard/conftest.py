"""Fixtures of the tests of chessboard."""

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

from board_world import World

import chessboard
from chessboard.tables import metadata

MIGRATIONS = migrations_of(chessboard.__file__)
EMPTY = f"truncate {', '.join(metadata.tables)} restart identity cascade"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shell has set must not reach the service under test."""
    for name in [name for name in os.environ if name.startswith("PIN_") and name not in ("PIN_KAFKA", "PIN_CASES")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def shared_database(databases: DatabaseTemplates) -> Iterator[TestDatabase]:
    """One database for all tests of a worker that leave the schema as it is."""
    database = asyncio.run(databases.make("chessboard", MIGRATIONS))
    yield database
    asyncio.run(databases.drop(database))


@pytest.fixture
async def world(shared_database: TestDatabase, clock: MovableClock) -> AsyncIterator[World]:
    """An empty database and no broker; the test leaves the schema as it is."""
    async with _world(shared_database, clock) as made:
        yield made


@pytest.fixture
async def own_world(databases: DatabaseTemplates, clock: MovableClock) -> AsyncIterator[World]:
    """A database of the test's own, whose schema it may change."""
    database = await databases.make("chessboard", MIGRATIONS)
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
