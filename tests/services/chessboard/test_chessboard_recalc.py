"""project-aggregates-recalc: requests are folded per project after a while, and the count equals a recount."""

import asyncio
import random
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from board_world import World, scrape
from net_pieces import cycle, driver_of, lost, net, run_at

from chassis.outbox import Cause
from chessboard import aggregates
from chessboard.app import Chessboard
from chessboard.domain import StatusSource
from chessboard.repository import Origin, get_for_update, write_changes

JOB = "project-aggregates-recalc"


async def recalc(board: Chessboard) -> dict[str, int]:
    """Run one cycle of the job and return its counts."""
    return (await driver_of(board, JOB).run_once()).counts


async def ask(world: World, project: UUID, **ago: float) -> None:
    """Ask for a project to be counted again."""
    await world.admin.execute(
        "insert into chessboard.project_recalc_request (project_id, requested_at) values ($1, $2)",
        project,
        world.ago(**ago),
    )


async def shown(world: World, project: UUID) -> tuple[int, Any]:
    row = await world.admin.fetchrow("select * from chessboard.project where id = $1", project)
    return row["property_objects_free_count"], row["aggregates_as_of"]


async def recounted(world: World) -> list[UUID]:
    """Return the projects whose count is not what a recount gives."""
    rows = await world.admin.fetch(
        "select p.id from chessboard.project p where p.property_objects_free_count <>"
        " (select count(*) from chessboard.property_object o where o.project_id = p.id and o.status = 'Free')"
    )
    return [row["id"] for row in rows]


@pytest.mark.req("HLD-68")
async def test_a_project_is_counted_thirty_seconds_after_its_first_request(world: World) -> None:
    project = await world.project()
    building = await world.building(project)
    for status in ("Free", "Free", "Reserved", "Sold", "Hidden", "Booked"):
        await world.property_object(building, status=status)
    await ask(world, project, seconds=29.999)
    board = world.board("jobs")
    assert await recalc(board) == {"projects": 0, "requests": 0, "waiting": 0}
    assert await shown(world, project) == (0, None)
    world.clock.advance(timedelta(milliseconds=1))
    assert await recalc(board) == {"projects": 1, "requests": 1, "waiting": 0}
    assert await shown(world, project) == (2, world.now)
    assert await recalc(board) == {"projects": 0, "requests": 0, "waiting": 0}


@pytest.mark.req("HLD-68")
async def test_all_requests_of_a_project_are_folded_into_one_count_the_young_ones_too(world: World) -> None:
    first, second, young = [await world.project() for _ in range(3)]
    for seconds in (40, 20, 0):
        await ask(world, first, seconds=seconds)
        await ask(world, second, seconds=seconds)
    await ask(world, young, seconds=5)
    board = world.board("jobs", job_project_aggregates_recalc_batch_size=1)
    assert await recalc(board) == {"projects": 2, "requests": 6, "waiting": 0}
    assert await world.recalc_requests() == [young]
    samples = await scrape(board)
    prefix = "chessboard_project_aggregates_recalc"
    assert (samples[f"{prefix}_items_total"], samples[f"{prefix}_requests_total"]) == (2, 6)
    assert (samples[f"{prefix}_run_total"], samples[f"{prefix}_backlog"]) == (1, 0)


@pytest.mark.req("HLD-38", "HLD-67", "HLD-68")
async def test_what_the_safety_net_frees_is_counted(world: World) -> None:
    unit = await lost(world)
    project = (await world.object_row(unit))["project_id"]
    await cycle(net(world))
    world.clock.advance(timedelta(seconds=30))
    assert (await recalc(world.board("jobs")))["projects"] == 1
    assert await shown(world, project) == (1, world.now)


async def test_a_request_that_is_committed_while_its_project_is_counted_stays(world: World) -> None:
    project = await world.project()
    building = await world.building(project)
    unit = await world.property_object(building)
    await ask(world, project, minutes=1)
    system = world.system()
    async with system.write() as session:
        assert await aggregates.claim_projects(session, world.ago(seconds=30), 10) == [project]
        assert await aggregates.count_again(session, [project], world.now) == 1
        async with world.system().write() as other:
            found = await get_for_update(other, unit)
            origin = Origin(world.ago(minutes=1), None, Cause("request-1"))
            await write_changes(other, [found.hide(StatusSource.ADMIN, world.now)], origin)
    assert (await shown(world, project))[0] == 1
    assert await recounted(world) == [project]
    assert (await recalc(world.board("jobs")))["requests"] == 1
    assert await recounted(world) == []


async def test_a_project_that_another_process_counts_is_left_to_it(world: World) -> None:
    busy, other = await world.project(), await world.project()
    await ask(world, busy, minutes=1)
    await ask(world, other, minutes=1)
    async with world.system().write() as session:
        assert await aggregates.claim_projects(session, world.ago(minutes=1), 1) == [min(busy, other)]
        assert await recalc(world.board("jobs")) == {"projects": 1, "requests": 1, "waiting": 1}
    assert (await recalc(world.board("jobs")))["projects"] == 1


async def test_counting_keeps_nobody_from_adding_a_building(world: World) -> None:
    project = await world.project()
    await ask(world, project, minutes=1)
    async with world.system().write() as session:
        assert await aggregates.claim_projects(session, world.now, 10) == [project]
        await world.building(project)


async def test_after_changes_and_counts_at_once_every_count_equals_a_recount(world: World) -> None:
    projects = [await world.project() for _ in range(3)]
    units = [await world.property_object(await world.building(project)) for project in projects for _ in range(8)]
    boards = [world.board("jobs") for _ in range(2)]
    system, chance, done = world.system(), random.Random(7), asyncio.Event()

    async def change() -> None:
        for _ in range(60):
            async with system.write() as session:
                found = await get_for_update(session, chance.choice(units))
                act = found.hide if found.status == "Free" else found.unhide
                origin = Origin(world.ago(minutes=1), None, Cause("request-1"))
                await write_changes(session, [act(StatusSource.ADMIN, world.now)], origin)

    async def count(board: Chessboard) -> int:
        requests = 0
        while not done.is_set():
            requests += (await recalc(board))["requests"]
        return requests

    counting = [asyncio.create_task(count(board)) for board in boards]
    await asyncio.gather(change(), change())
    done.set()
    settled = sum(await asyncio.gather(*counting)) + (await recalc(boards[0]))["requests"]
    assert settled == 120, "every request is settled once"
    assert await recounted(world) == []
    assert await world.recalc_requests() == []


async def test_a_count_that_fails_keeps_its_requests(own_world: World) -> None:
    world = own_world
    project = await world.project()
    await ask(world, project, minutes=1)
    await world.admin.execute("revoke update on chessboard.project from chessboard_system")
    with pytest.raises(Exception, match="project"):
        await recalc(world.board("jobs"))
    assert await world.recalc_requests() == [project]


async def test_a_stop_between_batches_is_obeyed(world: World) -> None:
    for _ in range(3):
        await ask(world, await world.project(), minutes=1)
    (driver,) = [one for one in world.board("jobs").drivers if one.job.name == JOB]
    assert driver.job.schedule == timedelta(seconds=10)
    run = run_at(world.now, uuid4())
    run.stop.request()
    assert (await driver.job.run(run)).counts == {"projects": 0, "requests": 0, "waiting": 3}
