"""What the database itself keeps of bookings: timers by state, tenants and partners apart, claims served by indexes."""

from uuid import UUID, uuid4

import asyncpg
import pytest
from booking_desk import Desk
from crm_world import OTHER_TENANT, TENANT, World

from chassis.db import open_connection
from crm.repository import ANSWERS_LATE, BOOKED_OVER, QUOTES_OVER, RESERVED_OVER, TimerClaim


@pytest.fixture
def desk(world: World) -> Desk:
    return Desk(world, world.system())


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("state = 'lost', reserved_until = null", "ck_state_known"),
        ("reserved_until = null", "ck_reserved_until_iff_reserved"),
        ("state = 'cancelled'", "ck_reserved_until_iff_reserved"),
        ("booked_until = updated_at", "ck_booked_until_iff_booked"),
        ("answer_due_at = updated_at", "ck_answer_due_iff_waiting"),
        ("quote_expires_at = updated_at", "ck_quote_iff_quoted"),
        ("came_from = 'draft'", "ck_came_from_iff_unknown"),
        ("state = 'unknown', answer_due_at = updated_at", "ck_came_from_iff_unknown"),
        ("currency = null", "ck_price_has_currency"),
        ("charged_minor = -1", "ck_price_has_currency"),
    ],
)
async def test_an_impossible_booking_is_refused(desk: Desk, change: str, constraint: str) -> None:
    booking = await desk.held()
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await desk.world.admin.execute(f"update crm.booking set {change} where id = $1", booking)
    assert refused.value.constraint_name == constraint


async def test_an_impossible_object_of_a_booking_is_refused(desk: Desk) -> None:
    await desk.held()
    for change in ("asked = 'eat'", "outcome = 'lost'", "sequence = null", "asked = null"):
        with pytest.raises(asyncpg.CheckViolationError):
            await desk.world.admin.execute(f"update crm.booking_object set {change}")


@pytest.mark.req("EVT-018")
@pytest.mark.parametrize("table", ["booking", "booking_object", "booking_history", "object_claim", "partner_limit"])
async def test_the_apis_role_sees_its_tenants_rows_and_a_partner_its_own(desk: Desk, table: str) -> None:
    partner = uuid4()
    await desk.held(partnerId=str(partner))
    await desk.post("partner-limits", partnerId=str(partner), limitMinor=1, currency="EUR")

    async def seen(tenant: UUID | None, own: UUID | None = None) -> int:
        connection = await open_connection(desk.world.database.direct_url("crm_api"))
        try:
            await connection.execute("select set_config('app.tenant', $1, false)", str(tenant or ""))
            await connection.execute("select set_config('app.partner', $1, false)", str(own or ""))
            return int(await connection.fetchval(f"select count(*) from crm.{table}"))
        finally:
            await connection.close()

    assert await seen(TENANT) > 0
    assert await seen(OTHER_TENANT) == 0
    assert await seen(None) == 0
    assert await seen(TENANT, partner) > 0
    assert (await seen(TENANT, uuid4()) == 0) == (table != "object_claim")


@pytest.mark.parametrize("role", ["crm_api", "crm_system"])
async def test_no_role_of_the_service_deletes_a_booking_or_rewrites_its_past(desk: Desk, role: str) -> None:
    await desk.held()
    connection = await open_connection(desk.world.database.direct_url(role))
    try:
        for statement in (
            "delete from crm.booking",
            "update crm.booking set deal_id = deal_id",
            "update crm.booking set partner_id = partner_id",
            "delete from crm.booking_history",
            "update crm.booking_history set actor = 'nobody'",
            "update crm.booking_object set property_object_id = property_object_id",
            "delete from crm.object_claim",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("due", "index"),
    [
        (RESERVED_OVER, "ix_booking_reserved"),
        (BOOKED_OVER, "ix_booking_booked"),
        (ANSWERS_LATE, "ix_booking_answer_due"),
        (QUOTES_OVER, "ix_booking_quoted"),
    ],
)
async def test_each_claim_is_served_by_its_partial_index(world: World, due: TimerClaim, index: str) -> None:
    await world.admin.execute("set enable_seqscan = off; set enable_bitmapscan = off")
    plan = await world.admin.fetch(
        f"explain select t.id from crm.booking t where {due.states} and t.{due.column} < $1"
        f" order by t.{due.column}, t.id limit 200 for update skip locked",
        world.now,
    )
    await world.admin.execute("reset enable_seqscan; reset enable_bitmapscan")
    said = "\n".join(row[0] for row in plan)
    assert index in said
    assert "Sort" not in said
