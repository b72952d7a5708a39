"""The claims of the safety net read their partial indexes, and as much of them as they take."""

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import orjson
import pytest
from board_world import World
from net_pieces import GRACE

from chassis.db import open_connection
from chessboard import expired_holds
from chessboard.domain import Phase

LIMIT = 100
SEED = """
insert into chessboard.property_object (id, tenant_id, project_id, building_id, section, number, floor, rooms, area,
  price_minor, currency, status, reserved_until, booked_until, hold_deal_id, hold_booking_id, status_source,
  status_changed_at, version, created_at, updated_at)
select gen_random_uuid(), b.tenant_id, b.project_id, b.id, 1, s.status || n, 1, 1, 30, 1, 'RUB', s.status,
  case when s.status = 'Reserved' then $2::timestamptz + make_interval(mins => n) end,
  case when s.status = 'Booked' then $2::timestamptz + make_interval(mins => n) end,
  case when s.status <> 'Free' then gen_random_uuid() end, case when s.status <> 'Free' then gen_random_uuid() end,
  'Crm', $2, 1, $2, $2
from chessboard.building b, generate_series(1, $3::int) n
cross join (values ('Reserved'), ('Booked'), ('Free')) as s(status) where b.id = $1
"""

Node = dict[str, Any]


def nodes(plan: Node) -> Iterator[Node]:
    """Yield a plan's node and all below it."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def scans(plan: Node, table: str = "property_object") -> list[Node]:
    """Return the nodes that read a table, but for the look at poison rows by their primary key."""
    found = [node for node in nodes(plan) if node.get("Relation Name") == table]
    return [node for node in found if node.get("Index Name") != "property_object_pkey"]


@pytest.fixture
async def seeded(world: World) -> World:
    """10,000 holds of each kind, half of them over, among as many free objects."""
    building = await world.building(await world.project())
    await world.admin.execute(SEED, building, world.ago(minutes=5000), 10_000)
    await world.admin.execute("vacuum (analyze) chessboard.property_object")
    return world


async def explain(world: World, types: str, sql: str, values: tuple[Any, ...], *, generic: bool, analyze: bool) -> Node:
    """Return the plan of a statement in the worker's role, for these values or (generic) for any."""
    literals = ", ".join(str(value) if isinstance(value, int) else f"'{value}'" for value in values)
    worker = await open_connection(world.database.direct_url("chessboard_system"))
    try:
        mode = "force_generic_plan" if generic else "force_custom_plan"
        await worker.execute(f"set plan_cache_mode = {mode}; prepare asked ({types}) as {sql}")
        options = "format json, analyze, buffers" if analyze else "format json"
        async with worker.transaction():
            answer = await worker.fetchval(f"explain ({options}) execute asked ({literals})")
    finally:
        await worker.close()
    return orjson.loads(answer)[0]["Plan"]


@pytest.mark.req("HLD-45", "HLD-55", "HLD-57")
@pytest.mark.parametrize("phase", Phase)
async def test_each_claim_uses_its_partial_index_and_reads_no_more_than_it_takes(seeded: World, phase: Phase) -> None:
    claim = expired_holds.CLAIMS[phase]
    values = (LIMIT, claim.job, uuid4(), seeded.now, GRACE)
    for generic in (False, True):
        plan = await explain(
            seeded, "bigint, text, uuid, timestamptz, interval", claim._first, values, generic=generic, analyze=True
        )
        assert plan["Actual Rows"] == LIMIT
        taking, counting = sorted(scans(plan), key=lambda node: node["Node Type"], reverse=True)
        assert taking["Node Type"] == "Index Scan", plan
        for scan in (taking, counting):
            assert scan["Index Name"] == f"ix_property_objects_{phase.value}_until"
            assert scan["Scan Direction"] == "Forward"
            assert f"{phase.value}_until <" in scan["Index Cond"]
            assert (scan["Actual Rows"], scan["Actual Loops"]) == (LIMIT, 1)
            assert scan.get("Rows Removed by Filter", 0) == 0
        for sort in (node for node in nodes(plan) if "Sort" in node["Node Type"]):
            assert not scans(sort), "the index gives the order"


@pytest.mark.req("HLD-55", "HLD-57")
@pytest.mark.parametrize("phase", Phase)
async def test_the_partial_indexes_are_named_and_bounded_as_the_source_says(world: World, phase: Phase) -> None:
    definition = await world.admin.fetchval(
        "select indexdef from pg_indexes where schemaname = 'chessboard' and indexname = $1",
        f"ix_property_objects_{phase.value}_until",
    )
    assert definition.endswith(f"({phase.value}_until, id) WHERE ({phase.value}_until IS NOT NULL)")


async def test_backlog_and_report_read_the_partial_indexes_too(seeded: World) -> None:
    for phase in Phase:
        plan = await explain(
            seeded, "timestamptz, interval, bigint", expired_holds._LOOK[phase], (seeded.now, GRACE, LIMIT),
            generic=True, analyze=False,
        )  # fmt: skip
        assert [scan["Index Name"] for scan in scans(plan)] == [f"ix_property_objects_{phase.value}_until"]
    plan = await explain(
        seeded, "timestamptz, interval", expired_holds._BACKLOG, (seeded.now, GRACE), generic=True, analyze=False
    )
    names = {node["Index Name"] for node in nodes(plan) if "Index Name" in node}
    assert names == {f"ix_property_objects_{phase.value}_until" for phase in Phase}


async def test_the_radar_asks_the_history_by_its_index(seeded: World) -> None:
    await seeded.admin.execute(
        "insert into chessboard.property_object_version (property_object_id, version, tenant_id, from_status,"
        " to_status, source, reserved_until, price_minor, currency, correlation_id, changed_at)"
        " select id, v, tenant_id, case v when 2 then 'Free' else 'Reserved' end,"
        " case v when 2 then 'Reserved' else 'Free' end, case when n % 50 = 0 then 'Crm' else 'ExpirationJob' end,"
        " case v when 2 then $1::timestamptz end, 1, 'RUB', 'x', $1::timestamptz + make_interval(secs => n)"
        " from (select id, tenant_id, row_number() over () as n from chessboard.property_object) o,"
        " generate_series(2, 3) v",
        seeded.ago(hours=10),
    )
    await seeded.admin.execute("vacuum (analyze) chessboard.property_object_version")
    plan = await explain(
        seeded, "text, timestamptz, timestamptz", expired_holds._RELEASED,
        ("Crm", seeded.ago(minutes=30), seeded.now), generic=True, analyze=False,
    )  # fmt: skip
    (scan,) = scans(plan, "property_object_version")
    assert scan["Index Name"] == "ix_property_object_version_freed"
    plan = await explain(
        seeded, "timestamptz, timestamptz, bigint", expired_holds._DELAYS,
        (seeded.ago(minutes=1), seeded.now, 100), generic=False, analyze=False,
    )  # fmt: skip
    assert "ix_property_object_version_freed" in {node.get("Index Name") for node in nodes(plan)}
