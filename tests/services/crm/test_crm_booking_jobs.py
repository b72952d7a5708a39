"""The jobs of bookings and what races with them: expiry is the normal release, without grace; late answers; quotes."""

import asyncio
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest
from booking_desk import USUAL, Desk, ids
from crm_world import World, scrape

EXPIRED = "pin.crm.booking-expired.v1"
HOLD = "pin.crm.booking-hold-requested.v1"
COMMIT = "pin.crm.booking-commit-requested.v1"
INTERVENTION = "pin.crm.intervention.v1"
DAY = timedelta(days=1)
SECOND = timedelta(seconds=1)


@pytest.fixture
def desk(world: World) -> Desk:
    return Desk(world, world.system())


@pytest.mark.req("HLD-08", "HLD-09", "EVT-142")
async def test_a_reservation_that_is_over_is_cancelled_and_each_object_released_without_grace(desk: Desk) -> None:
    objects = ids(3)
    booking = await desk.held(*objects)
    desk.world.clock.advance(DAY)
    assert (await desk.run("booking-expiration"))["processed"] == 0, "its very instant is not after it"
    desk.world.clock.advance(timedelta(microseconds=1))
    assert (await desk.run("booking-expiration"))["processed"] == 1
    row = await desk.row(booking)
    assert (row["state"], row["reason"], row["reserved_until"]) == ("cancelled", "expired", None)
    released = await desk.sent(EXPIRED)
    assert [row["message_key"] for row in released] == [str(one) for one in objects]
    assert {row["headers"]["ce_sequence"] for row in released} == {"2"}
    assert (await desk.moves(booking))[-1] == "cancelled"
    assert (await desk.run("booking-expiration"))["processed"] == 0


@pytest.mark.req("HLD-10", "TLO-10a")
async def test_an_expired_booking_of_many_objects_is_told_to_people_once(desk: Desk) -> None:
    booking = await desk.held(*ids(7))
    desk.world.clock.advance(DAY + SECOND)
    await desk.run("booking-expiration")
    told = [
        row for row in await desk.sent("pin.crm.booking.v1", booking=booking) if row["payload"]["Reason"] == "expired"
    ]
    assert len(told) == 1
    assert len(await desk.sent(EXPIRED)) == 7


async def test_the_job_takes_held_and_booked_alike_and_never_what_waits_for_an_answer(desk: Desk) -> None:
    held, paying, confirmed = await desk.held(), await desk.held(), await desk.confirmed()
    await desk.post(f"bookings/{paying}/payment")
    committing = await desk.committing()
    pending = await desk.reserved()
    desk.world.clock.advance(timedelta(days=30))
    assert (await desk.run("booking-expiration"))["processed"] == 3
    states = [await desk.state(one) for one in (held, paying, confirmed, pending, committing)]
    assert states == ["cancelled", "cancelled", "cancelled", "pending_supplier", "committing"]


async def test_batches_are_bounded_and_the_next_one_goes_on(desk: Desk) -> None:
    bookings = [await desk.held() for _ in range(5)]
    desk.world.clock.advance(DAY + SECOND)
    counts = await desk.run("booking-expiration", job_booking_expiration_batch_size=2)
    assert (counts["processed"], counts["batches"]) == (5, 4), "two and two and one, and one batch of the other phase"
    assert {await desk.state(one) for one in bookings} == {"cancelled"}


async def test_a_booking_that_somebody_holds_is_skipped_and_counted(desk: Desk) -> None:
    taken, free = await desk.held(), await desk.held()
    desk.world.clock.advance(DAY + SECOND)
    other = await asyncpg.connect(desk.world.database.admin_url)
    try:
        async with other.transaction():
            await other.execute("select from crm.booking where id = $1 for update", taken)
            counts = await desk.run("booking-expiration")
    finally:
        await other.close()
    assert (counts["processed"], counts["skipped_locked"]) == (1, 1)
    assert [await desk.state(one) for one in (taken, free)] == ["held", "cancelled"]


async def test_a_booking_whose_guard_raises_is_set_aside_and_stops_no_other(own_world: World) -> None:
    desk = Desk(own_world, own_world.system())
    bad, good = await desk.held(), await desk.held()
    await own_world.admin.execute(
        "alter table crm.booking_object drop constraint ck_asked_known;"
        f" update crm.booking_object set asked = 'sale' where booking_id = '{bad}'"
    )
    desk.world.clock.advance(DAY + SECOND)
    counts = await desk.run("booking-expiration")
    assert (counts["processed"], counts["failed"]) == (1, 1)
    assert list(await own_world.poison()) == [bad]
    assert [await desk.state(one) for one in (bad, good)] == ["held", "cancelled"]
    await own_world.admin.execute(f"update crm.booking_object set asked = 'hold' where booking_id = '{bad}'")
    assert (await desk.run("booking-expiration"))["processed"] == 1
    assert await own_world.poison() == {}


async def test_the_jobs_export_their_metrics(desk: Desk) -> None:
    await desk.held()
    desk.world.clock.advance(DAY + SECOND)
    process = desk.world.crm("jobs")
    for driver in process.drivers:
        if driver.job.name.startswith("booking-"):
            await driver.run_once()
    samples = await scrape(process)
    assert samples['crm_booking_expiration_items_total{phase="reserved"}'] == 1
    assert samples['crm_booking_expiration_items_total{phase="booked"}'] == 0
    for name in ("booking_expiration", "booking_answers", "booking_quotes"):
        assert samples[f"crm_{name}_run_total"] == 1
        assert samples[f"crm_{name}_backlog"] == 0


@pytest.mark.req("EVT-008")
async def test_a_late_answer_is_asked_for_again_with_the_same_sequence_and_then_a_person_is_called(desk: Desk) -> None:
    booking = await desk.reserved(*ids(2))
    desk.world.clock.advance(timedelta(minutes=1))
    assert (await desk.run("booking-answers"))["processed"] == 0
    desk.world.clock.advance(SECOND)
    assert (await desk.run("booking-answers"))["processed"] == 1
    requests = await desk.sent(HOLD)
    assert [row["headers"]["ce_sequence"] for row in requests] == ["1"] * 4
    assert len({row["headers"]["ce_id"] for row in requests}) == 4
    assert await desk.state(booking) == "pending_supplier"
    desk.world.clock.advance(timedelta(minutes=1, seconds=1))
    await desk.run("booking-answers")
    assert await desk.state(booking) == "unknown"
    (call,) = await desk.sent(INTERVENTION)
    assert (call["type"], call["payload"]["reason"]) == ("intervention.needed", "answer_timeout")
    desk.world.clock.advance(timedelta(minutes=15, seconds=1))
    await desk.run("booking-answers")
    assert len(await desk.sent(HOLD)) == 6
    await desk.answer_all()
    assert await desk.state(booking) == "held"
    assert [row["type"] for row in await desk.sent(INTERVENTION)] == ["intervention.needed", "intervention.resolved"]


async def test_a_quote_whose_life_is_over_is_taken_back(desk: Desk) -> None:
    booking = await desk.draft()
    expires = (desk.world.now + timedelta(hours=1)).isoformat()
    await desk.post(f"bookings/{booking}/quote", priceMinor=5, currency="EUR", expiresAt=expires)
    desk.world.clock.advance(timedelta(hours=1, seconds=1))
    until = (desk.world.now + DAY).isoformat()
    assert (await desk.post(f"bookings/{booking}/reserve", 409, reservedUntil=until))["code"] == "quote_expired"
    assert (await desk.run("booking-quotes"))["processed"] == 1
    assert await desk.state(booking) == "draft"


async def test_what_the_net_frees_after_the_timer_cancels_the_booking_and_releases_its_other_objects(
    desk: Desk,
) -> None:
    objects = ids(2)
    booking = await desk.held(*objects)
    desk.world.clock.advance(DAY + SECOND)
    await desk.net_frees(objects[0])
    assert await desk.state(booking) == "cancelled"
    assert [row["message_key"] for row in await desk.sent(EXPIRED)] == [str(objects[1])]
    await desk.net_frees(objects[0], version=9)
    assert desk.counted("crm_booking_net_releases_total", fate="ignored") == 1


async def test_what_the_net_frees_before_the_timer_makes_the_booking_unknown_and_calls_a_person(desk: Desk) -> None:
    one = uuid4()
    booking = await desk.held(one)
    await desk.net_frees(one, source="Admin")
    await desk.net_frees(one, version=5)
    assert await desk.state(booking) == "held", "another source, and news older than the answer"
    await desk.net_frees(one)
    row = await desk.row(booking)
    assert (row["state"], row["came_from"], row["reason"]) == ("unknown", "held", "freed_early")
    (call,) = await desk.sent(INTERVENTION)
    assert call["payload"]["reason"] == "freed_early"


async def test_what_the_net_frees_while_an_answer_is_outstanding_is_asked_again_at_once(desk: Desk) -> None:
    one = uuid4()
    booking = await desk.held(one)
    await desk.commit(booking)
    await desk.net_frees(one)
    assert await desk.state(booking) == "committing"
    assert [row["headers"]["ce_sequence"] for row in await desk.sent(COMMIT)] == ["2", "2"]
    await desk.answer_all()
    assert await desk.state(booking) == "confirmed"


# Races.


async def both(*commands) -> list[int]:
    """Run requests at the same time; return their statuses, sorted."""
    return sorted(answer.status_code for answer in await asyncio.gather(*commands))


async def test_of_fifty_bookings_that_ask_for_one_object_one_gets_it(desk: Desk) -> None:
    one = uuid4()
    deal = await desk.world.deal()
    bookings = [await desk.draft(one, *ids(1), deal=deal) for _ in range(50)]
    until = (desk.world.now + DAY).isoformat()
    asked = [desk.client.post(f"/v1/bookings/{b}/reserve", json={"reservedUntil": until}) for b in bookings]
    assert await both(*asked) == [202] + [409] * 49
    requests = [row for row in await desk.sent(HOLD) if row["message_key"] == str(one)]
    assert [row["headers"]["ce_sequence"] for row in requests] == ["1"]
    assert len(await desk.sent(HOLD)) == 2, "who is refused asks for nothing"


async def test_bookings_that_share_objects_in_any_order_never_deadlock(desk: Desk) -> None:
    objects = ids(4)
    deal = await desk.world.deal()
    bookings = [await desk.draft(*objects[turn:], *objects[:turn], deal=deal) for turn in range(4)]
    until = (desk.world.now + DAY).isoformat()
    asked = [desk.client.post(f"/v1/bookings/{b}/reserve", json={"reservedUntil": until}) for b in bookings]
    assert await both(*asked) == [202, 409, 409, 409]


@pytest.mark.req("EVT-017")
@pytest.mark.parametrize("first", ["commit", "expiry"])
async def test_commit_and_expiry_exclude_one_another_in_either_order(desk: Desk, first: str) -> None:
    booking = await desk.held()
    until = (desk.world.now + timedelta(days=14)).isoformat()
    desk.world.clock.advance(DAY - SECOND)
    if first == "commit":
        await desk.post(f"bookings/{booking}/commit", 202, bookedUntil=until)
    desk.world.clock.advance(2 * SECOND)
    await desk.run("booking-expiration")
    if first == "expiry":
        refused = await desk.post(f"bookings/{booking}/commit", 409, bookedUntil=until)
        assert refused["code"] == "booking_transition_refused"
    assert await desk.state(booking) == {"commit": "committing", "expiry": "cancelled"}[first]
    assert (len(await desk.sent(COMMIT)), len(await desk.sent(EXPIRED))) == {"commit": (1, 0), "expiry": (0, 1)}[first]


@pytest.mark.req("EVT-017")
async def test_a_commit_that_waits_for_the_expirys_lock_finds_the_booking_cancelled(desk: Desk) -> None:
    """The commit has read the clock before the time was over, and gets the row after the job."""
    booking = await desk.held()
    row = await desk.row(booking)
    other = await asyncpg.connect(desk.world.database.admin_url)
    try:
        blocking = other.transaction()
        await blocking.start()
        await other.execute("select from crm.booking where id = $1 for update", booking)
        until = (desk.world.now + timedelta(days=14)).isoformat()
        commit = asyncio.create_task(desk.client.post(f"/v1/bookings/{booking}/commit", json={"bookedUntil": until}))
        while await desk.world.blocked_pid() is None:
            await asyncio.sleep(0)
        await other.execute(
            "update crm.booking set state = 'cancelled', reserved_until = null, version = $2 where id = $1",
            booking,
            row["version"] + 1,
        )
        await blocking.commit()
        answer = await commit
    finally:
        await other.close()
    assert (answer.status_code, answer.json()["code"]) == (409, "booking_transition_refused")
    assert await desk.sent(COMMIT) == []


@pytest.mark.req("EVT-019")
async def test_of_ten_commits_that_race_for_a_limit_as_many_pass_as_it_covers(desk: Desk) -> None:
    partner = uuid4()
    bookings: list[UUID] = [await desk.held(partnerId=str(partner), price=300) for _ in range(10)]
    await desk.post("partner-limits", partnerId=str(partner), limitMinor=1000, currency="EUR")
    until = (desk.world.now + timedelta(days=14)).isoformat()
    asked = [desk.client.post(f"/v1/bookings/{b}/commit", json={"bookedUntil": until}) for b in bookings]
    assert await both(*asked) == [202] * 3 + [409] * 7
    assert await desk.world.admin.fetchval("select used_minor from crm.partner_limit") == 900
    assert len(await desk.sent(COMMIT)) == 3


@pytest.mark.req("HLD-08")
async def test_nothing_is_held_for_nobody_after_everything_was_answered(desk: Desk) -> None:
    """Every object whose booking has ended was asked to be released last, or was never held."""
    for make in (desk.reserved, desk.held, desk.committing, desk.confirmed):
        await make(*ids(2))
    desk.world.clock.advance(timedelta(days=30))
    for _ in range(3):
        await desk.run("booking-answers")
        await desk.run("booking-expiration")
        await desk.answer_all()
        desk.world.clock.advance(timedelta(days=1))
    rows = await desk.world.admin.fetch("select state from crm.booking")
    assert {row["state"] for row in rows} == {"cancelled"}
    last: dict[str, str] = {row["message_key"]: row["topic"] for row in await desk.sent(*USUAL)}
    assert set(last.values()) == {EXPIRED}
    assert await desk.world.admin.fetchval("select count(*) from crm.object_claim where booking_id is not null") == 0
