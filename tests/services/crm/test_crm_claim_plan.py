"""The claim of timeline-overdue reads the partial index and as much of it as it takes, first and continued."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import orjson
import pytest
from crm_world import World

from chassis.db import open_connection
from crm.repository import OVERDUE

INDEX = "ix_deal_timeline_event_in_progress"
TABLE = "deal_timeline_event"
LIMIT = 100
SEED = """
insert into crm.deal_timeline_event (id, deal_id, tenant_id, type, status, occurred_at, due_at, payload, created_at,
                                     updated_at, completed_at)
select gen_random_uuid(), d.id, d.tenant_id, 'DocumentRequested', s.status, $1,
       $1::timestamptz + make_interval(mins => n), '{"document": "passport"}', $1, $1,
       case when s.status = 'Done' then $1 end
from crm.deal d, generate_series(1, $2::int) n
cross join (values ('InProgress'), ('InProgress'), ('Done'), ('Overdue')) as s(status)
"""

Node = dict[str, Any]


def nodes(plan: Node) -> Iterator[Node]:
    """Yield a plan's node and all below it."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def scans_of_table(plan: Node) -> list[Node]:
    """Return the nodes that read steps, but for the look at poison rows by their primary key."""
    found = [node for node in nodes(plan) if node.get("Relation Name") == TABLE]
    return [node for node in found if node.get("Index Name") != "deal_timeline_event_pkey"]


@pytest.fixture
async def seeded(world: World) -> World:
    """20,000 steps in progress, half of them due, among 20,000 that are not."""
    await world.deal()
    await world.admin.execute(SEED, world.ago(minutes=5000), 10_000)
    await world.admin.execute("vacuum (analyze) crm.deal_timeline_event")
    return world


async def explain(world: World, cursor: tuple[Any, ...], *, generic: bool, analyze: bool = False) -> Node:
    """Return the plan of the claim in the worker's role, for these values or (generic) for any."""
    sql = OVERDUE._next if cursor else OVERDUE._first
    types = "bigint, text, uuid, timestamptz" + (", timestamptz, uuid" if cursor else "")
    values = (LIMIT, "timeline-overdue", uuid4(), world.now, *cursor)
    literals = ", ".join(str(value) if isinstance(value, int) else f"'{value}'" for value in values)
    worker = await open_connection(world.database.direct_url("crm_system"))
    try:
        mode = "force_generic_plan" if generic else "force_custom_plan"
        await worker.execute(f"set plan_cache_mode = {mode}; prepare claim ({types}) as {sql}")
        options = "format json, analyze, buffers" if analyze else "format json"
        async with worker.transaction():
            answer = await worker.fetchval(f"explain ({options}) execute claim ({literals})")
    finally:
        await worker.close()
    return orjson.loads(answer)[0]["Plan"]


async def middle(world: World) -> tuple[Any, ...]:
    """Return (due time, id) of a row amid those that are due."""
    row = await world.admin.fetchrow(
        f"select due_at, id from crm.{TABLE} where status = 'InProgress' order by due_at, id offset 5000 limit 1"
    )
    return (row["due_at"], row["id"])


@pytest.mark.req("TLO-31")
async def test_first_and_continued_claims_use_the_partial_index(seeded: World) -> None:
    for cursor in ((), await middle(seeded)):
        for generic in (False, True):
            plan = await explain(seeded, cursor, generic=generic)
            taking, counting = sorted(scans_of_table(plan), key=lambda node: node["Node Type"], reverse=True)
            assert taking["Node Type"] == "Index Scan", plan
            assert counting["Node Type"] in ("Index Scan", "Index Only Scan"), plan
            for scan in (taking, counting):
                assert (scan["Index Name"], scan["Scan Direction"]) == (INDEX, "Forward")
                assert "due_at <" in scan["Index Cond"]
                assert not cursor or "ROW(due_at, id) >" in scan["Index Cond"]
            for sort in (node for node in nodes(plan) if "Sort" in node["Node Type"]):
                assert not scans_of_table(sort), "the index gives the order"


@pytest.mark.req("TLO-31")
async def test_claim_reads_no_more_rows_than_it_takes(seeded: World) -> None:
    for cursor in ((), await middle(seeded)):
        plan = await explain(seeded, cursor, generic=True, analyze=True)
        assert plan["Actual Rows"] == LIMIT
        for scan in scans_of_table(plan):
            assert (scan["Actual Rows"], scan["Actual Loops"]) == (LIMIT, 1)
            assert scan.get("Rows Removed by Filter", 0) == 0


async def test_claim_passes_over_the_rows_that_are_not_due(world: World) -> None:
    deal = await world.deal()
    await world.admin.execute(SEED, world.now + timedelta(minutes=1), 2000)
    due = await world.step(deal, due=world.ago(minutes=1))
    await world.admin.execute("vacuum (analyze) crm.deal_timeline_event")
    plan = await explain(world, (), generic=True, analyze=True)
    assert [scan["Actual Rows"] for scan in scans_of_table(plan)] == [1, 1]
    assert await world.run_job() == {"processed": 1, "batches": 1, "skipped_locked": 0, "failed": 0}
    assert await world.steps_in("Overdue") >= {due}
