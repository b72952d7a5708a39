"""A change is made to the version that its author has seen, and the pages of a list lose and repeat nothing."""

import asyncio
from uuid import UUID

import httpx
import pytest
from crm_world import OTHER_TENANT, World, token

from crm.domain import DealStatus
from crm.repository import get_deal_for_update

AT = "2026-11-30T09:00:00Z"
STEP = {"type": "DocumentRequested", "occurredAt": AT}
ACTS = [("timeline", STEP, 201), ("complete", None, 200), ("cancel", None, 200)]


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client()


async def act(client: httpx.AsyncClient, deal: UUID, name: str, body: object, if_match: str) -> httpx.Response:
    return await client.post(f"/v1/deals/{deal}/{name}", json=body, headers={"if-match": if_match})


@pytest.mark.parametrize(("name", "body", "status"), ACTS)
async def test_a_change_of_the_version_that_was_read_is_made(world: World, client, name, body, status):
    deal = await world.deal()
    read = await client.get(f"/v1/deals/{deal}")
    assert read.headers["etag"] == '"1"'
    answer = await act(client, deal, name, body, read.headers["etag"])
    assert (answer.status_code, answer.headers["etag"]) == (status, '"2"')
    for path in (f"/v1/deals/{deal}", f"/v1/deals/{deal}/timeline"):
        assert (await client.get(path)).headers["etag"] == '"2"'


@pytest.mark.parametrize("given", ['"2"', '"0"', '"2", "3"', 'W/"1"', '"x"', '""'])
@pytest.mark.parametrize(("name", "body", "status"), ACTS)
async def test_a_change_of_another_version_is_refused_and_changes_no_row(
    world: World, client, name, body, status, given
):
    deal = await world.deal()
    before = await world.everything()
    answer = await act(client, deal, name, body, given)
    assert (answer.status_code, answer.json()["code"]) == (412, "precondition_failed"), given
    assert await world.everything() == before


@pytest.mark.parametrize("given", ["*", '"1"', '"7", "1"', 'W/"1", "1"', ' "1" '])
async def test_what_names_the_version_among_others_is_met(world: World, client, given: str):
    assert (await act(client, await world.deal(), "complete", None, given)).status_code == 200


@pytest.mark.parametrize("given", ["1", '"1', "'1'", '"1" "2"', ",", '"1";', "*, *", "w/*", '"1 "', ""])
async def test_an_if_match_that_cannot_be_read_is_refused(world: World, client, given: str):
    deal = await world.deal()
    answer = await act(client, deal, "complete", None, given)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error"), given
    assert answer.json()["errors"][0]["location"] == "header.If-Match"
    assert (await client.get(f"/v1/deals/{deal}")).headers["etag"] == '"1"'
    assert (await act(world.client(bearer="none"), deal, "complete", None, given)).status_code == 401


async def test_of_two_people_who_have_read_the_same_version_one_changes_it(world: World, client):
    deal = await world.deal()
    answers = await asyncio.gather(*(act(client, deal, "timeline", STEP, '"1"') for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 412, 412, 412, 412]


async def test_the_deal_of_another_tenant_is_not_there_whatever_its_version(world: World, client):
    theirs = await world.deal(OTHER_TENANT)
    for given in ('"1"', '"2"', "*"):
        assert (await act(client, theirs, "complete", None, given)).status_code == 404


# Pages.


async def walk(client: httpx.AsyncClient, limit: int, between=None) -> list[str]:
    """Return the ids of all pages, doing something between them."""
    seen: list[str] = []
    parameters = {"limit": str(limit)}
    while True:
        page = (await client.get("/v1/deals", params=parameters)).json()
        seen += [item["id"] for item in page["items"]]
        if page["next"] is None:
            return seen
        parameters["after"] = page["next"]
        if between is not None:
            await between()


async def open_deals(client: httpx.AsyncClient, count: int) -> list[str]:
    return [(await client.post("/v1/deals", json={"title": f"{n}"})).json()["id"] for n in range(count)]


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 200])
async def test_pages_of_any_size_hold_each_deal_once(client, limit: int):
    ids = await open_deals(client, 6)
    assert await walk(client, limit) == ids[::-1]


async def test_deals_that_are_opened_meanwhile_move_nothing(client):
    ids = await open_deals(client, 5)

    async def open_another() -> None:
        await open_deals(client, 1)

    assert await walk(client, 2, open_another) == ids[::-1]


async def test_a_deal_that_ends_meanwhile_is_neither_lost_nor_repeated_in_the_whole_list(client):
    ids = await open_deals(client, 5)

    async def end_the_newest() -> None:
        await client.post(f"/v1/deals/{ids[-1]}/cancel")

    assert await walk(client, 2, end_the_newest) == ids[::-1]


async def test_a_cursor_of_another_tenant_opens_nothing(world: World, client):
    ids = await open_deals(client, 3)
    cursor = (await client.get("/v1/deals", params={"limit": "1"})).json()["next"]
    stranger = world.client(bearer=token(OTHER_TENANT))
    assert (await stranger.get("/v1/deals", params={"after": cursor})).json() == {"items": [], "next": None}
    assert len(ids) == 3


@pytest.mark.parametrize(
    "cursor",
    [
        "", "x", "é", "====", "AAAA", "\0", "a" * 10_000, "bnVsbA", "W10", "WyJkZWFscyJd",
        "WyJkZWFscyIsN10", "WyJkZWFscyIsIngiXQ", "WyJvdGhlciIsIjNmNmYwYTUyLTZhMGUtNGI3ZS05YTUxLTBkMmYxYThiN2NmZiJd",
        "WyJkZWFscyIsIjNmNmYwYTUyLTZhMGUtNGI3ZS05YTUxLTBkMmYxYThiN2NmZiJd=",
        "3f6f0a52-6a0e-4b7e-9a51-0d2f1a8b7cff",
    ],
)  # fmt: skip
async def test_what_is_no_cursor_of_this_list_is_refused(client, cursor: str):
    answer = await client.get("/v1/deals", params={"after": cursor})
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert answer.json()["errors"] == [{"location": "query.after", "message": "not a cursor of this list"}]


async def test_a_misspelt_filter_is_refused_and_is_no_unfiltered_list(client):
    for query in ("stauts=Active", "Status=Active", "limit=1&page=2", "tenant_id=1"):
        answer = await client.get(f"/v1/deals?{query}")
        assert (answer.status_code, answer.json()["code"]) == (422, "validation_error"), query
    answer = await client.post("/v1/deals?dry_run=true", json={"title": "Flat"})
    assert answer.json()["errors"] == [{"location": "query.dry_run", "message": "the route has no such parameter"}]
    assert (await client.get("/v1/deals?limit=1&status=Active")).status_code == 200


async def test_what_was_loaded_can_be_read_after_the_commit_without_asking_again(world: World):
    """An attribute that expired with the commit would ask the database outside of any session."""
    deal_id = await world.deal()
    async with world.system().write() as session:
        deal = await get_deal_for_update(session, deal_id)
        deal.title = "House"
    assert (deal.id, deal.title, deal.version, deal.status) == (deal_id, "House", 1, DealStatus.ACTIVE)
    assert not session.in_transaction()
    assert await world.admin.fetchval("select title from crm.deal") == "House"
