"""Bookings over HTTP and the chessboard's messages, on a real database: from draft to the end, one card per step."""

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID, uuid4

import pytest
from booking_desk import USUAL, Desk, ids
from crm_world import OTHER_TENANT, World, token

BOOKING = "pin.crm.booking.v1"
HOLD = "pin.crm.booking-hold-requested.v1"
COMMIT = "pin.crm.booking-commit-requested.v1"
SOLD = "pin.crm.deal-completed.v1"
EXPIRED, CANCELLED, DEAL_CANCELLED = (
    "pin.crm.booking-expired.v1",
    "pin.crm.booking-cancelled.v1",
    "pin.crm.deal-cancelled.v1",
)
INTERVENTION = "pin.crm.intervention.v1"


@pytest.fixture
def desk(world: World) -> Desk:
    return Desk(world, world.system())


async def claims(world: World, objects: Sequence[UUID]) -> list[UUID | None]:
    rows = await world.admin.fetch(
        "select booking_id from crm.object_claim where property_object_id = any($1) order by 1", objects
    )
    return [row["booking_id"] for row in rows]


@pytest.mark.req("EVT-007", "EVT-010", "EVT-017", "EVT-020", "EVT-142")
async def test_a_booking_of_three_objects_is_quoted_held_paid_confirmed_and_sold(world: World, desk: Desk) -> None:
    objects = ids(3)
    booking = await desk.confirmed(*objects)
    await desk.post(f"bookings/{booking}/registration")
    await desk.post(f"bookings/{booking}/register")
    await desk.answer_all()
    assert await desk.moves(booking) == ["quoted", "pending_supplier", "held", "committing", "confirmed", "ticketed"]
    for topic in (HOLD, COMMIT, SOLD):
        sent = await desk.sent(topic)
        assert [row["message_key"] for row in sent] == [str(one) for one in objects]
    for one in objects:
        of_object = [row for row in await desk.sent(*USUAL) if row["message_key"] == str(one)]
        assert [row["headers"]["ce_sequence"] for row in of_object] == ["1", "2", "3"]
    assert await claims(world, objects) == [None] * 3
    history = (await desk.client.get(f"/v1/bookings/{booking}/history")).json()["items"]
    assert [line["toState"] for line in history] == await desk.moves(booking)
    assert {line["actor"] for line in history} == {"user-7", None}
    shown = (await desk.client.get(f"/v1/bookings/{booking}")).json()
    assert [one["outcome"] for one in shown["objects"]] == ["sold"] * 3
    assert shown["propertyObjectIds"] == [str(one) for one in objects]


@pytest.mark.req("EVT-020", "EVT-021", "EVT-035")
async def test_confirmed_is_said_once_by_the_bookings_own_event_and_sequences_grow(desk: Desk) -> None:
    booking = await desk.confirmed(*ids(4))
    sent = await desk.sent(BOOKING)
    assert [row["payload"]["ToState"] for row in sent].count("confirmed") == 1
    sequences = [int(row["headers"]["ce_sequence"]) for row in sent]
    assert sequences == sorted(set(sequences))
    assert {row["message_key"] for row in sent} == {str(booking)}
    assert len(sent[-1]["payload"]["PropertyObjectIds"]) == 4


async def test_an_answer_that_is_delivered_again_has_one_effect(desk: Desk) -> None:
    booking = await desk.reserved()
    (request,) = await desk.sent(HOLD)
    payload = {name: request["payload"][name] for name in ("BookingId", "TenantId", "PropertyObjectId")}
    payload |= {"Sequence": 1, "Outcome": "held", "Reason": None, "Version": 2}
    await desk.deliver("pin.chessboard.hold-answered.v1", payload, times=3)
    await desk.deliver("pin.chessboard.hold-answered.v1", payload)
    assert (await desk.moves(booking)).count("held") == 1
    assert desk.counted("crm_booking_answers_total", fate="taken") == 1
    assert desk.counted("crm_booking_answers_total", fate="ignored") == 1


async def test_an_answer_for_another_tenant_or_an_unknown_booking_is_counted_and_changes_nothing(desk: Desk) -> None:
    booking = await desk.reserved()
    (request,) = await desk.sent(HOLD)
    strange = request | {"payload": request["payload"] | {"TenantId": str(OTHER_TENANT)}}
    await desk.answer(strange, "held")
    await desk.answer(request | {"payload": request["payload"] | {"BookingId": str(uuid4())}}, "held")
    assert await desk.state(booking) == "pending_supplier"
    assert desk.counted("crm_booking_answers_total", fate="ignored") == 2


async def test_a_rejected_object_fails_the_booking_and_releases_the_others(world: World, desk: Desk) -> None:
    objects = ids(3)
    booking = await desk.reserved(*objects)
    await desk.answer_all(**{objects[1].hex: "rejected"})
    assert await desk.state(booking) == "failed"
    released = {UUID(row["message_key"]) for row in await desk.sent(CANCELLED)}
    assert released == {objects[0], objects[2]}
    assert await claims(world, objects) == [None] * 3


async def test_an_object_of_a_live_booking_is_refused_to_another_one_until_that_has_ended(desk: Desk) -> None:
    one, other = ids(2)
    first = await desk.held(one)
    second = await desk.draft(other, one)
    until = (desk.world.now + timedelta(days=1)).isoformat()
    refused = await desk.post(f"bookings/{second}/reserve", 409, reservedUntil=until)
    assert refused["code"] == "object_taken"
    assert await claims(desk.world, [other]) == [None]
    await desk.post(f"bookings/{first}/cancel", 202)
    await desk.post(f"bookings/{second}/reserve", 409, reservedUntil=until)
    await desk.answer_all()
    assert await desk.state(first) == "cancelled"
    await desk.post(f"bookings/{second}/reserve", 202, reservedUntil=until)
    of_one = [row for row in await desk.sent(HOLD, CANCELLED) if row["message_key"] == str(one)]
    assert [row["headers"]["ce_sequence"] for row in of_one] == ["1", "2", "3"]


@pytest.mark.req("EVT-009")
async def test_cancelling_waits_until_every_object_is_free(desk: Desk) -> None:
    objects = ids(2)
    booking = await desk.confirmed(*objects)
    shown = await desk.post(f"bookings/{booking}/cancel", 202)
    assert (shown["state"], shown["reason"]) == ("cancellation_pending", "cancelled")
    requests = await desk.sent(CANCELLED)
    await desk.answer(requests[0], "released")
    assert await desk.state(booking) == "cancellation_pending"
    await desk.answer(requests[1], "released")
    assert await desk.state(booking) == "cancelled"


@pytest.mark.req("EVT-009")
async def test_an_amendment_is_applied_or_refused_and_the_booking_is_confirmed_again(desk: Desk) -> None:
    booking = await desk.confirmed()
    await desk.post(f"bookings/{booking}/amend", priceMinor=1500)
    shown = await desk.post(f"bookings/{booking}/amendment", outcome="applied")
    assert (shown["state"], shown["priceMinor"], shown["reason"]) == ("confirmed", 1500, "amendment_applied")
    await desk.post(f"bookings/{booking}/amend", priceMinor=9)
    shown = await desk.post(f"bookings/{booking}/amendment", outcome="refused")
    assert (shown["priceMinor"], shown["reason"]) == (1500, "amendment_refused")


async def test_a_cancelled_deal_releases_all_that_its_bookings_may_hold(desk: Desk) -> None:
    deal = await desk.world.deal()
    pending = await desk.reserved(*ids(2), deal=deal)
    draft = await desk.draft(deal=deal)
    elsewhere = await desk.held()
    await desk.post(f"deals/{deal}/cancel")
    assert [await desk.state(one) for one in (pending, draft)] == ["cancellation_pending", "cancelled"]
    assert len(await desk.sent(DEAL_CANCELLED, booking=pending)) == 2
    await desk.answer_all()
    assert await desk.state(pending) == "cancelled"
    assert await desk.state(elsewhere) == "held"


async def test_a_completed_deal_sells_what_is_confirmed_and_is_refused_while_something_is_open(desk: Desk) -> None:
    deal = await desk.world.deal()
    confirmed, held, draft = (
        await desk.confirmed(*ids(2), deal=deal),
        await desk.held(deal=deal),
        await desk.draft(deal=deal),
    )
    refused = await desk.post(f"deals/{deal}/complete", 409)
    assert refused["code"] == "bookings_not_confirmed"
    assert await desk.state(confirmed) == "confirmed"
    await desk.post(f"bookings/{held}/cancel", 202)
    await desk.answer_all()
    await desk.post(f"deals/{deal}/complete")
    assert [await desk.state(one) for one in (confirmed, held, draft)] == ["ticketed", "cancelled", "cancelled"]
    assert len(await desk.sent(SOLD)) == 2
    assert (await desk.post("bookings", 409, dealId=str(deal), propertyObjectIds=[str(uuid4())]))[
        "code"
    ] == "deal_not_active"


@pytest.mark.req("EVT-016")
async def test_a_changed_price_takes_open_quotes_back_and_no_others(desk: Desk) -> None:
    one = uuid4()
    quoted, held = await desk.draft(one), await desk.held(one)
    expires = (desk.world.now + timedelta(hours=1)).isoformat()
    await desk.post(f"bookings/{quoted}/quote", priceMinor=5, currency="eur", expiresAt=expires)
    await desk.price_changes(one)
    assert [await desk.state(booking) for booking in (quoted, held)] == ["draft", "held"]
    (gone,) = [row for row in await desk.sent(BOOKING) if row["type"] == "crm.booking.quote-invalidated"]
    assert (gone["payload"]["Reason"], gone["message_key"]) == ("price_changed", str(quoted))
    assert desk.counted("crm_booking_quotes_invalidated_total") == 1


@pytest.mark.req("EVT-019")
async def test_a_partner_commits_within_its_limit_and_gets_it_back_when_it_cancels(desk: Desk) -> None:
    partner = uuid4()
    first, second = [await desk.held(partnerId=str(partner), price=600) for _ in range(2)]
    assert (await desk.commit(first, 409))["code"] == "partner_limit_exceeded"
    limit = {"partnerId": str(partner), "limitMinor": 1000}
    await desk.post("partner-limits", **limit, currency="EUR")
    assert (await desk.post("partner-limits", 409, **limit, currency="USD"))["code"] == "limit_currency_fixed"
    await desk.commit(first)
    assert (await desk.commit(second, 409))["code"] == "partner_limit_exceeded"
    assert await desk.state(second) == "held"
    await desk.answer_all()
    await desk.post(f"bookings/{first}/cancel", 202)
    await desk.answer_all()
    await desk.commit(second)
    used = await desk.world.admin.fetchval("select used_minor from crm.partner_limit")
    assert used == 600


@pytest.mark.req("EVT-018")
async def test_a_partner_sees_and_moves_its_own_bookings_only(desk: Desk) -> None:
    mine, theirs = uuid4(), uuid4()
    deal = await desk.world.deal()
    own, other = [await desk.held(partnerId=str(partner), deal=deal) for partner in (mine, theirs)]
    client = desk.partner(mine)
    listed = (await client.get("/v1/bookings")).json()["items"]
    assert [row["id"] for row in listed] == [str(own)]
    for path in (f"/v1/bookings/{other}", f"/v1/bookings/{other}/history"):
        assert (await client.get(path)).status_code == 404
    await desk.post(f"bookings/{other}/cancel", 404, client)
    await desk.post("bookings", 403, client, dealId=str(deal), propertyObjectIds=[str(uuid4())], partnerId=str(theirs))
    for path, body in {
        f"bookings/{own}/quote": {"priceMinor": 1, "currency": "EUR", "expiresAt": "2027-01-01T00:00:00Z"},
        f"bookings/{own}/amendment": {"outcome": "applied"},
        f"bookings/{own}/register": {},
        f"bookings/{own}/resolve": {"state": "held"},
        f"deals/{deal}/cancel": {},
        f"deals/{deal}/complete": {},
        "partner-limits": {"partnerId": str(mine), "limitMinor": 9, "currency": "EUR"},
    }.items():
        await desk.post(path, 403, client, **body)
    await desk.post(f"bookings/{own}/cancel", 202, client)
    drafted = await desk.post("bookings", 201, client, dealId=str(deal), propertyObjectIds=[str(uuid4())])
    assert drafted["partnerId"] == str(mine)
    stranger = desk.world.client(bearer=token(OTHER_TENANT, scope="crm:bookings:read"))
    assert (await stranger.get("/v1/bookings")).json()["items"] == []


async def test_a_change_meets_the_version_that_its_author_saw_and_a_repeated_one_runs_once(desk: Desk) -> None:
    booking = await desk.held()
    tag = (await desk.client.get(f"/v1/bookings/{booking}")).headers["etag"]
    stale = await desk.client.post(f"/v1/bookings/{booking}/cancel", headers={"if-match": '"1"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    headers = {"if-match": tag, "idempotency-key": "k-1"}
    first = await desk.client.post(f"/v1/bookings/{booking}/cancel", headers=headers)
    again = await desk.client.post(f"/v1/bookings/{booking}/cancel", headers=headers)
    assert (first.status_code, again.json()) == (202, first.json())
    assert (await desk.moves(booking)).count("cancellation_pending") == 1


async def test_bookings_are_listed_by_pages_states_and_deals(desk: Desk) -> None:
    deal = await desk.world.deal()
    made = [str(await desk.draft(deal=deal)) for _ in range(3)]
    await desk.reserved()
    first = (await desk.client.get("/v1/bookings", params={"dealId": str(deal), "limit": 2})).json()
    rest = (await desk.client.get("/v1/bookings", params={"dealId": str(deal), "after": first["next"]})).json()
    assert [row["id"] for row in first["items"] + rest["items"]] == made[::-1]
    assert rest["next"] is None
    pending = (await desk.client.get("/v1/bookings", params={"state": "pending_supplier"})).json()["items"]
    assert len(pending) == 1


async def test_an_unknown_booking_calls_a_person_who_decides(desk: Desk) -> None:
    booking = await desk.reserved()
    for _ in range(2):
        desk.world.clock.advance(timedelta(minutes=1, seconds=1))
        await desk.run("booking-answers")
    assert await desk.state(booking) == "unknown"
    assert (await desk.post(f"bookings/{booking}/resolve", 409, state="confirmed"))[
        "code"
    ] == "booking_transition_refused"
    await desk.post(f"bookings/{booking}/resolve", state="failed")
    calls = await desk.sent(INTERVENTION)
    assert [(row["type"], row["payload"]["actorType"]) for row in calls] == [
        ("intervention.needed", "system"),
        ("intervention.resolved", "user"),
    ]
    assert len(await desk.sent(CANCELLED)) == 1
