"""Projects, buildings and objects over HTTP: what an operator sets up, what is done to an object by hand, history."""

from datetime import timedelta
from uuid import UUID, uuid4

import httpx
import pytest
from board_world import OTHER_TENANT, World, token

ADMIN = ["SALES_ADMIN"]
FLAT = {"section": 1, "number": "12", "floor": 3, "rooms": 2, "area": 54.3, "priceMinor": 1_250_000_000}
STATUS_CHANGED = "pin.chessboard.property-object-status-changed.v1"
OFFER = "pin.chessboard.offer.v1"


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client(bearer=token(roles=ADMIN))


async def test_a_project_is_set_up_from_nothing(world: World, client):
    project = await client.post("/v1/projects", json={"name": "Riverside"})
    assert (project.status_code, project.headers["etag"]) == (201, '"1"')
    at = project.headers["location"]
    assert (await client.get(at)).json() == project.json()
    building = await client.post(f"{at}/buildings", json={"name": "A", "sections": 2})
    assert building.status_code == 201
    assert (await client.get(building.headers["location"])).json() == building.json()
    assert (await client.get(f"{at}/buildings")).json()["items"] == [building.json()]
    flat = FLAT | {"buildingId": building.json()["id"], "currency": "RUB"}
    added = await client.post(f"{at}/property-objects", json=flat)
    assert (added.status_code, added.headers["etag"]) == (201, '"1"')
    assert added.json() | flat == added.json()
    assert (added.json()["status"], added.json()["statusSource"]) == ("Free", "Admin")
    assert (await client.get(f"{at}/property-objects")).json()["items"] == [added.json()]
    assert [row["action"] for row in await world.audit()] == [
        "project.added", "building.added", "property-object.added",
    ]  # fmt: skip
    assert await world.recalc_requests() == [UUID(project.json()["id"])]
    assert await world.outbox() == [], "no status has changed"
    history = (await client.get(f"{added.headers['location']}/history")).json()["items"]
    assert [(one["version"], one["actor"], one["source"]) for one in history] == [(1, "user-7", "Admin")]


async def test_what_is_there_already_or_not_at_all_is_refused(world: World, client):
    project = await world.project()
    building, theirs = await world.building(project, "A"), await world.building(await world.project(OTHER_TENANT))
    at = f"/v1/projects/{project}"
    flat = FLAT | {"buildingId": str(building), "currency": "RUB"}
    await client.post(f"{at}/property-objects", json=flat)
    refused = {
        "building_name_taken": (f"{at}/buildings", {"name": "A", "sections": 1}),
        "number_taken": (f"{at}/property-objects", flat),
        "building_not_found": (f"{at}/property-objects", flat | {"buildingId": str(theirs)}),
        "validation_error": (f"{at}/property-objects", flat | {"number": "13", "section": 3}),
        "project_not_found": (f"/v1/projects/{uuid4()}/buildings", {"name": "A", "sections": 1}),
    }
    for code, (path, body) in refused.items():
        assert (await client.post(path, json=body)).json()["code"] == code
    assert len(await world.audit()) == 1


ACTS = [
    ("hide", "Free", "Hidden", None),
    ("unhide", "Hidden", "Free", None),
    ("sell", "Free", "Sold", None),
    ("price", "Booked", "Booked", {"priceMinor": 5, "currency": "EUR"}),
]


@pytest.mark.parametrize(("act", "before", "after", "body"), ACTS)
async def test_an_act_changes_the_version_that_was_read_and_tells_of_it(world: World, client, act, before, after, body):
    unit = await world.property_object(status=before)
    at = f"/v1/property-objects/{unit}"
    read = await client.get(at)
    answer = await client.post(f"{at}/{act}", json=body, headers={"if-match": read.headers["etag"]})
    assert (answer.status_code, answer.headers["etag"]) == (200, '"2"')
    assert answer.json()["status"] == after
    assert (await client.get(at)).json() == answer.json()
    [version] = (await client.get(f"{at}/history")).json()["items"]
    assert (version["version"], version["fromStatus"], version["toStatus"]) == (2, before, after)
    assert version["actor"] == "user-7"
    assert version["correlationId"] == answer.headers["x-request-id"]
    [event] = await world.outbox()
    assert event["topic"] == (OFFER if act == "price" else STATUS_CHANGED)
    assert len(await world.audit()) == 1
    assert len(await world.recalc_requests()) == (0 if act == "price" else 1)
    stale = await client.post(f"{at}/{act}", json=body, headers={"if-match": '"1"'})
    assert (stale.status_code, stale.json()["code"]) == (412, "precondition_failed")
    assert len(await world.history(unit)) == 1


@pytest.mark.parametrize(
    ("act", "status"), [("hide", "Reserved"), ("unhide", "Free"), ("sell", "Booked"), ("price", "Sold")]
)
async def test_an_act_that_the_status_does_not_allow_is_refused(world: World, client, act, status):
    unit = await world.property_object(status=status)
    body = {"priceMinor": 5, "currency": "EUR"} if act == "price" else None
    answer = await client.post(f"/v1/property-objects/{unit}/{act}", json=body)
    assert answer.status_code == 409
    assert answer.json()["code"] in ("status_transition_refused", "CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH")
    assert (await world.object_row(unit))["version"] == 1


async def test_the_price_that_an_object_has_is_no_change(world: World, client):
    unit = await world.property_object()
    body = {"priceMinor": 1_250_000_000, "currency": "RUB"}
    answer = await client.post(f"/v1/property-objects/{unit}/price", json=body)
    assert (answer.status_code, answer.headers["etag"]) == (200, '"1"')
    assert await world.outbox() == []


async def test_acts_are_for_the_role_of_sales_admins(world: World):
    unit = await world.property_object()
    answer = await world.client(bearer=token(roles=["MANAGER"])).post(f"/v1/property-objects/{unit}/hide")
    assert (answer.status_code, answer.json()["detail"]) == (403, "role SALES_ADMIN is required")


async def test_an_act_under_a_key_is_done_once(world: World, client):
    unit = await world.property_object()
    answers = [
        await client.post(f"/v1/property-objects/{unit}/hide", headers={"idempotency-key": "k-1"}) for _ in range(2)
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[1].headers["idempotency-replayed"] == "true"
    assert len(await world.outbox()) == 1


async def test_a_long_history_comes_in_pages_the_last_version_first(world: World, client):
    unit = await world.property_object()
    for act in ("hide", "unhide", "hide", "unhide", "sell"):
        world.clock.advance(timedelta(seconds=1))
        assert (await client.post(f"/v1/property-objects/{unit}/{act}")).status_code == 200
    seen, after = [], None
    while True:
        params = {"limit": 2} | ({"after": after} if after else {})
        page = (await client.get(f"/v1/property-objects/{unit}/history", params=params)).json()
        seen += [one["version"] for one in page["items"]]
        after = page["next"]
        if after is None:
            break
    assert seen == [6, 5, 4, 3, 2]
