"""Skip-locked batches on a small table: who claims what, what is counted, and what one bad row can and can't do."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.batching import BatchOutcome, Claimed, SkipLocked
from chassis.db import Database, driver_connection, is_infrastructure
from chassis.ids import new_id
from chassis.jobs import Run
from chassis.outbox import MessageRefused
from chassis.runtime import Stop
from chassis.testing.plugin import TestDatabase

Connection = asyncpg.Connection
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
MOVE = """
update crm.thing set state = 'done', note = u.note from unnest($1::uuid[], $2::text[]) as u(id, note)
where thing.id = u.id
"""

THINGS = SkipLocked(
    schema="crm",
    job="moving",
    table="crm.thing",
    columns=("t.id", "t.rank", "t.note"),
    where="t.state = 'new' and t.rank < $4",
    order=("t.rank", "t.id"),
    arguments=1,
    cursor_types=("integer", "uuid"),
)


def run() -> Run:
    return Run(new_id(), NOW, Stop(), lambda: None)


async def fill(admin: Connection, count: int, note: str = "") -> list[UUID]:
    """Put things 0..count-1 into the table; return their ids by rank."""
    ids = [UUID(int=n + 1) for n in range(count)]
    await admin.executemany(
        "insert into crm.thing (id, rank, note) values ($1, $2, $3)",
        [(thing, rank, note) for rank, thing in enumerate(ids)],
    )
    return ids


async def claim(session: AsyncSession, cycle: Run, limit: int, **more: object) -> Claimed:
    return await THINGS.claim(session, cycle, limit=limit, arguments=(10**6,), **more)


def ranks(claimed: Claimed) -> list[int]:
    return [row["rank"] for row in claimed.rows]


class Work:
    """One job's batch: a guard that refuses some ranks, and a set-based write that remembers how it was called."""

    def __init__(self, system: Database, bad: Sequence[int] = (), note: str = "moved") -> None:
        self._system = system
        self.bad = set(bad)
        self.note = note
        self.writes: list[int] = []

    def guard(self, row: asyncpg.Record) -> tuple[UUID, str]:
        if row["rank"] in self.bad:
            raise LookupError(f"rank {row['rank']} is not to be moved")
        return row["id"], self.note

    async def write(self, session: AsyncSession, effects: Sequence[tuple[UUID, str]]) -> None:
        self.writes.append(len(effects))
        connection = await driver_connection(session)
        await connection.execute(MOVE, [thing for thing, _ in effects], [note for _, note in effects])

    async def batch(
        self, cycle: Run, limit: int, after: Sequence[object] | None = None
    ) -> tuple[Claimed, BatchOutcome]:
        async with self._system.write() as session:
            claimed = await claim(session, cycle, limit, after=after)
            outcome = await THINGS.apply(session, cycle, claimed, guard=self.guard, write=self.write)
        return claimed, outcome


async def done(admin: Connection) -> list[int]:
    return [row["rank"] for row in await admin.fetch("select rank from crm.thing where state = 'done' order by rank")]


async def poison(admin: Connection) -> dict[int, tuple[int, str]]:
    found = await admin.fetch(
        "select rank, failures, last_error from crm.job_poison p join crm.thing t on t.id = p.id order by rank"
    )
    return {row["rank"]: (row["failures"], row["last_error"]) for row in found}


# --- claims


async def test_a_claim_is_in_order_and_limited(system: Database, admin: Connection):
    await fill(admin, 10)
    async with system.write() as session:
        claimed = await claim(session, run(), 4)
    assert ranks(claimed) == [0, 1, 2, 3]
    assert claimed.has_more
    assert claimed.skipped_locked == 0


async def test_a_claim_that_is_not_filled_has_no_more(system: Database, admin: Connection):
    await fill(admin, 4)
    async with system.write() as session:
        assert (await claim(session, run(), 4)).has_more
    async with system.write() as session:
        assert not (await claim(session, run(), 5)).has_more


async def test_a_claim_of_nothing_is_empty(system: Database, admin: Connection):
    async with system.write() as session:
        claimed = await claim(session, run(), 5)
    assert (claimed.rows, claimed.skipped_locked, claimed.has_more) == ([], 0, False)


async def test_the_predicate_takes_its_arguments(system: Database, admin: Connection):
    await fill(admin, 10)
    async with system.write() as session:
        claimed = await THINGS.claim(session, run(), limit=100, arguments=(3,))
    assert ranks(claimed) == [0, 1, 2]


async def test_a_cycle_goes_on_after_its_last_row(system: Database, admin: Connection):
    ids = await fill(admin, 10)
    async with system.write() as session:
        claimed = await claim(session, run(), 3, after=(4, ids[4]))
    assert ranks(claimed) == [5, 6, 7]


async def test_rows_of_equal_rank_are_passed_by_id(system: Database, admin: Connection):
    ids = await fill(admin, 5)
    await admin.execute("update crm.thing set rank = 7")
    async with system.write() as session:
        first = await claim(session, run(), 2)
        second = await claim(session, run(), 9, after=(7, first.rows[-1]["id"]))
    assert [row["id"] for row in first.rows + second.rows] == ids


async def test_concurrent_claims_are_disjoint_and_count_exactly_what_they_skipped(system: Database, admin: Connection):
    await fill(admin, 20)
    async with system.write() as one, system.write() as two, system.write() as three:
        first, second, third = [await claim(session, run(), 5) for session in (one, two, three)]
    assert ranks(first) == [0, 1, 2, 3, 4]
    assert ranks(second) == [5, 6, 7, 8, 9]
    assert ranks(third) == [10, 11, 12, 13, 14]
    assert [claimed.skipped_locked for claimed in (first, second, third)] == [0, 5, 5]


async def test_only_locked_rows_of_the_head_are_counted(system: Database, admin: Connection):
    ids = await fill(admin, 10)
    async with system.write() as holder:
        lock = "select from crm.thing where id = any($1) for update"
        await (await driver_connection(holder)).execute(lock, [ids[1], ids[3], ids[8]])
        async with system.write() as session:
            claimed = await claim(session, run(), 5)
    assert ranks(claimed) == [0, 2, 4, 5, 6]
    assert claimed.skipped_locked == 2


async def test_when_everything_is_locked_nothing_is_claimed_and_nobody_waits(system: Database, admin: Connection):
    await fill(admin, 3)
    async with system.write() as holder, system.write() as session:
        await claim(holder, run(), 3)
        async with asyncio.timeout(5):
            claimed = await claim(session, run(), 3)
    assert (claimed.rows, claimed.skipped_locked, claimed.has_more) == ([], 3, False)


async def test_a_row_that_was_moved_meanwhile_is_not_claimed(system: Database, admin: Connection):
    ids = await fill(admin, 3)
    async with system.write() as holder:
        await (await driver_connection(holder)).execute("update crm.thing set state = 'done' where id = $1", ids[0])
        async with system.write() as session:
            assert ranks(await claim(session, run(), 3)) == [1, 2]
    async with system.write() as session:
        assert ranks(await claim(session, run(), 3)) == [1, 2]


async def test_two_workers_move_every_row_once(system: Database, admin: Connection):
    await fill(admin, 200)
    work = [Work(system, note=f"worker {n}") for n in range(2)]

    async def drain(worker: Work) -> int:
        cycle, moved = run(), 0
        while True:
            claimed, outcome = await worker.batch(cycle, 7)
            moved += len(outcome.written)
            if not claimed.rows and not claimed.skipped_locked:
                return moved

    moved = await asyncio.gather(*map(drain, work))
    assert sum(moved) == 200
    assert await done(admin) == list(range(200))


# --- bad rows


async def test_a_row_whose_guard_raises_is_left_out_and_the_rest_is_committed(system: Database, admin: Connection):
    await fill(admin, 5)
    work = Work(system, bad=[1, 3])
    cycle = run()
    _, outcome = await work.batch(cycle, 5)
    assert await done(admin) == [0, 2, 4]
    assert len(outcome.written) == 3
    assert [str(error) for _, error in outcome.failed] == ["rank 1 is not to be moved", "rank 3 is not to be moved"]
    assert await poison(admin) == {
        1: (1, "LookupError: rank 1 is not to be moved"),
        3: (1, "LookupError: rank 3 is not to be moved"),
    }
    assert work.writes == [3]
    stored = await admin.fetchrow("select * from crm.job_poison limit 1")
    assert (stored["job"], stored["last_run_id"]) == ("moving", cycle.id)
    assert stored["first_failed_at"] == stored["last_failed_at"] == NOW


async def test_when_every_guard_raises_nothing_is_written(system: Database, admin: Connection):
    await fill(admin, 3)
    work = Work(system, bad=range(3))
    _, outcome = await work.batch(run(), 3)
    assert (outcome.written, work.writes) == ([], [])
    assert len(await poison(admin)) == 3


async def test_a_database_error_is_narrowed_down_to_the_bad_row(system: Database, admin: Connection, alter: Callable):
    await fill(admin, 5)
    await admin.execute("update crm.thing set worth = 0 where rank = 2")
    await alter(
        "alter table crm.thing add constraint ck_stays check (worth is null or state = 'new')",
        "alter table crm.thing drop constraint ck_stays",
    )
    work = Work(system)
    _, outcome = await work.batch(run(), 5)
    assert await done(admin) == [0, 1, 3, 4]
    assert work.writes == [5, 1, 1, 1, 1, 1]
    assert len(outcome.written) == 4
    [(thing, error)] = outcome.failed
    assert thing == UUID(int=3)
    assert isinstance(error, asyncpg.CheckViolationError)
    assert await poison(admin) == {2: (1, (await poison(admin))[2][1])}
    assert "CheckViolationError" in (await poison(admin))[2][1]
    await work.batch(run(), 5)
    assert work.writes[6:] == [1, 1], "only the poisoned row is left, and it is tried once more"


async def test_a_message_that_is_refused_leaves_out_its_row_alone(system: Database, admin: Connection):
    await fill(admin, 3)

    class Emitting(Work):
        async def write(self, session: AsyncSession, effects: Sequence[tuple[UUID, str]]) -> None:
            await super().write(session, effects)
            if UUID(int=2) in {thing for thing, _ in effects}:
                raise MessageRefused("too large")

    await Emitting(system).batch(run(), 3)
    assert await done(admin) == [0, 2]
    assert await poison(admin) == {1: (1, "MessageRefused: too large")}


async def test_an_infrastructure_error_propagates_and_keeps_nothing(system: Database, admin: Connection):
    await fill(admin, 4)

    class Dying(Work):
        async def write(self, session: AsyncSession, effects: Sequence[tuple[UUID, str]]) -> None:
            await super().write(session, effects)
            pid = await (await driver_connection(session)).fetchval("select pg_backend_pid()")
            await admin.execute("select pg_terminate_backend($1)", pid)
            await super().write(session, effects)

    work = Dying(system, bad=[0])
    with pytest.raises(Exception, match=r"terminat|closed|connection") as caught:
        await work.batch(run(), 4)
    assert is_infrastructure(caught.value)
    assert work.writes == [3, 3], "no row is tried by itself when the database is away"
    assert await done(admin) == []
    assert await poison(admin) == {}


async def test_an_error_that_is_neither_data_nor_guard_rolls_back_whole(system: Database, admin: Connection):
    await fill(admin, 4)

    class Broken(Work):
        async def write(self, session: AsyncSession, effects: Sequence[tuple[UUID, str]]) -> None:
            await super().write(session, effects)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Broken(system, bad=[0]).batch(run(), 4)
    assert await done(admin) == []
    assert await poison(admin) == {}


# --- poison that is known


async def test_a_poisoned_row_is_tried_once_per_cycle(system: Database, admin: Connection):
    await fill(admin, 3)
    work = Work(system, bad=[1])
    cycle = run()
    tried = [ranks((await work.batch(cycle, 10))[0]) for _ in range(3)]
    assert tried == [[0, 1, 2], [], []]
    tried = [ranks((await work.batch(cycle, 10))[0]) for cycle in (run(), run())]
    assert tried == [[1], [1]]
    assert (await poison(admin))[1][0] == 3


async def test_poison_fills_at_most_a_tenth_of_a_batch_and_stands_behind_the_healthy(
    system: Database, admin: Connection
):
    await fill(admin, 60)
    work = Work(system, bad=range(20))
    cycle = run()
    while (await work.batch(cycle, 30))[0].rows:
        pass
    assert len(await poison(admin)) == 20
    await admin.execute("update crm.thing set state = 'new' where state = 'done'")
    cycle = run()
    claimed = [ranks((await work.batch(cycle, 30))[0]) for _ in range(3)]
    assert claimed[0] == [*range(20, 47), 0, 1, 2]
    assert claimed[1] == [*range(47, 60), 3, 4, 5]
    assert claimed[2] == [6, 7, 8]


@pytest.mark.parametrize(("limit", "poisoned"), [(1, 0), (2, 1), (9, 1), (10, 1), (19, 1), (20, 2), (100, 10)])
async def test_the_share_of_poison_by_batch_size(system: Database, admin: Connection, limit: int, poisoned: int):
    ids = await fill(admin, 200)
    await admin.execute(
        "insert into crm.job_poison select 'moving', unnest($1::uuid[]), 1, 'x', gen_random_uuid(), $2, $2",
        ids[:50],
        NOW,
    )
    async with system.write() as session:
        claimed = await claim(session, run(), limit)
    assert len(claimed.rows) == limit
    assert sum(row["was_poisoned"] for row in claimed.rows) == poisoned


async def test_poison_at_the_head_never_stops_the_rest(system: Database, admin: Connection):
    await fill(admin, 40)
    work = Work(system, bad=range(30))
    for _ in range(3):
        cycle, after = run(), None
        for _ in range(20):
            claimed, _ = await work.batch(cycle, 10, after)
            healthy = [row for row in claimed.rows if not row["was_poisoned"]]
            after = (healthy[-1]["rank"], healthy[-1]["id"]) if healthy else after
            if not claimed.has_more:
                break
    assert await done(admin) == list(range(30, 40))


async def test_a_healed_row_is_forgotten(system: Database, admin: Connection):
    await fill(admin, 2)
    work = Work(system, bad=[0])
    await work.batch(run(), 5)
    assert list(await poison(admin)) == [0]
    work.bad = set()
    _, outcome = await work.batch(run(), 5)
    assert len(outcome.written) == 1
    assert await poison(admin) == {}
    assert await done(admin) == [0, 1]


async def test_another_jobs_poison_is_not_ours(system: Database, admin: Connection):
    ids = await fill(admin, 2)
    await admin.execute(
        "insert into crm.job_poison values ('another', $1, 1, 'x', gen_random_uuid(), $2, $2)", ids[0], NOW
    )
    async with system.write() as session:
        claimed = await claim(session, run(), 5)
    assert [(row["rank"], row["was_poisoned"]) for row in claimed.rows] == [(0, False), (1, False)]


async def test_a_poisoned_row_that_someone_holds_is_left_to_him(system: Database, admin: Connection):
    await fill(admin, 3)
    work = Work(system, bad=[0])
    await work.batch(run(), 5)
    await admin.execute("update crm.thing set state = 'new'")
    async with system.write() as holder:
        await (await driver_connection(holder)).execute("select from crm.thing where rank = 0 for update")
        claimed, _ = await work.batch(run(), 5)
    assert ranks(claimed) == [1, 2]


async def test_long_errors_are_cut(system: Database, admin: Connection):
    await fill(admin, 1)

    class Wordy(Work):
        def guard(self, row: asyncpg.Record) -> tuple[UUID, str]:
            raise LookupError("x" * 10_000)

    await Wordy(system).batch(run(), 5)
    assert len((await poison(admin))[0][1]) == 500


async def test_an_error_with_a_nul_in_its_text_is_remembered_too(system: Database, admin: Connection):
    await fill(admin, 2)

    class Odd(Work):
        def guard(self, row: asyncpg.Record) -> tuple[UUID, str]:
            if row["rank"] == 0:
                raise LookupError("a\0b\ud800")
            return super().guard(row)

    await Odd(system).batch(run(), 5)
    assert await done(admin) == [1]
    assert list(await poison(admin)) == [0]


async def test_names_of_schema_and_table_need_no_search_path(
    scratch: TestDatabase, opened: Callable[..., Database], admin: Connection, alter: Callable
):
    await fill(admin, 3)
    await alter("alter role crm_system set search_path = pg_temp", "alter role crm_system reset search_path")
    work = Work(opened(scratch.system_url, application_name="elsewhere"), bad=[0])
    await work.batch(run(), 5)
    assert await done(admin) == [1, 2]
