"""The grid: floors by sections, the countdown of what is held, filters, and what a caller need not be sent again."""

import gzip
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from board_world import OTHER_TENANT, World

from chessboard.api.grid import GridView


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client()


async def cells(client: httpx.AsyncClient, project: UUID, **filters: Any) -> dict[str, dict[str, Any]]:
    answer = await client.get(f"/v1/projects/{project}/grid", params=filters)
    assert answer.status_code == 200, answer.text
    grid = answer.json()
    GridView.model_validate(grid)
    return {
        cell["number"]: cell
        for building in grid["buildings"]
        for floor in building["floors"]
        for section in floor["sections"]
        for cell in section["objects"]
    }


async def test_the_grid_shows_floors_from_the_top_by_sections_in_the_order_of_numbers(world: World, client):
    project = await world.project()
    second, first = await world.building(project, "10"), await world.building(project, "9")
    for building, floor, section, number in (
        (first, 1, 1, "2"), (first, 1, 1, "10"), (first, 2, 2, "20"), (first, 2, 1, "11"), (second, -1, 1, "P1"),
    ):  # fmt: skip
        await world.property_object(building, floor=floor, section=section, number=number)
    grid = (await client.get(f"/v1/projects/{project}/grid")).json()
    shown = [
        (building["name"], floor["floor"], section["section"], [cell["number"] for cell in section["objects"]])
        for building in grid["buildings"]
        for floor in building["floors"]
        for section in floor["sections"]
    ]
    assert shown == [
        ("9", 2, 1, ["11"]), ("9", 2, 2, ["20"]), ("9", 1, 1, ["2", "10"]), ("10", -1, 1, ["P1"]),
    ]  # fmt: skip


async def test_a_hold_counts_down_waits_in_grace_and_shows_who_ended_it(world: World, client):
    building = await world.building(project := await world.project())
    runs = await world.property_object(building, number="runs", status="Reserved", until=world.ago(seconds=-90))
    ends = await world.property_object(building, number="ends", status="Booked", until=world.now)
    late = await world.property_object(building, number="late", status="Booked", until=world.ago(seconds=1))
    await world.property_object(building, number="freed", source="ExpirationJob")
    await world.property_object(building, number="free", source="Crm")
    shown = await cells(client, project)
    assert {name: (cell.get("holdState"), cell.get("secondsLeft")) for name, cell in shown.items()} == {
        "runs": ("running", 90),
        "ends": ("running", 0),
        "late": ("grace", 0),
        "freed": ("released_by_safety_net", None),
        "free": (None, None),
    }
    assert [shown[name]["id"] for name in ("runs", "ends", "late")] == [str(runs), str(ends), str(late)]
    assert shown["runs"]["until"] == "2026-11-30T09:01:30Z"
    assert shown["late"]["graceUntil"] == "2026-11-30T09:09:59Z", "PIN_HOLD_GRACE is ten minutes"
    assert shown["free"].keys().isdisjoint({"until", "graceUntil", "holdState"})


async def test_filters_narrow_the_grid_and_hidden_objects_are_shown_on_demand(world: World, client):
    project = await world.project()
    a, b = await world.building(project, "A"), await world.building(project, "B")
    await world.property_object(a, number="studio", rooms=0, area=Decimal("22.5"), price_minor=500)
    await world.property_object(a, number="two", rooms=2, area=Decimal("54.30"), price_minor=900, section=2)
    await world.property_object(b, number="three", rooms=3, area=Decimal(80), price_minor=1500, status="Reserved")
    await world.property_object(b, number="hidden", rooms=3, status="Hidden")
    wanted: list[tuple[dict[str, Any], set[str]]] = [
        ({}, {"studio", "two", "three"}),
        ({"status": ["Hidden", "Reserved"]}, {"hidden", "three"}),
        ({"rooms": [0, 3]}, {"studio", "three"}),
        ({"priceMin": 900, "priceMax": 1499}, {"two"}),
        ({"areaMin": "54.30", "areaMax": "80"}, {"two", "three"}),
        ({"building": str(a), "section": 1}, {"studio"}),
        ({"building": str(uuid4())}, set()),
    ]
    for filters, names in wanted:
        assert (await cells(client, project, **filters)).keys() == names, filters
    assert (await client.get(f"/v1/projects/{project}/grid", params={"roms": 3})).status_code == 422


async def test_a_caller_who_has_the_grid_is_not_sent_it_again_until_something_changes(world: World, client):
    unit = await world.property_object(building=await world.building(project := await world.project()))
    held = await world.property_object(
        building=(await world.object_row(unit))["building_id"], status="Reserved", until=world.ago(seconds=-5)
    )
    path = f"/v1/projects/{project}/grid?seconds=false"
    first = await client.get(path)
    tag = first.headers["etag"]
    assert tag.startswith('"')
    world.clock.advance(timedelta(seconds=4))
    again = await client.get(path, headers={"if-none-match": f'"other", {tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    await world.admin.execute("update chessboard.property_object set price_minor = 7 where id = $1", held)
    changed = await client.get(path, headers={"if-none-match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag


async def test_a_large_grid_is_compressed_for_whom_reads_that_and_has_a_tag_of_its_own(world: World, client):
    building = await world.building(project := await world.project())
    for number in range(20):
        await world.property_object(building, number=str(number))
    path = f"/v1/projects/{project}/grid"
    plain = await client.get(path, headers={"accept-encoding": "identity"})
    coded = await client.get(path, headers={"accept-encoding": "br, gzip;q=0.5"})
    assert "content-encoding" not in plain.headers
    assert coded.headers["content-encoding"] == "gzip"
    assert int(coded.headers["content-length"]) * 3 < int(plain.headers["content-length"])
    assert coded.content == plain.content, "httpx has unpacked it"
    assert len(gzip.compress(plain.content)) < len(plain.content)
    assert plain.headers["etag"] != coded.headers["etag"]
    assert "accept-encoding" in plain.headers["vary"]
    refused = await client.get(path, headers={"accept-encoding": "gzip;q=0, *"})
    assert "content-encoding" not in refused.headers


async def test_the_grid_of_another_tenant_is_not_there(world: World, client):
    project = await world.project(OTHER_TENANT)
    assert (await client.get(f"/v1/projects/{project}/grid")).status_code == 404
