"""Behind a pooler that gives every transaction another connection: what would go wrong there, and that ours doesn't.

Each fault is shown with a plain connection first, so that the pooler of the test is one that would show it.
"""

import asyncio
from collections.abc import Callable, Iterator
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy import text

from chassis.db import Actor, Database, open_connection
from chassis.testing.plugin import TestDatabase
from chassis.testing.pooler import PgBouncer
from chassis.testing.processes import HOST, CannotStart

TENANT = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01")
TENANT_SET = "select coalesce(current_setting('app.tenant', true), '')"
LOCKS_HELD = "select count(*) from pg_locks where locktype = 'advisory' and granted and objid = 4711"


@pytest.fixture(scope="module")
def pooler(chassis_database: TestDatabase) -> Iterator[PgBouncer]:
    try:
        running = PgBouncer.start(chassis_database.server, ["crm_system"])
    except CannotStart as error:
        pytest.skip(str(error))
    yield running
    running.stop()


@pytest.fixture
def plain_url(pooler: PgBouncer, scratch: TestDatabase) -> str:
    return f"postgresql://crm_system@{HOST}:{pooler.port}/{scratch.name}"


@pytest.fixture
async def pooled(plain_url: str, opened: Callable[..., Database]) -> Database:
    return opened(f"{plain_url}?pool_mode=transaction", pool_size=5)


async def test_what_is_set_for_a_session_reaches_others_and_our_actor_does_not(
    plain_url: str, pooled: Database
) -> None:
    async def seen_by_another() -> str:
        other = await open_connection(f"{plain_url}?pool_mode=transaction")
        try:
            return await other.fetchval(TENANT_SET)
        finally:
            await other.close()

    async with pooled.write(Actor(TENANT)) as session:
        assert (await session.execute(text(TENANT_SET))).scalar_one() == str(TENANT)
    assert await seen_by_another() == ""
    careless = await open_connection(f"{plain_url}?pool_mode=transaction")
    await careless.execute("select set_config('app.tenant', $1, false)", str(TENANT))
    assert await seen_by_another() == str(TENANT), "this pooler would show the fault"
    async with pooled.read() as session:
        assert (await session.execute(text(TENANT_SET))).scalar_one() == "", "every transaction of ours says who acts"
    await careless.execute("select set_config('app.tenant', '', false)")
    await careless.close()


async def test_a_lock_of_a_session_stays_behind_and_one_of_a_transaction_does_not(
    plain_url: str, pooled: Database, admin: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    async with pooled.write() as session:
        await session.execute(text("select pg_advisory_xact_lock(0, 4711)"))
        assert await admin.fetchval(LOCKS_HELD) == 1
    assert await admin.fetchval(LOCKS_HELD) == 0
    careless = await open_connection(f"{plain_url}?pool_mode=transaction")
    await careless.execute("select pg_advisory_lock(0, 4711)")
    await careless.close()
    assert await admin.fetchval(LOCKS_HELD) == 1, "its owner is gone and the lock is still there"


async def _repeat_on_another_server(url: str) -> int:
    """Run a statement, let another client take that server connection, and run it again on the next one."""
    one, other = await open_connection(url), await open_connection(url)
    try:
        assert await one.fetchval("select 1 + $1::int", 1) == 2
        async with other.transaction():
            await other.execute("select 1")
            return await one.fetchval("select 1 + $1::int", 2)
    finally:
        one.terminate()
        other.terminate()


async def test_a_statement_kept_prepared_is_missing_on_the_next_connection(plain_url: str) -> None:
    with pytest.raises((asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)):
        await _repeat_on_another_server(plain_url)


async def test_with_the_setting_no_statement_stays_prepared(plain_url: str, pooled: Database) -> None:
    assert await _repeat_on_another_server(f"{plain_url}?pool_mode=transaction") == 3

    async def many(number: int) -> None:
        for turn in range(20):
            async with pooled.write() as session:
                answer = await session.execute(text(f"select {turn} + :n"), {"n": number})
                assert answer.scalar_one() == turn + number

    await asyncio.gather(*(many(number) for number in range(8)))
