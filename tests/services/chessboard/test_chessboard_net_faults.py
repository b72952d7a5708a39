"""The safety net in trouble: rows that nothing can be done with, and a database that refuses."""

from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest
from board_world import World, scrape
from net_pieces import PREFIX, counted, cycle, everything, in_status, lost, lost_in_order, net, told
from sqlalchemy.exc import DBAPIError
from structlog.testing import capture_logs


async def spoil(world: World, *ids: UUID) -> None:
    """Give objects a source that the domain doesn't know; the constraint is dropped for that."""
    await world.admin.execute("alter table chessboard.property_object drop constraint if exists ck_status_source_known")
    await world.admin.execute(
        "update chessboard.property_object set status_source = 'Mystery' where id = any($1::uuid[])", list(ids)
    )


async def heal(world: World, *ids: UUID) -> None:
    """Undo that."""
    await world.admin.execute(
        "update chessboard.property_object set status_source = 'Crm' where id = any($1::uuid[])", list(ids)
    )


@pytest.mark.req("HLD-43", "HLD-78", "HLD-87", "HLD-92", "HLD-93f", "HLD-95")
async def test_a_poison_object_is_left_out_and_logged_the_rest_commits_and_the_next_cycle_tries_it_again(
    own_world: World,
) -> None:
    world = own_world
    units = await lost_in_order(world, 4)
    await spoil(world, units[1])
    before = await world.object_row(units[1])
    board = net(world)
    with capture_logs() as logs:
        assert await cycle(board) == counted(3, failed=1)
    assert await in_status(world, "Free") == {*units} - {units[1]}
    assert await world.object_row(units[1]) == before
    assert len(await world.outbox()) == len(await world.audit()) == 3
    (line,) = [line for line in logs if line["event"] == "item failed"]
    assert (line["log_level"], line["PropertyObjectId"]) == ("error", str(units[1]))
    assert line["exception"] == "ValueError: 'Mystery' is not a valid StatusSource"
    samples = await scrape(board)
    assert (samples[f"{PREFIX}_errors_total"], samples[f"{PREFIX}_backlog"]) == (1, 1)
    world.clock.advance(timedelta(minutes=1))
    assert await cycle(board) == counted(failed=1)
    assert (await scrape(board))[f"{PREFIX}_errors_total"] == 2
    (poison,) = (await world.poison()).values()
    assert (poison["job"], poison["failures"]) == ("property-object-hold-expiration/reserved", 2)
    await heal(world, units[1])
    assert await cycle(board) == counted(1)
    assert await world.poison() == {}
    assert await in_status(world, "Free") == set(units)


@pytest.mark.req("HLD-78")
async def test_poison_of_both_phases_is_remembered_apart(own_world: World) -> None:
    world = own_world
    reserved, booked = await lost(world), await lost(world, "Booked")
    await spoil(world, reserved, booked)
    for cycles in (1, 2):
        assert await cycle(net(world)) == counted(failed=2)
        assert {one["failures"] for one in (await world.poison()).values()} == {cycles}
    assert {one["job"].partition("/")[2] for one in (await world.poison()).values()} == {"reserved", "booked"}


async def test_poison_at_the_head_fills_a_tenth_of_a_batch_at_most(own_world: World) -> None:
    world = own_world
    units = await lost_in_order(world, 40)
    await spoil(world, *units[:20])
    assert await cycle(net(world, batch_size=20)) == counted(failed=20), "not known yet: it fills one batch once"
    assert await cycle(net(world, batch_size=20)) == counted(18, failed=2)
    assert await in_status(world, "Free") == set(units[20:38])


async def test_an_object_that_the_database_refuses_is_found_row_by_row(own_world: World) -> None:
    world = own_world
    units = await lost_in_order(world, 3)
    await world.admin.execute(
        "insert into chessboard.property_object_version (property_object_id, version, tenant_id, from_status,"
        " to_status, source, price_minor, currency, correlation_id, changed_at)"
        " select id, 2, tenant_id, 'Free', 'Reserved', 'Crm', 1, 'RUB', 'x', $2"
        " from chessboard.property_object where id = $1",
        units[1],
        world.now,
    )
    assert await cycle(net(world)) == counted(2, failed=1)
    assert told(await world.outbox()) == [units[0], units[2]]
    assert (await world.object_row(units[1]))["status"] == "Reserved"
    assert list(await world.poison()) == [units[1]]


@pytest.mark.req("HLD-76", "HLD-80")
async def test_an_error_of_the_database_rolls_the_batch_back_and_the_next_cycle_repeats_it(own_world: World) -> None:
    world = own_world
    reserved, booked = await lost_in_order(world, 3), await lost(world, "Booked")
    before = await everything(world)
    await world.admin.execute("revoke insert on chessboard.audit_log from chessboard_system")
    board = net(world)
    with capture_logs() as logs, pytest.raises((DBAPIError, asyncpg.PostgresError), match="audit_log"):
        await cycle(board)
    assert await everything(world) == before
    assert not [line for line in logs if line["event"] in ("lost CRM release", "item failed")]
    assert (await scrape(board))[f"{PREFIX}_errors_total"] == 1
    assert await world.poison() == {}, "no row is to blame"
    await world.admin.execute("grant insert on chessboard.audit_log to chessboard_system")
    assert await cycle(board) == counted(3, 1)
    assert sorted(told(await world.outbox())) == sorted([*reserved, booked])


@pytest.mark.req("HLD-76", "HLD-80")
async def test_a_failure_in_the_second_phase_leaves_the_first_committed(own_world: World) -> None:
    """The transaction is one phase's batch."""
    world = own_world
    reserved, booked = await lost(world), await lost(world, "Booked")
    await world.admin.execute(
        "create function chessboard.no() returns trigger language plpgsql as $$ begin raise 'disk' using errcode ="
        " '53100'; end $$;"
        "create trigger no before update on chessboard.property_object for each row when (old.status = 'Booked')"
        " execute function chessboard.no()"
    )
    with pytest.raises((DBAPIError, asyncpg.PostgresError), match="disk"):
        await cycle(net(world))
    assert told(await world.outbox()) == [reserved]
    assert (await world.object_row(booked))["status"] == "Booked"


@pytest.mark.req("HLD-52")
@pytest.mark.parametrize(
    "broken",
    [
        "reserved_until = null",
        "booked_until = reserved_until",
        "hold_deal_id = null",
        "hold_booking_id = null",
        "status = 'Free'",
        "status = 'Booked'",
    ],
)
async def test_the_database_keeps_timers_and_hold_with_the_status(world: World, broken: str) -> None:
    unit = await lost(world)
    with pytest.raises(asyncpg.CheckViolationError):
        await world.admin.execute(f"update chessboard.property_object set {broken} where id = $1", unit)
