"""Objects imported from CSV: all forms of the file, every fault with its place, and nothing written twice."""

import asyncio
from decimal import Decimal
from typing import Any
from uuid import UUID

import httpx
import pytest
from board_world import OTHER_TENANT, World, token

from chessboard.domain import MOST_LINES, read_sheet

HEADER = "building;section;number;floor;rooms;area;price;currency\n"
OFFER = "pin.chessboard.offer.v1"
STATUS_CHANGED = "pin.chessboard.property-object-status-changed.v1"


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client(bearer=token(roles=["SALES_ADMIN"]))


@pytest.fixture
async def project(world: World) -> UUID:
    project = await world.project()
    await world.building(project, "A", sections=2)
    return project


async def send(client: httpx.AsyncClient, project: UUID, content: str | bytes, **options: Any) -> httpx.Response:
    headers = {"content-type": "text/csv"}
    if "key" in options:
        headers["idempotency-key"] = options.pop("key")
    return await client.post(f"/v1/projects/{project}/imports", content=content, params=options, headers=headers)


def counts(answer: httpx.Response) -> tuple[int, int, int, int]:
    assert answer.status_code == 200, answer.text
    report = answer.json()
    return report["created"], report["changed"], report["unchanged"], report["kept"]


async def rows(world: World) -> dict[str, dict[str, Any]]:
    found = await world.admin.fetch("select * from chessboard.property_object order by number")
    return {row["number"]: dict(row) for row in found}


@pytest.mark.parametrize(
    "content",
    [
        HEADER + "A;1;12;3;2;54,3;12 500 000,50;RUB\n",
        "\ufeffprice;area;Rooms;FLOOR;number;section;building;currency\r\n12\u00a0500\u00a0000.50;54.30;2;3;12;1;A;rub\r\n",
        'number,building,section,floor,rooms,area,price\n\n12,A,1,3,2,"54,30","12500000,5"\n\n',
        '"building";"section";"number";"floor";"rooms";"area";"price"\n"A";1;"12";3;2;54.3;12500000.50',
    ],
)
async def test_a_file_is_read_in_the_forms_in_which_people_save_it(world: World, client, project, content):
    answer = await send(client, project, content, currency="RUB")
    assert counts(answer) == (1, 0, 0, 0)
    row = (await rows(world))["12"]
    assert (row["price_minor"], row["currency"], row["area"]) == (1_250_000_050, "RUB", Decimal("54.30"))
    assert (row["section"], row["floor"], row["rooms"], row["status"]) == (1, 3, 2, "Free")
    assert (row["status_source"], row["version"]) == ("Import", 1)
    assert await world.recalc_requests() == [project]
    [version] = await world.history(row["id"])
    assert (version["source"], version["actor"]) == ("Import", "user-7")


async def test_prices_are_kept_in_the_minor_units_of_their_currency(world: World, client, project):
    lines = "A;1;yen;1;1;20;1500000;JPY\nA;1;dinar;1;1;20;1500,125;KWD\nA;1;euro;1;1;20;0,01;EUR\n"
    await send(client, project, HEADER + lines)
    assert {name: row["price_minor"] for name, row in (await rows(world)).items()} == {
        "yen": 1_500_000, "dinar": 1_500_125, "euro": 1,
    }  # fmt: skip


async def test_the_same_file_again_writes_nothing(world: World, client, project):
    content = HEADER + "".join(f"A;1;{number};1;1;20,5;100;RUB\n" for number in range(50))
    assert counts(await send(client, project, content)) == (50, 0, 0, 0)
    before = (await world.audit(), await rows(world), await world.recalc_requests())
    assert counts(await send(client, project, content)) == (0, 0, 50, 0)
    assert (await world.audit(), await rows(world), await world.recalc_requests()) == before
    assert await world.outbox() == []


async def test_a_changed_price_is_announced_and_a_changed_plan_is_audited(world: World, client, project):
    await send(client, project, HEADER + "A;1;1;1;1;20;100;RUB\nA;1;2;1;1;20;100;RUB\nA;1;3;1;1;20;100;RUB\n")
    changed = HEADER + "A;1;1;1;1;20;101;RUB\nA;2;2;5;2;21,5;100;RUB\nA;1;3;1;1;20;100;RUB\n"
    assert counts(await send(client, project, changed)) == (0, 2, 1, 0)
    found = await rows(world)
    [event] = await world.outbox()
    assert (event["topic"], event["message_key"]) == (OFFER, str(found["1"]["id"]))
    assert (found["1"]["price_minor"], found["1"]["version"]) == (10_100, 2)
    assert (found["2"]["section"], found["2"]["floor"], found["2"]["rooms"]) == (2, 5, 2)
    assert [row["entity_id"] for row in await world.audit("property-object.measured")] == [found["2"]["id"]]


@pytest.mark.parametrize("status", ["Reserved", "Booked", "Sold"])
async def test_what_is_held_or_sold_keeps_its_status(world: World, client, project, status):
    building = await world.admin.fetchval("select id from chessboard.building where name = 'A'")
    unit = await world.property_object(building, status=status, number="1", area=Decimal(20), floor=1, rooms=1)
    header = HEADER.strip() + ";status\n"
    answer = await send(client, project, header + "A;1;1;1;1;20;100;RUB;Hidden\n")
    row = await world.object_row(unit)
    assert row["status"] == status
    assert answer.json()["kept"] == 1
    assert row["price_minor"] == (1_250_000_000 if status == "Sold" else 10_000)
    assert [event["topic"] for event in await world.outbox()] == ([] if status == "Sold" else [OFFER])


async def test_a_file_hides_and_shows_objects(world: World, client, project):
    header = HEADER.strip() + ";status\n"
    await send(client, project, header + "A;1;1;1;1;20;100;RUB;\nA;1;2;1;1;20;100;RUB;Hidden\n")
    assert [row["status"] for row in (await rows(world)).values()] == ["Free", "Hidden"]
    again = await send(client, project, header + "A;1;1;1;1;20;99;RUB;hidden\nA;1;2;1;1;20;100;RUB;Free\n")
    assert counts(again) == (0, 2, 0, 0)
    found = await rows(world)
    assert [(row["status"], row["version"]) for row in found.values()] == [("Hidden", 3), ("Free", 2)]
    assert [row["status_source"] for row in found.values()] == ["Import", "Import"]
    assert len(await world.events(STATUS_CHANGED)) == 2
    assert len(await world.events(OFFER)) == 1


FAULTS = (
    "A;1;1;1;1;20;100;RUB\n"  # 2: valid
    "B;1;2;1;1;20;100;RUB\n"  # 3
    "A;3;3;1;1;20;100;RUB\n"  # 4
    "A;x;;999;-1;0;1,2,3;rubles\n"  # 5
    "A;1;6;1;1;20,123;10,001;RUB\n"  # 6
    "A;1;1;1;1;20;100;RUB\n"  # 7: as in line 2
    "A;1;8;1;1;20\n"  # 8
    '"A\nB";1;9;1;1;20;100;RUB\n'  # 9 and 10
    "A;1;11;1;1;20;-5;RUB\n"  # 11
)
EXPECTED = [
    (3, "building", "unknown_building"),
    (4, "section", "unknown_section"),
    (5, "section", "not_a_number"), (5, "number", "required"), (5, "floor", "out_of_range"),
    (5, "rooms", "out_of_range"), (5, "area", "out_of_range"), (5, "price", "not_a_number"),
    (5, "currency", "not_a_currency"),
    (6, "area", "too_precise"), (6, "price", "too_precise"),
    (7, "number", "repeated"),
    (8, None, "wrong_field_count"),
    (9, "building", "not_text"),
    (11, "price", "out_of_range"),
]  # fmt: skip


async def test_every_fault_is_told_with_line_column_and_code_and_nothing_is_written(world: World, client, project):
    answer = await send(client, project, HEADER + FAULTS)
    assert (answer.status_code, answer.json()["code"]) == (422, "import_refused")
    assert [(one["line"], one["column"], one["code"]) for one in answer.json()["errors"]] == EXPECTED
    assert answer.json()["errors"][0]["location"] == "line.3.building"
    assert await rows(world) == {}
    assert await world.audit() == []


async def test_a_dry_run_tells_the_same_and_writes_nothing(world: World, client, project):
    answer = await send(client, project, HEADER + FAULTS, dryRun=True)
    report = answer.json()
    assert (report["applied"], report["lines"], report["created"]) == (False, 9, 1)
    assert [(one["line"], one["column"], one["code"]) for one in report["errors"]] == EXPECTED
    assert await rows(world) == {}
    assert await world.audit() == await world.outbox() == await world.recalc_requests() == []


async def test_valid_lines_alone_are_imported_on_demand(world: World, client, project):
    answer = await send(client, project, HEADER + FAULTS, validOnly=True)
    assert counts(answer) == (1, 0, 0, 0)
    assert (answer.json()["applied"], answer.json()["errorCount"]) == (True, len(EXPECTED))
    assert list(await rows(world)) == ["1"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", [(0, None, "empty")]),
        (b"\xef\xbb\xbf", [(0, None, "empty")]),
        (HEADER.encode(), [(0, None, "empty")]),
        ("здание;цена".encode("cp1251"), [(0, None, "not_utf8")]),
        (
            b"building;section;number;floor;rooms;area;area;colour\n",
            [(1, "area", "repeated_column"), (1, "colour", "unknown_column"), (1, "price", "missing_column")],
        ),
        (HEADER.encode() + b'A;1;"1;1;1;20;100;RUB\n', [(2, None, "not_csv")]),
        (HEADER.encode() + b"A;1;1\0;1;1;20;100;RUB\n", [(2, "number", "not_text")]),
        (HEADER.encode() + "A;١;1;1;1;20;100;RUB\n".encode(), [(2, "section", "not_a_number")]),
        (
            HEADER.encode() + b"A;1;1;1;1;20;100;RUB\n" * (MOST_LINES + 1),
            [(line + 2, "number", "repeated") for line in range(1, MOST_LINES)]
            + [(MOST_LINES + 2, None, "too_many_lines")],
        ),
    ],
)
def test_a_file_that_is_none_is_told_so(content: bytes, expected: list[tuple[int, str | None, str]]):
    sheet = read_sheet(content)
    assert [(error.line, error.column, error.code) for error in sheet.errors] == expected


async def test_a_file_larger_than_a_megabyte_is_not_read(world: World, client, project):
    answer = await send(client, project, HEADER + "x" * 1024 * 1024)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_two_imports_of_one_file_at_the_same_time_add_each_object_once(world: World, client, project):
    content = HEADER + "".join(f"A;1;{number};1;1;20;100;RUB\n" for number in range(200))
    answers = await asyncio.gather(*(send(client, project, content) for _ in range(4)))
    assert sorted(counts(answer)[0] for answer in answers) == [0, 0, 0, 200]
    assert len(await rows(world)) == 200


async def test_an_import_under_a_key_is_done_once(world: World, client, project):
    content = HEADER + "A;1;1;1;1;20;100;RUB\n"
    first, second = [await send(client, project, content, key="file-1") for _ in range(2)]
    assert counts(first) == counts(second) == (1, 0, 0, 0)
    assert second.headers["idempotency-replayed"] == "true"


async def test_the_project_and_the_buildings_of_another_tenant_are_not_there(world: World, client, project):
    theirs = await world.project(OTHER_TENANT)
    await world.building(theirs, "theirs")
    content = HEADER + "theirs;1;1;1;1;20;100;RUB\n"
    assert (await send(client, theirs, content)).status_code == 404
    refused = await send(client, project, content)
    assert [one["code"] for one in refused.json()["errors"]] == ["unknown_building"]


async def test_the_largest_file_is_imported_in_one_transaction(world: World, client, project):
    content = HEADER + "".join(f"A;1;{number};{number % 25};2;54,3;12500000;RUB\n" for number in range(MOST_LINES))
    assert counts(await send(client, project, content)) == (MOST_LINES, 0, 0, 0)
    dearer = content.replace("12500000", "12600000")
    assert counts(await send(client, project, dearer)) == (0, MOST_LINES, 0, 0)
    assert len(await world.outbox()) == MOST_LINES
