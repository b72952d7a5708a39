"""timeline-overdue when something fails: the batch is one transaction, and one bad row stops nothing."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest
from crm_world import NOBODY_LISTENS, World, driver_of, scrape
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs

REFUSE = """
create function crm.refuse() returns trigger language plpgsql as $$
begin
  if {when} then raise exception using errcode = '{code}', message = 'refused by the test'; end if;
  return new;
end $$;
create trigger refuse before insert on crm.{table} for each row execute function crm.refuse()
"""
DISK_FULL = "53100"
ANY_ERROR = "P0001"


@asynccontextmanager
async def refusing(world: World, table: str, *, when: str = "true", code: str = DISK_FULL):
    """Let the database refuse inserts into a table for the block."""
    await world.admin.execute(REFUSE.format(table=table, when=when, code=code))
    try:
        yield
    finally:
        await world.admin.execute(f"drop trigger refuse on crm.{table}; drop function crm.refuse()")


async def spoil(world: World, *steps: UUID) -> None:
    """Give steps a type that the domain doesn't know."""
    await world.admin.execute(
        "update crm.deal_timeline_event set type = 'Mystery' where id = any($1::uuid[])", list(steps)
    )


async def heal(world: World, *steps: UUID) -> None:
    await world.admin.execute(
        "update crm.deal_timeline_event set type = 'Signed' where id = any($1::uuid[])", list(steps)
    )


# Infrastructure: the batch rolls back whole and the next cycle repeats it.


@pytest.mark.req("TLO-53", "TLO-58")
@pytest.mark.parametrize("table", ["outbox", "audit_log"])
async def test_failed_batch_rolls_back_whole_and_the_next_cycle_repeats_it(world: World, table: str) -> None:
    steps = await world.due_steps(5)
    before = await world.everything()
    job = world.job()
    async with refusing(world, table):
        with pytest.raises((DBAPIError, asyncpg.PostgresError)):
            await world.cycle(job)
        assert await world.everything() == before
        assert await world.free_steps() == set(steps)
    samples = await scrape(job)
    assert (samples["crm_timeline_overdue_errors_total"], samples["crm_timeline_overdue_run_total"]) == (1, 1)
    assert driver_of(job).job.schedule == timedelta(minutes=5)
    world.clock.advance(timedelta(minutes=5))
    assert (await world.cycle(job))["processed"] == 5
    assert await world.steps_in("Overdue") == set(steps)
    assert [UUID(row["payload"]["TimelineEventId"]) for row in await world.outbox()] == steps
    assert {row["payload"]["OverdueAt"] for row in await world.outbox()} == {"2026-11-30T09:05:00Z"}


@pytest.mark.req("TLO-53", "TLO-54")
async def test_batches_before_the_failed_one_stay(world: World) -> None:
    steps = await world.due_steps(6)
    async with refusing(world, "outbox", when=f"convert_from(new.payload, 'UTF8') like '%{steps[4]}%'"):
        with pytest.raises((DBAPIError, asyncpg.PostgresError)):
            await world.run_job(batch_size=2)
        assert await world.steps_in("Overdue") == set(steps[:4])
        assert len(await world.outbox()) == len(await world.audit()) == 4
    assert (await world.run_job(batch_size=2))["processed"] == 2
    assert [UUID(row["payload"]["TimelineEventId"]) for row in await world.outbox()] == steps


@pytest.mark.req("TLO-58a", "TLO-58b", "TLO-58c")
async def test_connection_lost_in_the_middle_of_a_batch_undoes_it(world: World, eventually) -> None:
    steps = await world.due_steps(3)
    before = await world.everything()
    job = world.job()
    async with world.admin.transaction():
        await world.admin.execute("lock table crm.outbox in access exclusive mode")
        cycle = asyncio.create_task(world.cycle(job))
        pid = await eventually(world.blocked_pid)
        assert await world.free_steps() == set(), "the batch holds its rows"
        await world.admin.execute("select pg_terminate_backend($1)", pid)
        with pytest.raises((DBAPIError, asyncpg.PostgresError, OSError)):
            await cycle
    assert await world.everything() == before
    assert await world.free_steps() == set(steps)
    assert (await world.cycle(job))["processed"] == 3, "the same process goes on"
    assert len(await world.outbox()) == 3


@pytest.mark.req("TLO-58a", "TLO-58c")
async def test_worker_repeats_on_its_next_tick_what_failed_on_this_one(world: World, eventually) -> None:
    steps = await world.due_steps(3)
    crm = world.crm("jobs", job_timeline_overdue_interval=0.05)
    errors = driver_of(crm).job.metrics.errors

    async def all_moved() -> bool:
        return await world.steps_in("Overdue") == set(steps)

    async with crm.app.router.lifespan_context(crm.app):
        async with refusing(world, "outbox"):
            await eventually(lambda: errors._value.get() >= 1)
            assert await world.steps_in("Overdue") == set()
        await eventually(all_moved)
    assert len(await world.outbox()) == 3


async def test_cancelled_cycle_leaves_nothing_behind(world: World, eventually) -> None:
    steps = await world.due_steps(3)
    before = await world.everything()
    job = world.job()
    async with world.admin.transaction():
        await world.admin.execute("lock table crm.outbox in access exclusive mode")
        cycle = asyncio.create_task(world.cycle(job))
        await eventually(world.blocked_pid)
        cycle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cycle

    async def unlocked() -> bool:
        return await world.free_steps() == set(steps)

    await eventually(unlocked)
    assert await world.everything() == before
    assert (await world.cycle(job))["processed"] == 3


@pytest.mark.req("TLO-09")
async def test_worker_needs_neither_broker_nor_any_other_service(world: World) -> None:
    """What the others are to know waits in the outbox."""
    await world.due_steps(2)
    crm = world.crm("jobs", "relay", kafka_bootstrap=NOBODY_LISTENS)
    assert (await world.cycle(crm))["processed"] == 2
    assert len(await world.outbox()) == 2


# One bad row.


async def test_poison_row_is_left_out_logged_and_remembered(loose_world: World) -> None:
    world = loose_world
    steps = await world.due_steps(4)
    await spoil(world, steps[1])
    before = await world.step_row(steps[1])
    job = world.job()
    with capture_logs() as logs:
        assert await world.cycle(job) == {"processed": 3, "batches": 1, "skipped_locked": 0, "failed": 1}
    assert await world.steps_in("Overdue") == {*steps} - {steps[1]}
    assert await world.step_row(steps[1]) == before
    assert len(await world.outbox()) == len(await world.audit()) == 3
    (run,) = {row["run_id"] for row in await world.outbox()}
    assert await world.poison() == {
        steps[1]: {
            "job": "timeline-overdue",
            "id": steps[1],
            "failures": 1,
            "last_error": "ValueError: 'Mystery' is not a valid DealTimelineEventType",
            "last_run_id": run,
            "first_failed_at": world.now,
            "last_failed_at": world.now,
        }
    }
    (line,) = [line for line in logs if line["event"] == "item failed"]
    assert (line["log_level"], line["id"], line["job"], line["run_id"]) == (
        "error", str(steps[1]), "timeline-overdue", str(run),
    )  # fmt: skip
    samples = await scrape(job)
    assert samples["crm_timeline_overdue_errors_total"] == 1
    assert samples["crm_timeline_overdue_backlog"] == 1


async def test_poison_row_is_tried_once_per_cycle(loose_world: World) -> None:
    world = loose_world
    steps = await world.due_steps(21)
    await spoil(world, steps[0])
    assert (await world.run_job(batch_size=2))["processed"] == 20
    assert (await world.poison())[steps[0]]["failures"] == 1
    start = world.now
    for cycle in (2, 3):
        world.clock.advance(timedelta(minutes=5))
        later = await world.due_steps(10)
        counts = await world.run_job(batch_size=2)
        assert (counts["processed"], counts["failed"]) == (len(later), 1)
        row = (await world.poison())[steps[0]]
        assert (row["failures"], row["first_failed_at"], row["last_failed_at"]) == (cycle, start, world.now)


@pytest.mark.parametrize(("batch_size", "share"), [(1, 0), (2, 1), (9, 1), (10, 1), (30, 3), (99, 9)])
async def test_poison_fills_at_most_a_tenth_of_a_batch(loose_world: World, batch_size: int, share: int) -> None:
    world = loose_world
    deal = await world.deal()
    poison = await world.due_steps(12, deal)
    await spoil(world, *poison)
    assert (await world.run_job(batch_size=12, max_batches=1))["failed"] == 12
    healthy = await world.due_steps(batch_size, deal)
    counts = await world.run_job(batch_size=batch_size, max_batches=1)
    assert counts == {"processed": batch_size - share, "batches": 1, "skipped_locked": 0, "failed": share}
    assert await world.steps_in("Overdue") == set(healthy[: batch_size - share])


async def test_poison_at_the_head_does_not_starve_what_stands_behind_it(loose_world: World) -> None:
    world = loose_world
    deal = await world.deal()
    steps = await world.due_steps(25, deal)
    await spoil(world, *steps[:20])
    counts = await world.run_job(batch_size=10, max_batches=2)
    assert (counts["processed"], counts["failed"]) == (0, 20), "not known yet: it fills two batches once"
    counts = await world.run_job(batch_size=10, max_batches=1)
    assert (counts["processed"], counts["failed"]) == (5, 1)
    assert await world.steps_in("Overdue") == set(steps[20:])


async def test_healed_row_is_moved_and_forgotten(loose_world: World) -> None:
    world = loose_world
    steps = await world.due_steps(3)
    await spoil(world, *steps[:2])
    await world.run_job()
    assert set(await world.poison()) == set(steps[:2])
    await heal(world, steps[0])
    assert await world.run_job() == {"processed": 1, "batches": 1, "skipped_locked": 0, "failed": 1}
    assert await world.steps_in("Overdue") == {steps[0], steps[2]}
    assert set(await world.poison()) == {steps[1]}
    events = [UUID(row["payload"]["TimelineEventId"]) for row in await world.outbox()]
    assert sorted(events) == sorted([steps[0], steps[2]])


async def test_row_whose_event_the_database_refuses_is_left_out_alone(world: World) -> None:
    steps = await world.due_steps(4)
    refused = f"convert_from(new.payload, 'UTF8') like '%{steps[2]}%'"
    async with refusing(world, "outbox", when=refused, code=ANY_ERROR):
        assert await world.run_job() == {"processed": 3, "batches": 1, "skipped_locked": 0, "failed": 1}
        assert await world.steps_in("InProgress") == {steps[2]}
        assert len(await world.outbox()) == len(await world.audit()) == 3
        assert "refused by the test" in (await world.poison())[steps[2]]["last_error"]
    assert (await world.run_job())["processed"] == 1
    assert await world.poison() == {}


@pytest.mark.req("TLO-58a", "TLO-58c")
@pytest.mark.parametrize(
    ("breaks", "mends"),
    [
        ("revoke insert on crm.outbox from crm_system", "grant insert on crm.outbox to crm_system"),
        ("alter table crm.audit_log rename to gone", "alter table crm.gone rename to audit_log"),
    ],
    ids=["a missing grant", "a missing table"],
)
async def test_what_fails_every_row_blames_none_and_rolls_back(own_world: World, breaks: str, mends: str) -> None:
    due = set(await own_world.due_steps(5))
    await own_world.admin.execute(breaks)
    with pytest.raises(asyncpg.PostgresError):
        await own_world.run_job()
    assert await own_world.poison() == {}
    assert await own_world.steps_in("InProgress") == due
    await own_world.admin.execute(mends)
    assert (await own_world.run_job())["processed"] == 5


async def test_poison_row_that_a_person_settled_is_forgotten(loose_world: World) -> None:
    deal = await loose_world.deal()
    bad = await loose_world.step(deal, due=loose_world.ago(hours=1), kind="Unheard")
    await loose_world.run_job()
    assert set(await loose_world.poison()) == {bad}
    await loose_world.admin.execute(
        "update crm.deal_timeline_event set status = 'Done', completed_at = $2 where id = $1", bad, loose_world.now
    )
    await loose_world.run_job()
    assert await loose_world.poison() == {}
