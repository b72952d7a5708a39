"""The safety net beside others: rows that someone holds, several processes, CRM's late requests, a stop."""

import asyncio
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from board_world import World, scrape
from net_pieces import (
    CHANGED,
    GRACE,
    PREFIX,
    audit_log_locked,
    counted,
    cycle,
    driver_of,
    everything,
    held_by_another,
    in_status,
    lost,
    lost_in_order,
    net,
    run_at,
    told,
    unlocked,
)
from structlog.testing import capture_logs
from test_chessboard_crm_requests import BOOK, EXPIRED, HOLD, RELEASES, Crm, letters

from chassis.runtime import Stop
from chessboard import commands
from chessboard.domain import ExpirationLimits, Phase

MEANWHILE = """
create table chessboard.meanwhile (version int);
grant all on chessboard.meanwhile to chessboard_system;
create function chessboard.someone_was_faster() returns trigger language plpgsql as $$
begin
  if new.status_source <> 'ExpirationJob' or exists (select from chessboard.meanwhile) then return new; end if;
  insert into chessboard.meanwhile values (old.version);
  update chessboard.property_object set {change} where id = old.id;
  return null;
end $$;
create trigger someone_was_faster before update on chessboard.property_object
  for each row when (pg_trigger_depth() = 0) execute function chessboard.someone_was_faster();
"""
"""Between the read and the write of the first object that the net frees somebody else changes it."""


@asynccontextmanager
async def batch_held_open(world: World, size: int = 2):
    """Run one batch of reserved objects in a process of its own and keep its transaction open for the block."""
    async with world.system().write() as session:
        yield await commands.release_expired_holds(
            session, run_at(world.now, uuid4()), Phase.RESERVED, ExpirationLimits(size, GRACE)
        )


# Locks.


@pytest.mark.req("HLD-41", "HLD-60", "HLD-79c", "HLD-83", "HLD-93e")
async def test_objects_that_someone_holds_are_skipped_without_waiting_and_counted(world: World) -> None:
    units = await lost_in_order(world, 5)
    booked = await lost(world, "Booked")
    board = net(world)
    async with held_by_another(world, units[0], units[3], booked):
        before = await world.object_row(units[0])
        assert await cycle(board) == counted(3, 0, skipped=3)
        assert await world.object_row(units[0]) == before
    samples = await scrape(board)
    assert (samples[f"{PREFIX}_skip_locked_total"], samples[f"{PREFIX}_backlog"]) == (3, 3)
    assert await cycle(board) == counted(2, 1), "the next cycle takes them"


async def test_only_objects_among_the_first_of_a_batch_count_as_skipped(world: World) -> None:
    units = await lost_in_order(world, 4)
    async with held_by_another(world, units[3]):
        assert await cycle(net(world, batch_size=2)) == counted(2)
    async with held_by_another(world, units[2]):
        assert await cycle(net(world, batch_size=1)) == counted(1, skipped=1)


@pytest.mark.req("HLD-20", "HLD-82")
async def test_parallel_batches_take_disjoint_objects(world: World) -> None:
    units = await lost_in_order(world, 5)
    async with batch_held_open(world) as first:
        assert [change.property_object_id for change in first.released] == units[:2]
        assert await cycle(net(world, batch_size=2)) == counted(2, skipped=2)
        assert told(await world.outbox()) == units[2:4]
    assert sorted(told(await world.outbox())) == sorted(units[:4])


@pytest.mark.req("HLD-20", "HLD-82")
async def test_two_processes_at_once_free_each_object_once_with_one_event(world: World) -> None:
    units = await lost_in_order(world, 60)
    booked = await lost_in_order(world, 30, "Booked")
    boards = [net(world, batch_size=7) for _ in range(2)]
    freed = 0
    for _ in range(30):
        counts = await asyncio.gather(*(cycle(board) for board in boards))
        freed += sum(one["ReservedReleasedCount"] + one["BookedReleasedCount"] for one in counts)
        if freed == 90:
            break
    assert freed == 90
    assert await in_status(world, "Free") == {*units, *booked}
    outbox = await world.outbox()
    assert sorted(told(outbox)) == sorted([*units, *booked])
    assert len({row["event_id"] for row in outbox}) == len(await world.audit()) == 90
    assert {row["payload"]["Version"] for row in outbox} == {2}


@pytest.mark.req("HLD-59", "HLD-76", "HLD-77")
async def test_objects_stay_locked_until_their_batch_has_committed_and_no_longer(world: World, eventually: Any) -> None:
    units = await lost_in_order(world, 4)
    board = net(world, batch_size=2)
    async with audit_log_locked(world):
        running = asyncio.create_task(cycle(board))
        await eventually(world.blocked_pid)
        assert await unlocked(world) == set(units[2:]), "the batch holds its own objects and no others"
        assert await in_status(world, "Free") == set()
        assert await world.history(units[0]) == []
    assert await running == counted(2)
    assert await unlocked(world) == set(units)


@pytest.mark.req("HLD-20")
async def test_no_lock_stands_for_the_whole_job(world: World, eventually: Any) -> None:
    await lost(world)
    async with audit_log_locked(world):
        running = asyncio.create_task(cycle(net(world)))
        pid = await eventually(world.blocked_pid)
        locks = await world.admin.fetch("select from pg_locks where pid = $1 and locktype = 'advisory'", pid)
        assert locks == []
    assert await running == counted(1)


# CRM is late.


@pytest.mark.req("HLD-60", "HLD-83")
async def test_the_consumer_locks_the_object_that_it_handles_and_the_net_goes_round_it(
    world: World, eventually: Any
) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    await crm.ask(HOLD, unit, booking, at=world.ago(hours=1))
    async with audit_log_locked(world):
        handling = asyncio.create_task(crm.send(crm.record(EXPIRED, unit, booking)))
        await eventually(world.blocked_pid)
        assert await unlocked(world) == set()
        assert await cycle(net(world)) == counted(skipped=1)
    await handling
    assert await cycle(net(world)) == counted()
    assert [one["StatusSource"] for one in await world.events(CHANGED)] == ["Crm", "Crm"]


@pytest.mark.req("HLD-09", "HLD-96", "HLD-84")
@pytest.mark.parametrize("release", RELEASES)
async def test_a_late_release_that_comes_before_the_tick_leaves_the_net_nothing(world: World, release: str) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    await crm.ask(HOLD, unit, booking, at=world.ago(hours=1))
    assert await crm.ask(release, unit, booking) == ("released", None)
    assert await cycle(net(world)) == counted()
    assert [one["StatusSource"] for one in await world.events(CHANGED)] == ["Crm", "Crm"]
    assert (await world.object_row(unit))["version"] == 3


@pytest.mark.req("HLD-85", "HLD-96", "HLD-66")
@pytest.mark.parametrize("release", RELEASES)
async def test_a_late_release_that_comes_after_the_net_is_a_no_op_without_mismatch(world: World, release: str) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    await crm.ask(HOLD, unit, booking, at=world.ago(hours=1))
    assert await cycle(net(world)) == counted(1)
    freed = await world.object_row(unit)
    assert await crm.ask(release, unit, booking) == ("released", None)
    assert await world.object_row(unit) == freed
    assert [one["StatusSource"] for one in await world.events(CHANGED)] == ["Crm", "ExpirationJob"]
    assert await letters(world) == [], "no CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH"


@pytest.mark.req("HLD-08", "HLD-96")
async def test_a_hold_that_was_prolonged_in_time_is_not_freed(world: World) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    await crm.ask(HOLD, unit, booking, at=world.ago(hours=1))
    await crm.ask(HOLD, unit, booking, at=world.ago(hours=-1))
    assert await cycle(net(world)) == counted()
    await crm.ask(BOOK, unit, booking, at=world.ago(hours=2))
    assert await cycle(net(world)) == counted(0, 1)


@pytest.mark.req("HLD-66", "HLD-84", "HLD-96")
@pytest.mark.parametrize(
    ("change", "after", "counts"),
    [
        ("status = 'Free', reserved_until = null, hold_deal_id = null, hold_booking_id = null, version = 2", "Free", 0),
        (
            "status = 'Booked', reserved_until = null, booked_until = '2027-01-01 00:00:00+00', version = 2",
            "Booked",
            0,
        ),
        ("price_minor = 1, version = 2", "Free", 1),
    ],
)
async def test_an_object_that_changed_between_read_and_write_is_read_again(
    own_world: World, change: str, after: str, counts: int
) -> None:
    world = own_world
    first, *others = await lost_in_order(world, 3)
    await world.admin.execute(MEANWHILE.format(change=change))
    with capture_logs() as logs:
        assert await cycle(net(world)) == counted(2 + counts)
    assert [line["count"] for line in logs if line["event"] == "version conflict"] == [1]
    assert [line["count"] for line in logs if line["event"] == "batch selected"] == [3, counts, 0]
    assert (await world.object_row(first))["status"] == after
    assert told(await world.outbox()) == [*others, *[first] * counts]
    versions = [row["version"] for row in await world.history(first)]
    assert versions == [3] * counts, "no event, history or warning of what was not written"
    assert len([line for line in logs if line["event"] == "lost CRM release"]) == 2 + counts


# A stop.


@pytest.mark.req("HLD-25a", "HLD-25c", "HLD-97")
async def test_a_stop_during_a_batch_lets_it_commit_and_begins_no_other(world: World, eventually: Any) -> None:
    reserved, booked = await lost_in_order(world, 3), await lost_in_order(world, 2, "Booked")
    board, stop = net(world), Stop()
    async with audit_log_locked(world):
        running = asyncio.create_task(cycle(board, stop))
        await eventually(world.blocked_pid)
        stop.request()
    assert await running == counted(3)
    assert await in_status(world, "Free") == set(reserved)
    assert sorted(told(await world.outbox())) == sorted(reserved)
    assert await in_status(world, "Booked") == set(booked)
    assert await unlocked(world) == {*reserved, *booked}
    assert await world.admin.fetchval("select result from chessboard.job_run") == "stopped"


@pytest.mark.req("HLD-25b", "HLD-25c", "HLD-80", "HLD-97")
async def test_a_batch_that_is_cut_off_rolls_back_whole(world: World, eventually: Any) -> None:
    units = await lost_in_order(world, 3)
    before = await everything(world)
    board = net(world)
    async with audit_log_locked(world):
        running = asyncio.create_task(cycle(board))
        await eventually(world.blocked_pid)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    async def free() -> bool:
        return await unlocked(world) == set(units)

    await eventually(free)
    assert await everything(world) == before
    assert await cycle(board) == counted(3), "the next cycle repeats it"


@pytest.mark.req("HLD-25", "HLD-97")
async def test_a_stopped_process_ends_in_good_order(world: World, eventually: Any) -> None:
    units = await lost_in_order(world, 3)
    board, stop = net(world), Stop()
    async with audit_log_locked(world):
        running = asyncio.create_task(driver_of(board).run(stop))
        await eventually(world.blocked_pid)
        stop.request()
    await running
    assert await in_status(world, "Free") == set(units)


async def test_a_process_that_dies_within_a_batch_leaves_it_to_the_next(world: World, eventually: Any) -> None:
    units = await lost_in_order(world, 3)
    async with audit_log_locked(world):
        running = asyncio.create_task(cycle(net(world)))
        pid = await eventually(world.blocked_pid)
        await world.admin.execute("select pg_terminate_backend($1)", pid)
        with pytest.raises(Exception, match=r"terminat|closed"):
            await running
    assert await world.outbox() == []
    assert await cycle(net(world)) == counted(3)
    told_of: list[UUID] = told(await world.outbox())
    assert told_of == units
