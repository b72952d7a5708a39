"""The one way in which a change is written: one UPDATE by id and version, and with it all that tells of the change."""

from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from board_world import TENANT, World

from chassis.db import Actor
from chassis.gathering import gathered
from chassis.outbox import Cause
from chessboard.domain import Hold, StatusSource, VersionConflict
from chessboard.repository import Origin, find_for_update, get_for_update, write_changes

TOPIC = "pin.chessboard.property-object-status-changed.v1"
CRM = StatusSource.CRM


def origin(world: World) -> Origin:
    return Origin(world.now, None, Cause("request-1"))


async def test_a_change_is_written_with_its_history_audit_event_and_request_to_count(world: World):
    unit = await world.property_object()
    hold, until = Hold(uuid4(), uuid4()), world.ago(hours=-2)
    async with world.system().write() as session:
        found = await get_for_update(session, unit)
        assert await write_changes(session, [found.reserve(hold, until, CRM, world.now)], origin(world)) == frozenset()
    row = await world.object_row(unit)
    assert (row["status"], row["reserved_until"], row["version"]) == ("Reserved", until, 2)
    assert (row["hold_deal_id"], row["hold_booking_id"]) == (hold.deal_id, hold.booking_id)
    assert row["status_changed_at"] == row["updated_at"] == world.now
    [version] = await world.history(unit)
    assert (version["version"], version["from_status"], version["to_status"]) == (2, "Free", "Reserved")
    [audit] = await world.audit()
    assert (audit["action"], audit["details"]["version"]) == ("property-object.status-changed", 2)
    [event] = await world.outbox()
    assert (event["topic"], event["message_key"], event["headers"]["ce_sequence"]) == (TOPIC, str(unit), "2")
    assert await world.recalc_requests() == [row["project_id"]]


async def test_an_object_that_changes_twice_gets_one_update_and_two_events(world: World):
    unit = await world.property_object(status="Reserved")
    async with world.system().write() as session, gathered(session):
        found = await get_for_update(session, unit)
        assert found.hold is not None
        freed = found.release(found.hold, CRM, world.now)
        await write_changes(session, [freed], origin(world))
        again = await get_for_update(session, unit)
        assert again is found
        held = again.reserve(Hold(uuid4(), uuid4()), world.ago(hours=-1), CRM, world.now)
        await write_changes(session, [held], origin(world))
    row = await world.object_row(unit)
    assert (row["status"], row["version"]) == ("Reserved", 3)
    assert [one["Version"] for one in await world.events(TOPIC)] == [2, 3]
    assert [one["version"] for one in await world.history(unit)] == [2, 3]


@pytest.mark.req("HLD-84", "HLD-66")
async def test_a_stale_version_is_told_and_nothing_of_it_is_written(world: World):
    stale, fresh = await world.property_object(), await world.property_object()
    async with world.system().write() as session:
        found = await find_for_update(session, [stale, fresh])
        found[stale].version = 7
        changes = [one.hide(StatusSource.ADMIN, world.now) for one in found.values()]
        assert await write_changes(session, changes, origin(world)) == {stale}
    assert (await world.object_row(stale))["status"] == "Free"
    assert (await world.object_row(fresh))["status"] == "Hidden"
    assert [UUID(row["message_key"]) for row in await world.outbox()] == [fresh]
    assert await world.history(stale) == []
    assert len(await world.audit()) == len(await world.recalc_requests()) == 1


async def test_a_stale_version_within_a_batch_rolls_the_batch_back(world: World):
    stale = await world.property_object()

    async def write() -> None:
        async with world.system().write() as session, gathered(session):
            found = await get_for_update(session, stale)
            found.version = 7
            await write_changes(session, [found.hide(StatusSource.ADMIN, world.now)], origin(world))

    with pytest.raises(VersionConflict):
        await write()
    assert await world.outbox() == []


async def test_a_price_changes_without_a_change_of_status_and_no_sum_leaves(world: World):
    unit = await world.property_object(status="Booked")
    before = await world.object_row(unit)
    async with world.system().write() as session:
        found = await get_for_update(session, unit)
        await write_changes(session, [found.reprice(5, "EUR", world.now)], origin(world))
    row = await world.object_row(unit)
    assert (row["price_minor"], row["currency"], row["version"]) == (5, "EUR", 2)
    same = ("status", "booked_until", "hold_deal_id", "hold_booking_id", "status_source", "status_changed_at")
    assert {name: row[name] for name in same} == {name: before[name] for name in same}
    [event] = await world.outbox()
    assert (event["type"], event["payload"]["Version"]) == ("chessboard.offer.updated", 2)
    assert not any("price" in str(part).lower() for part in (event["payload"], (await world.audit())[0]["details"]))
    assert await world.recalc_requests() == []


async def test_the_apis_role_writes_the_same_way_within_its_tenant(world: World):
    unit = await world.property_object()
    async with world.api().write(Actor(TENANT, user_id="user-7")) as session:
        found = await get_for_update(session, unit)
        by = Origin(world.now, "user-7", Cause("request-1"))
        assert not await write_changes(session, [found.hide(StatusSource.ADMIN, world.now + timedelta(seconds=1))], by)
    assert (await world.object_row(unit))["status"] == "Hidden"
    [version] = await world.history(unit)
    assert version["actor"] == "user-7"
