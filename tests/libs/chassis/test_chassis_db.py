"""Sessions: what commits, what rolls back, what the next user of a connection inherits, and what a lost server does."""

import asyncio
import contextlib
from collections.abc import Callable
from uuid import uuid4

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from chassis.db import (
    Actor,
    Database,
    driver_connection,
    driver_error,
    is_infrastructure,
    mark_emitted,
    safe_address,
)
from chassis.testing.plugin import TestDatabase

Connection = asyncpg.Connection
ADD = text("insert into crm.thing (id, rank) values (gen_random_uuid(), 1)")
SETTINGS = text(
    "select array[current_setting('app.tenant', true), current_setting('app.partner', true),"
    " current_setting('app.user', true), current_setting('app.roles', true)]"
)


async def things(admin: Connection) -> int:
    return await admin.fetchval("select count(*) from crm.thing")


async def backends(admin: Connection, name: str = "test") -> list[asyncpg.Record]:
    return await admin.fetch(
        "select pid, state, query from pg_stat_activity where application_name = $1 and datname = current_database()",
        name,
    )


async def kill(admin: Connection) -> int:
    """End every connection of the code under test."""
    return len(
        await admin.fetch(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'test' and datname = current_database()"
        )
    )


# --- transactions


async def test_a_write_session_commits_at_the_end_of_its_block(system: Database, admin: Connection):
    async with system.write() as session:
        await session.execute(ADD)
        assert await things(admin) == 0
    assert await things(admin) == 1


async def test_an_exception_rolls_back(system: Database, admin: Connection):
    async def fail() -> None:
        async with system.write() as session:
            await session.execute(ADD)
            raise LookupError

    with pytest.raises(LookupError):
        await fail()
    assert await things(admin) == 0
    assert [row["state"] for row in await backends(admin)] == ["idle"]


async def test_a_cancelled_session_rolls_back_and_its_connection_is_usable_again(
    scratch: TestDatabase, opened: Callable[..., Database], admin: Connection, eventually: Callable
):
    database = opened(scratch.system_url, pool_size=1)
    for statement in ("select pg_sleep(60)", None):
        at_work = asyncio.Event()

        async def work(statement: str | None = statement, at_work: asyncio.Event = at_work) -> None:
            async with database.write() as session:
                await session.execute(ADD)
                at_work.set()
                await (session.execute(text(statement)) if statement else asyncio.Event().wait())

        task = asyncio.create_task(work())
        await at_work.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await things(admin) == 0
        async with database.write() as session:
            assert (await session.execute(text("select 1"))).scalar_one() == 1

    async def all_idle() -> bool:
        return {row["state"] for row in await backends(admin)} <= {"idle"}

    await eventually(all_idle)
    assert database.engine.pool.checkedout() == 0


async def test_cancelling_the_driver_in_a_set_based_statement_rolls_back(
    system: Database, admin: Connection, eventually: Callable
):
    async def work() -> None:
        async with system.write() as session:
            await session.execute(ADD)
            await (await driver_connection(session)).execute("select pg_sleep(60)")

    task = asyncio.create_task(work())

    async def asleep() -> bool:
        return any("pg_sleep" in row["query"] and row["state"] == "active" for row in await backends(admin))

    await eventually(asleep)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    async def nothing_runs() -> bool:
        return {row["state"] for row in await backends(admin)} <= {"idle"}

    await eventually(nothing_runs)
    assert await things(admin) == 0
    await system.ping()


async def test_a_failed_commit_raises_and_leaves_nothing(system: Database, admin: Connection, alter: Callable):
    await alter(
        """
        create function crm.refuse() returns trigger language plpgsql as
          $$ begin raise exception 'not today' using errcode = 'check_violation'; end $$;
        create constraint trigger refuse after insert on crm.thing deferrable initially deferred
          for each row execute function crm.refuse();
        """,
        "drop function crm.refuse cascade",
    )
    seen: list[str] = []

    async def insert() -> None:
        async with system.write() as session:
            await session.execute(ADD)
            seen.append("inserted")

    with pytest.raises(IntegrityError, match="not today"):
        await insert()
    assert seen == ["inserted"]
    assert await things(admin) == 0


async def test_a_read_session_refuses_writes(system: Database, admin: Connection):
    with pytest.raises(DBAPIError, match="read-only transaction"):
        async with system.read() as session:
            await session.execute(ADD)
    async with system.write() as session:
        await session.execute(ADD)
    assert await things(admin) == 1


async def test_driver_connection_refuses_a_session_without_a_transaction(system: Database):
    async with system._sessions() as session:
        with pytest.raises(RuntimeError, match="no transaction"):
            await driver_connection(session)


# --- who acts


async def test_the_actor_is_forgotten_with_the_transaction(scratch: TestDatabase, opened: Callable[..., Database]):
    database = opened(scratch.api_url, pool_size=1)
    tenant, partner = uuid4(), uuid4()
    actor = Actor(tenant, partner, "user-1", frozenset({"MANAGER", "ADMIN"}))
    async with database.write(actor) as session:
        assert (await session.execute(SETTINGS)).scalar_one() == [str(tenant), str(partner), "user-1", "ADMIN,MANAGER"]
        first = await (await driver_connection(session)).fetchval("select pg_backend_pid()")
    async with database._sessions() as session:
        assert (await session.execute(text("select pg_backend_pid()"))).scalar_one() == first
        assert (await session.execute(SETTINGS)).scalar_one() in ([""] * 4, [None] * 4)
    async with database.read() as session:
        assert (await session.execute(SETTINGS)).scalar_one() == [""] * 4


async def test_the_actor_is_forgotten_after_a_failure(scratch: TestDatabase, opened: Callable[..., Database]):
    database = opened(scratch.api_url, pool_size=1)
    with pytest.raises(DBAPIError):
        async with database.write(Actor(uuid4(), None, "user-1")) as session:
            await session.execute(text("select 1 / 0"))
    async with database._sessions() as session:
        assert (await session.execute(SETTINGS)).scalar_one() in ([""] * 4, [None] * 4)


# --- waking the relay


async def test_on_commit_is_called_once_per_commit_that_emitted(
    scratch: TestDatabase, opened: Callable[..., Database], admin: Connection
):
    seen: list[int] = []
    counted: list[int] = []
    database = opened(scratch.system_url, on_commit=lambda: seen.append(1))
    async with database.write() as session:
        await session.execute(ADD)
    assert seen == []
    with contextlib.suppress(LookupError):
        async with database.write() as session:
            mark_emitted(session)
            raise LookupError
    assert seen == []
    async with database.write() as session:
        mark_emitted(session)
        mark_emitted(session)
        await session.execute(ADD)
        counted.append(len(seen))
    assert counted == [0]
    assert seen == [1]
    assert await things(admin) == 2


# --- a server that goes away


async def test_the_next_use_works_after_all_backends_were_terminated(system: Database, admin: Connection):
    async with system.read() as one, system.read() as two:
        await one.execute(text("select 1"))
        await two.execute(text("select 1"))
    assert await kill(admin) == 2
    for _ in range(3):
        async with system.write() as session:
            await session.execute(ADD)
    assert await things(admin) == 3


@pytest.mark.parametrize("through_the_driver", [False, True], ids=["session", "driver"])
async def test_a_backend_terminated_in_a_transaction_is_infrastructure(
    system: Database, admin: Connection, through_the_driver: bool
):
    async def work() -> None:
        async with system.write() as session:
            await session.execute(ADD)
            await kill(admin)
            if through_the_driver:
                await (await driver_connection(session)).execute("select 1")
            else:
                await session.execute(text("select 1"))

    with pytest.raises((DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError)) as caught:
        await work()
    assert is_infrastructure(caught.value)
    assert await things(admin) == 0
    await system.ping()


async def test_a_full_pool_is_infrastructure(scratch: TestDatabase, opened: Callable[..., Database]):
    database = opened(scratch.system_url, pool_size=1)
    database.engine.pool._timeout = 0.01
    async with database.read(), database.read():
        with pytest.raises(PoolTimeout) as caught:
            await database.ping()
    assert is_infrastructure(caught.value)


async def test_a_server_that_is_not_there_is_infrastructure(opened: Callable[..., Database]):
    with pytest.raises(OSError, match=r"refused|Connect") as caught:
        await opened("postgresql://nobody@127.0.0.1:1/none").ping()
    assert is_infrastructure(caught.value)


@pytest.mark.parametrize(
    "statement",
    [
        "select 1 / 0",
        "select * from crm.nothing",
        "insert into crm.thing (id, rank, worth) values (gen_random_uuid(), 1, -1)",
    ],
)
async def test_what_the_data_did_is_not_infrastructure(system: Database, statement: str):
    with pytest.raises(DBAPIError) as caught:
        async with system.write() as session:
            await session.execute(text(statement))
    assert not is_infrastructure(caught.value)


async def test_an_error_does_not_repeat_the_values_of_its_statement(system: Database):
    with pytest.raises(DBAPIError) as caught:
        async with system.write() as session:
            await session.execute(
                text("select cast(:secret as integer) / 0 where :other > ''"), {"secret": 7, "other": "hunter2"}
            )
    assert "hunter2" not in str(caught.value)


def test_an_address_is_shown_without_user_and_password():
    assert safe_address("postgresql://user:secret@db.internal:6432/pin") == "db.internal:6432/pin"
    assert safe_address("postgresql://user:secret@db.internal/pin") == "db.internal:5432/pin"
    assert "secret" not in safe_address("postgresql://user:secret@/pin")


async def test_a_database_that_offers_no_tls_is_not_used_without_it(scratch: TestDatabase):
    address = scratch.server.url("crm_system", scratch.name)
    strict = Database(f"{address}?sslmode=require", application_name="strict")
    with pytest.raises(Exception, match="SSL"):
        await strict.ping()
    await strict.close()
    lenient = Database(f"{address}?sslmode=disable", application_name="lenient")
    await lenient.ping()
    await lenient.close()


async def test_sessions_read_what_is_committed_whatever_the_servers_default(
    scratch: TestDatabase, admin: "asyncpg.Connection[asyncpg.Record]", opened: Callable[..., Database]
) -> None:
    """Under REPEATABLE READ a claim of rows that others change fails with serialization errors."""
    await admin.execute(f"alter database \"{scratch.name}\" set default_transaction_isolation = 'repeatable read'")
    try:
        database = opened(scratch.system_url)
        for session_of in (database.write, database.read):
            async with session_of() as session:
                level = (await session.execute(text("show transaction_isolation"))).scalar_one()
                assert level == "read committed"
    finally:
        await admin.execute(f'alter database "{scratch.name}" reset default_transaction_isolation')


async def swallowing(system: Database) -> None:
    """Write, then go on after a statement that the database refused."""
    async with system.write() as session:
        await session.execute(ADD)
        with contextlib.suppress(asyncpg.CheckViolationError):
            await (await driver_connection(session)).execute(
                "insert into crm.thing (id, rank, worth) values (gen_random_uuid(), 1, -1)"
            )


async def test_a_commit_that_the_server_answers_with_rollback_is_an_error(system: Database, admin: Connection):
    with pytest.raises(DBAPIError) as raised:
        await swallowing(system)
    assert isinstance(driver_error(raised.value), asyncpg.InFailedSQLTransactionError)
    assert await things(admin) == 0
    async with system.write() as session:
        await session.execute(ADD)
    assert await things(admin) == 1, "the connection is fit for use"
