"""Rows written with COPY: their text and bytes, their number, and what a failure leaves."""

import contextlib
from collections.abc import Iterator, Sequence
from uuid import UUID, uuid4

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import LINES_AT_ONCE, Database, copy_bytes, copy_lines, copy_text, driver_connection
from chassis.gathering import gather, gathered, is_gathering

Connection = asyncpg.Connection


async def things(admin: Connection) -> int:
    return await admin.fetchval("select count(*) from crm.thing")


async def test_copied_rows_keep_their_text_and_bytes(system: Database, admin: Connection):
    awkward = ["", "\\", "\\N", "a\tb\nc\rd", "Ж\\x41", "\\."]
    ids = [UUID(int=n) for n in range(len(awkward))]
    async with system.write() as session:
        lines = [f"{key}\t{n}\t{copy_text(note)}" for n, (key, note) in enumerate(zip(ids, awkward, strict=True))]
        await copy_lines(session, "crm.thing", ("id", "rank", "note"), lines)
    assert [row["note"] for row in await admin.fetch("select note from crm.thing order by rank")] == awkward
    raw = bytes(range(256))
    async with system.write() as session:
        connection = await driver_connection(session)
        await connection.execute("create temp table raw (b bytea)")
        await connection.execute("insert into raw values ($1)", raw)
        await copy_lines(session, "pg_temp.raw", ("b",), [copy_bytes(raw)])
        assert [row["b"] for row in await connection.fetch("select b from raw")] == [raw, raw]


async def test_a_copied_row_that_is_refused_takes_all_with_it(system: Database, admin: Connection):
    async def insert() -> None:
        async with system.write() as session:
            lines = [f"{uuid4()}\t1\t1", f"{uuid4()}\t1\t-1"]
            await copy_lines(session, "crm.thing", ("id", "rank", "worth"), lines)

    with pytest.raises(asyncpg.CheckViolationError):
        await insert()
    assert await things(admin) == 0


async def _copy_but_fail_at(session: AsyncSession, count: int) -> None:
    def lines() -> Iterator[str]:
        for _ in range(count):
            yield f"{uuid4()}\t1"
        raise LookupError("no more")

    with pytest.raises(LookupError):
        await copy_lines(session, "crm.thing", ("id", "rank"), lines())


async def test_lines_that_fail_while_they_are_made_leave_nothing_of_themselves(system: Database, admin: Connection):
    async with system.write() as session:
        await _copy_but_fail_at(session, LINES_AT_ONCE)
        await copy_lines(session, "crm.thing", ("id", "rank"), [f"{uuid4()}\t1"])
        async with gathered(session):
            await _copy_but_fail_at(session, 2)
    assert await things(admin) == 1
    with pytest.raises(SQLAlchemyError):  # noqa: PT012 - the failed statement shows itself at the next one
        async with system.write() as session:
            await _copy_but_fail_at(session, 3 * LINES_AT_ONCE)
            await session.execute(text("select 1"))
    assert await things(admin) == 1


@pytest.mark.parametrize("count", [LINES_AT_ONCE, LINES_AT_ONCE + 1, 2 * LINES_AT_ONCE])
async def test_lines_of_any_number_are_copied_once_each(system: Database, admin: Connection, count: int):
    async with system.write() as session:
        await copy_lines(session, "crm.thing", ("id", "rank"), (f"{uuid4()}\t{n}" for n in range(count)))
    assert [row["rank"] for row in await admin.fetch("select rank from crm.thing order by rank")] == list(range(count))


async def test_what_a_savepoint_undoes_is_not_gathered(system: Database, admin: Connection):
    async with system.write() as session, gathered(session):
        for rank, undone in enumerate((False, True, False)):
            with contextlib.suppress(LookupError):
                async with session.begin_nested():
                    await copy_lines(session, "crm.thing", ("id", "rank"), [f"{uuid4()}\t{rank}"])
                    async with session.begin_nested():
                        await copy_lines(session, "crm.thing", ("id", "rank"), [f"{uuid4()}\t{rank + 10}"])
                    if undone:
                        raise LookupError
    ranks = await admin.fetch("select rank from crm.thing order by rank")
    assert [row["rank"] for row in ranks] == [0, 2, 10, 12]


async def test_a_function_gets_all_that_a_block_was_given_for_it_once_and_nothing_that_was_undone(system: Database):
    calls: list[list[int]] = []

    async def write(_: AsyncSession, items: Sequence[int]) -> None:
        calls.append(list(items))

    async with system.write() as session:
        await gather(session, write, [1, 2])
        assert calls == [[1, 2]], "outside of a block at once"
        async with gathered(session):
            assert is_gathering(session)
            await gather(session, write, [3])
            with contextlib.suppress(LookupError):
                async with session.begin_nested():
                    await gather(session, write, [4])
                    raise LookupError
            await gather(session, write, iter([5]))
            assert len(calls) == 1
        assert not is_gathering(session)
    assert calls == [[1, 2], [3, 5]]


async def test_functions_write_before_lines_are_copied_and_may_copy_lines_themselves(
    system: Database, admin: Connection
):
    async def write(session: AsyncSession, items: Sequence[int]) -> None:
        assert await things(admin) == 0
        await copy_lines(session, "crm.thing", ("id", "rank"), [f"{uuid4()}\t{item}" for item in items])

    async with system.write() as session, gathered(session):
        await copy_lines(session, "crm.thing", ("id", "rank"), [f"{uuid4()}\t2"])
        await gather(session, write, [1])
    rows = await admin.fetch("select rank from crm.thing order by ctid")
    assert [row["rank"] for row in rows] == [1, 2]


async def test_a_block_that_fails_writes_nothing_and_is_over(system: Database):
    calls: list[list[int]] = []

    async def write(_: AsyncSession, items: Sequence[int]) -> None:
        calls.append(list(items))

    async with system.write() as session:
        with contextlib.suppress(LookupError):
            async with gathered(session):
                await gather(session, write, [1])
                raise LookupError
        assert not is_gathering(session)
    assert calls == []
