"""timeline-overdue beside others: rows that someone holds, several processes at once, the single-runner lock."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from crm_world import World, scrape

from chassis.jobs import Run
from chassis.runtime import Stop
from crm import commands
from crm.domain import OverdueLimits

LOCK = "Pin:lock:job:scheduled:crm-timeline-overdue"
LOCKS_OF = "select locktype from pg_locks where pid = $1 and locktype = 'advisory'"


@asynccontextmanager
async def batch_held_open(world: World):
    """Run one batch of two in a process of its own and keep its transaction open for the block; yields its result."""
    run = Run(uuid4(), world.now, Stop(), lambda: None)
    async with world.system().write() as session:
        yield await commands.mark_overdue_steps(session, run, OverdueLimits(2, 1), None)


@asynccontextmanager
async def audit_log_locked(world: World):
    """Let every writer of the audit log wait: a batch stands still between its claim and its commit."""
    async with world.admin.transaction():
        await world.admin.execute("lock table crm.audit_log in access exclusive mode")
        yield


def told(world_outbox: list[dict]) -> list[UUID]:
    """Return the steps that the outbox announces."""
    return [UUID(row["payload"]["TimelineEventId"]) for row in world_outbox]


@pytest.mark.req("TLO-12", "TLO-32")
async def test_rows_that_someone_holds_are_skipped_and_counted(world: World) -> None:
    steps = await world.due_steps(5)
    job = world.job()
    async with world.admin.transaction():
        await world.admin.execute(
            "select from crm.deal_timeline_event where id = any($1::uuid[]) for update", [steps[0], steps[3]]
        )
        assert await world.cycle(job) == {"processed": 3, "batches": 1, "skipped_locked": 2, "failed": 0}
    samples = await scrape(job)
    assert samples["crm_timeline_overdue_skip_locked_total"] == 2
    assert samples["crm_timeline_overdue_backlog"] == 2
    assert await world.steps_in("InProgress") == {steps[0], steps[3]}
    assert (await world.cycle(job))["processed"] == 2, "the next cycle takes them"


async def test_only_rows_among_the_first_of_a_batch_count_as_skipped(world: World) -> None:
    """Those behind are nobody's loss: the batch would not have reached them."""
    steps = await world.due_steps(6)
    async with world.admin.transaction():
        await world.admin.execute("select from crm.deal_timeline_event where id = $1 for update", steps[5])
        counts = await world.run_job(batch_size=3, max_batches=1)
        assert counts == {"processed": 3, "batches": 1, "skipped_locked": 0, "failed": 0}
        await world.admin.execute("select from crm.deal_timeline_event where id = $1 for update", steps[3])
        counts = await world.run_job(batch_size=3, max_batches=1)
        assert counts == {"processed": 1, "batches": 1, "skipped_locked": 2, "failed": 0}


@pytest.mark.req("TLO-12", "TLO-32")
async def test_parallel_batches_take_disjoint_rows(world: World) -> None:
    steps = await world.due_steps(5)
    async with batch_held_open(world) as first:
        assert first.processed_count == 2
        assert told(await world.outbox()) == [], "the first is not committed"
        second = await world.run_job(batch_size=2, max_batches=1)
        assert second == {"processed": 2, "batches": 1, "skipped_locked": 2, "failed": 0}
        assert told(await world.outbox()) == steps[2:4]
    assert sorted(told(await world.outbox())) == sorted(steps[:4])
    assert await world.steps_in("Overdue") == set(steps[:4])


@pytest.mark.req("TLO-12", "TLO-33")
async def test_process_that_finds_all_rows_taken_has_an_empty_batch(world: World) -> None:
    await world.due_steps(2)
    async with batch_held_open(world):
        counts = await world.run_job(batch_size=2)
        assert counts == {"processed": 0, "batches": 1, "skipped_locked": 2, "failed": 0}


@pytest.mark.req("TLO-12", "TLO-43")
async def test_two_processes_at_once_move_every_row_once(world: World) -> None:
    deals = [await world.deal() for _ in range(4)]
    steps = [step for deal in deals for step in await world.due_steps(60, deal)]
    jobs = [world.job(batch_size=7, max_batches=100) for _ in range(2)]
    counts = await asyncio.gather(*(world.cycle(job) for job in jobs))
    assert sum(count["processed"] for count in counts) == len(steps)
    assert await world.steps_in("Overdue") == set(steps)
    assert sorted(told(await world.outbox())) == sorted(steps)
    assert len({row["event_id"] for row in await world.outbox()}) == len(steps)
    assert sorted(row["entity_id"] for row in await world.audit()) == sorted(steps)


@pytest.mark.req("TLO-32", "TLO-42", "TLO-54")
async def test_rows_stay_locked_until_their_batch_has_committed(world: World, eventually) -> None:
    steps = await world.due_steps(5)
    job = world.job(batch_size=2)
    async with audit_log_locked(world):
        cycle = asyncio.create_task(world.cycle(job))
        await eventually(world.blocked_pid)
        free = await world.free_steps()
        assert free == set(steps[2:]), "the batch holds its own rows and no others"
        assert await world.steps_in("Overdue") == set()
    assert (await cycle)["processed"] == 5
    assert await world.free_steps() == set(steps)


@pytest.mark.req("TLO-07", "TLO-42")
async def test_step_that_a_command_is_closing_is_not_overwritten(world: World) -> None:
    deal = await world.deal()
    step = await world.step(deal, due=world.ago(hours=1))
    job = world.job()
    async with world.admin.transaction():
        await world.admin.execute(
            "update crm.deal_timeline_event set status = 'Done', completed_at = $2, updated_at = $2 where id = $1",
            step,
            world.now,
        )
        assert await world.cycle(job) == {"processed": 0, "batches": 1, "skipped_locked": 1, "failed": 0}
    done = await world.step_row(step)
    assert await world.cycle(job) == {"processed": 0, "batches": 1, "skipped_locked": 0, "failed": 0}
    assert (await world.step_row(step), done["status"]) == (done, "Done")
    assert await world.outbox() == []


@pytest.mark.req("TLO-42")
async def test_command_waits_for_the_batch_and_closes_what_it_made_overdue(world: World, eventually) -> None:
    deal = await world.deal()
    step = await world.step(deal, due=world.ago(hours=1))
    body = {"type": "DocumentUploaded", "occurredAt": world.now.isoformat()}
    client = world.client()
    async with batch_held_open(world) as batch:
        assert batch.processed_count == 1
        closing = asyncio.create_task(client.post(f"/v1/deals/{deal}/timeline", json=body))
        await eventually(world.blocked_pid)
        assert not closing.done()
    assert (await closing).status_code == 201
    assert (await world.step_row(step))["status"] == "Done"
    overdue, added, done = await world.outbox()
    assert (overdue["type"], added["type"], done["type"]) == (
        "pin.crm.timeline-overdue.v1", "crm.deal.step-added", "crm.deal.step-done",
    )  # fmt: skip
    assert done["payload"]["WasOverdue"] is True


@pytest.mark.req("TLO-11")
async def test_no_advisory_lock_is_taken_by_default(world: World, eventually) -> None:
    await world.due_steps(1)
    assert world.settings().job_timeline_overdue_single_runner is False
    async with audit_log_locked(world):
        cycle = asyncio.create_task(world.run_job())
        pid = await eventually(world.blocked_pid)
        assert await world.admin.fetch(LOCKS_OF, pid) == []
    assert (await cycle)["processed"] == 1


@pytest.mark.req("TLO-16")
async def test_single_runner_holds_its_lock_for_the_batch(world: World, eventually) -> None:
    await world.due_steps(1)
    try_lock = f"select pg_try_advisory_xact_lock(hashtextextended('{LOCK}', 0))"
    async with audit_log_locked(world):
        cycle = asyncio.create_task(world.run_job(job_timeline_overdue_single_runner=True))
        pid = await eventually(world.blocked_pid)
        assert len(await world.admin.fetch(LOCKS_OF, pid)) == 1
        assert await world.admin.fetchval(try_lock) is False
    assert (await cycle)["processed"] == 1
    assert await world.admin.fetchval(try_lock) is True, "it ended with the batch"


@pytest.mark.req("TLO-16")
async def test_single_runner_leaves_the_work_to_who_holds_the_lock(world: World) -> None:
    steps = await world.due_steps(3)
    runner = world.job(job_timeline_overdue_single_runner=True)
    before = await world.everything()
    await world.admin.execute(f"select pg_advisory_lock(hashtextextended('{LOCK}', 0))")
    counts = await world.cycle(runner)
    assert (counts["processed"], counts["skipped_locked"], counts["failed"]) == (0, 0, 0)
    assert await world.everything() == before
    samples = await scrape(runner)
    assert samples["crm_timeline_overdue_single_runner_skips_total"] == 1
    assert samples["crm_timeline_overdue_errors_total"] == 0
    assert (await world.run_job(max_batches=1, batch_size=1))["processed"] == 1, "the option is off elsewhere"
    await world.admin.execute("select pg_advisory_unlock_all()")
    assert (await world.cycle(runner))["processed"] == 2
    assert await world.steps_in("Overdue") == set(steps)


async def test_a_closer_that_waited_while_its_step_became_overdue_completes_it_after_that(
    own_world: World, eventually: Callable[..., Awaitable[Any]]
) -> None:
    deal = await own_world.deal()
    step = await own_world.step(deal, due=own_world.now + timedelta(seconds=2))
    client = own_world.client()
    body = {"type": "DocumentUploaded", "occurredAt": own_world.now.isoformat()}
    async with own_world.admin.transaction():
        await own_world.admin.execute("select from crm.deal where id = $1 for update", deal)
        closing = asyncio.create_task(client.post(f"/v1/deals/{deal}/timeline", json=body))
        await eventually(own_world.blocked_pid)
        overdue_at = own_world.clock.advance(timedelta(seconds=3))
        assert (await own_world.run_job())["processed"] == 1
    assert (await closing).status_code == 201
    row = await own_world.step_row(step)
    assert (row["status"], row["completed_at"], row["updated_at"]) == ("Done", overdue_at, overdue_at)
    done = [event for event in await own_world.outbox() if event["type"] == "crm.deal.step-done"]
    assert done[0]["payload"]["WasOverdue"] is True
    assert done[0]["payload"]["CompletedAt"] > "2026-11-30T09:00:02"
