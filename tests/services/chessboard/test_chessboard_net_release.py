"""The safety net on one process: which holds it frees, what it leaves of each, and what it says."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from board_world import OTHER_TENANT, TENANT, World, scrape
from net_pieces import (
    CHANGED,
    GRACE,
    JOB,
    PREFIX,
    counted,
    cycle,
    driver_of,
    everything,
    in_status,
    lost,
    lost_in_order,
    net,
    told,
)
from structlog.testing import capture_logs

from chassis.clock import MovableClock
from chassis.instants import rfc3339
from chassis.runtime import Stop
from chessboard.settings import ChessboardSettings

BOTH = pytest.mark.parametrize("status", ["Reserved", "Booked"])


# Which holds.


@pytest.mark.req("HLD-02", "HLD-32", "HLD-33", "HLD-34", "HLD-35", "HLD-36", "HLD-52", "HLD-61", "HLD-62", "HLD-64")
@BOTH
async def test_an_object_whose_hold_is_long_over_is_free_again(world: World, status: str) -> None:
    unit = await lost(world, status, version=7)
    before = await world.object_row(unit)
    counts = await cycle(net(world))
    assert counts == counted(**{status.lower(): 1})
    after = await world.object_row(unit)
    assert after == before | {
        "status": "Free",
        "reserved_until": None,
        "booked_until": None,
        "hold_deal_id": None,
        "hold_booking_id": None,
        "status_source": "ExpirationJob",
        "status_changed_at": world.now,
        "updated_at": world.now,
        "version": 8,
    }


@pytest.mark.req("HLD-12", "HLD-27", "HLD-40", "HLD-51", "HLD-54", "HLD-56")
@BOTH
async def test_a_hold_within_its_grace_is_left_alone_to_the_microsecond(world: World, status: str) -> None:
    edge = world.now - GRACE
    at, just_before = await lost(world, status, edge), await lost(world, status, edge - timedelta(microseconds=1))
    for until in (world.ago(seconds=1), world.now, world.ago(hours=-1)):
        await lost(world, status, until)
    assert sum((await cycle(net(world))).values()) == 1
    assert await in_status(world, "Free") == {just_before}
    assert at in await in_status(world, status)
    world.clock.advance(timedelta(microseconds=1))
    assert sum((await cycle(net(world))).values()) == 1
    assert await in_status(world, "Free") == {just_before, at}


@pytest.mark.req("HLD-27")
async def test_the_grace_is_configured(world: World) -> None:
    unit = await lost(world, until=world.ago(minutes=30))
    assert await cycle(net(world, hold_grace=timedelta(minutes=30))) == counted()
    assert await cycle(net(world, hold_grace="PT29M")) == counted(reserved=1)
    assert await in_status(world, "Free") == {unit}


@pytest.mark.req("HLD-18", "HLD-21", "HLD-27", "HLD-28")
def test_defaults_are_the_sources(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    settings = world.settings()
    assert settings.hold_grace == timedelta(minutes=10)
    assert settings.job_property_object_hold_expiration_interval == 60
    assert settings.job_property_object_hold_expiration_batch_size == 200
    assert settings.job_property_object_hold_expiration_report_only is False
    names = {f"PIN_{name.upper()}" for name in ChessboardSettings.model_fields}
    assert names >= {
        "PIN_HOLD_GRACE",
        "PIN_JOB_PROPERTY_OBJECT_HOLD_EXPIRATION_INTERVAL",
        "PIN_JOB_PROPERTY_OBJECT_HOLD_EXPIRATION_BATCH_SIZE",
    }
    driver = driver_of(net(world))
    assert (driver.job.name, driver.job.schedule) == (JOB, timedelta(seconds=60))


@pytest.mark.parametrize(
    "wrong",
    [
        {"hold_grace": timedelta(0)},
        {"hold_grace": timedelta(days=8)},
        {"hold_grace": "soon"},
        {"job_property_object_hold_expiration_batch_size": 0},
        {"job_property_object_hold_expiration_batch_size": 1001},
        {"job_property_object_hold_expiration_interval": 0},
    ],
)
async def test_what_no_cycle_could_run_with_is_refused_at_start(world: World, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        world.settings(**wrong)


@pytest.mark.req("HLD-30", "HLD-42", "HLD-53")
async def test_free_sold_and_hidden_objects_are_never_selected(world: World) -> None:
    for status in ("Free", "Sold", "Hidden"):
        await world.property_object(status=status)
    before = await everything(world)
    assert await cycle(net(world)) == counted()
    assert await everything(world) == before


@pytest.mark.req("HLD-44", "HLD-49", "HLD-81")
async def test_a_repeated_run_finds_nothing_left_to_free(world: World) -> None:
    await lost(world)
    await lost(world, "Booked")
    board = net(world)
    assert await cycle(board) == counted(1, 1)
    before = await everything(world)
    assert await cycle(board) == counted()
    assert await cycle(net(world)) == counted(), "another process, and no checkpoint to read"
    assert await everything(world) == before


@pytest.mark.req("HLD-29", "HLD-46", "HLD-50", "HLD-94b")
async def test_objects_of_all_tenants_are_freed_each_under_its_own(world: World) -> None:
    mine, other = await lost(world), await lost(world, tenant=OTHER_TENANT)
    with capture_logs() as logs:
        assert await cycle(net(world)) == counted(reserved=2)
    tenants = {UUID(row["message_key"]): row["headers"]["ce_tenantid"] for row in await world.outbox()}
    assert tenants == {mine: str(TENANT), other: str(OTHER_TENANT)}
    warned = {line["PropertyObjectId"]: line["TenantId"] for line in logs if line["event"] == "lost CRM release"}
    assert warned == {str(mine): str(TENANT), str(other): str(OTHER_TENANT)}
    assert {row["tenant_id"] for row in await world.audit()} == {TENANT, OTHER_TENANT}


@pytest.mark.req("HLD-63")
async def test_the_net_asks_for_no_hold_and_compares_none(world: World) -> None:
    units = [await lost(world, deal=uuid4(), booking=uuid4()) for _ in range(3)]
    assert await cycle(net(world)) == counted(reserved=3)
    assert await in_status(world, "Free") == set(units)


# How many, in which order.


@pytest.mark.req("HLD-21", "HLD-22", "HLD-28", "HLD-58")
async def test_each_phase_frees_at_most_a_batch_per_cycle_the_oldest_first(world: World) -> None:
    reserved, booked = await lost_in_order(world, 5), await lost_in_order(world, 3, "Booked")
    board = net(world, batch_size=2)
    assert await cycle(board) == counted(2, 2)
    assert told(await world.outbox()) == [*reserved[:2], *booked[:2]]
    assert (await scrape(board))[f"{PREFIX}_backlog"] == 4
    assert await cycle(board) == counted(2, 1)
    assert await cycle(board) == counted(1, 0), "the following cycles take what is left"
    assert await in_status(world, "Free") == {*reserved, *booked}
    assert (await scrape(board))[f"{PREFIX}_backlog"] == 0


@pytest.mark.req("HLD-22")
async def test_holds_that_ended_at_one_instant_go_by_their_ids(world: World) -> None:
    building = await world.building(await world.project())
    units = sorted([await lost(world, building=building) for _ in range(4)])
    await cycle(net(world, batch_size=3))
    assert told(await world.outbox()) == units[:3]


@pytest.mark.req("HLD-26", "HLD-35", "HLD-45")
async def test_one_instant_serves_the_cycle_and_reserved_comes_before_booked(world: World) -> None:
    booked, reserved = await lost(world, "Booked", world.ago(days=3)), await lost(world)

    class Ticking(MovableClock):
        looks = 0

        async def now(self, session: Any) -> Any:
            self.looks += 1
            self.advance(timedelta(minutes=1))
            return await super().now(session)

    clock = Ticking(world.now)
    with capture_logs() as logs:
        await cycle(world.board("jobs", clock=clock))
    assert clock.looks == 1
    phases = [(line["phase"], line["count"]) for line in logs if line["event"] == "batch selected"]
    assert phases == [("reserved", 1), ("booked", 1)]
    assert told(await world.outbox()) == [reserved, booked]
    for unit in (reserved, booked):
        row = await world.object_row(unit)
        assert row["status_changed_at"] == row["updated_at"] == clock.instant


@pytest.mark.req("HLD-23")
async def test_a_full_cycle_takes_far_less_than_its_goal(world: World) -> None:
    building = await world.building(await world.project())
    await world.admin.execute(
        "insert into chessboard.property_object (id, tenant_id, project_id, building_id, section, number, floor, rooms,"
        " area, price_minor, currency, status, reserved_until, booked_until, hold_deal_id, hold_booking_id,"
        " status_source, status_changed_at, version, created_at, updated_at)"
        " select gen_random_uuid(), b.tenant_id, b.project_id, b.id, 1, n::text, 1, 1, 30, 1, 'RUB',"
        " case when n % 2 = 0 then 'Reserved' else 'Booked' end, case when n % 2 = 0 then $2::timestamptz end,"
        " case when n % 2 = 1 then $2::timestamptz end, gen_random_uuid(), gen_random_uuid(), 'Crm', $2, 1, $2, $2"
        " from chessboard.building b, generate_series(1, 1000) n where b.id = $1",
        building,
        world.ago(hours=1),
    )
    result = await driver_of(net(world)).run_once()
    assert (result.counts["ReservedReleasedCount"], result.counts["BookedReleasedCount"]) == (200, 200)
    assert 0 < result.counts["DurationMs"] < 15_000


# What it leaves of each.


@pytest.mark.req("HLD-15", "HLD-37", "HLD-65", "HLD-69", "HLD-70", "HLD-71", "HLD-72", "HLD-73", "HLD-74")
@BOTH
async def test_each_object_is_announced_once_with_these_fields(world: World, status: str) -> None:
    unit = await lost(world, status, version=3)
    row = await world.object_row(unit)
    await cycle(net(world))
    (event,) = await world.outbox()
    assert event["topic"] == event["type"] == CHANGED
    assert (event["message_key"], event["aggregateid"], event["aggregatetype"]) == (
        str(unit), str(unit), "PropertyObject",
    )  # fmt: skip
    headers = event["headers"]
    assert (headers["ce_contractversion"], headers["ce_aggregatetype"]) == ("1", "PropertyObject")
    assert (headers["ce_sequence"], headers["ce_eventclass"]) == ("4", "domain")
    assert event["payload"] == {
        "PropertyObjectId": str(unit),
        "TenantId": str(TENANT),
        "ProjectId": str(row["project_id"]),
        "BuildingId": str(row["building_id"]),
        "FromStatus": status,
        "ToStatus": "Free",
        "StatusSource": "ExpirationJob",
        "ReservedUntil": None,
        "BookedUntil": None,
        "HoldDealId": None,
        "SoldAt": None,
        "StatusChangedAt": rfc3339(world.now),
        "Version": 4,
    }


@pytest.mark.req("HLD-38", "HLD-67")
async def test_each_object_asks_for_its_project_to_be_counted_again(world: World) -> None:
    units = [await lost(world), await lost(world, "Booked")]
    await cycle(net(world))
    projects = [(await world.object_row(unit))["project_id"] for unit in units]
    assert await world.recalc_requests() == projects
    assert {row["topic"] for row in await world.outbox()} == {CHANGED}, "that is no event on the bus"


@pytest.mark.req("HLD-76")
@BOTH
async def test_audit_and_history_keep_what_was_before(world: World, status: str) -> None:
    unit = await lost(world, status, version=3)
    row = await world.object_row(unit)
    until = rfc3339(row["reserved_until"] or row["booked_until"])
    await cycle(net(world))
    (event,) = await world.outbox()
    (record,) = await world.audit()
    assert (record["action"], record["entity_id"], record["actor"]) == ("property-object.status-changed", unit, None)
    assert (record["occurred_at"], record["correlation_id"]) == (world.now, str(event["run_id"]))
    assert record["details"] == {
        "from": status,
        "to": "Free",
        "source": "ExpirationJob",
        "version": 4,
        "asOf": rfc3339(world.now),
        "runId": str(event["run_id"]),
        "previousHoldDealId": str(row["hold_deal_id"]),
        "previousReservedUntil": until if status == "Reserved" else None,
        "previousBookedUntil": until if status == "Booked" else None,
    }
    (version,) = await world.history(unit)
    assert (version["version"], version["from_status"], version["to_status"]) == (4, status, "Free")
    assert (version["source"], version["correlation_id"]) == ("ExpirationJob", str(event["run_id"]))


@pytest.mark.req("HLD-47", "HLD-48", "HLD-94a", "HLD-94d")
async def test_the_runs_id_ties_together_all_that_a_cycle_writes(world: World) -> None:
    await lost(world)
    await lost(world, "Booked")
    board = net(world)
    with capture_logs() as logs:
        await cycle(board)
    outbox = await world.outbox()
    (run,) = {row["run_id"] for row in outbox}
    assert {row["headers"]["ce_correlationid"] for row in outbox} == {str(run)}
    assert not [row for row in outbox if "ce_causationid" in row["headers"]], "no event caused it"
    assert {row["correlation_id"] for row in await world.audit()} == {str(run)}
    assert [line["runId"] for line in logs if line["event"] == "cycle started"] == [str(run)]
    assert await world.admin.fetchval("select count(*) from chessboard.job_run where id = $1", run) == 1


@pytest.mark.req("HLD-13")
async def test_nothing_but_the_object_and_what_tells_of_it_is_written(world: World) -> None:
    unit = await lost(world)
    row = await world.object_row(unit)
    await world.admin.execute(
        "insert into chessboard.hold_ledger (property_object_id, booking_id, deal_id, last_sequence, released)"
        " values ($1, $2, $3, 1, false)",
        unit, row["hold_booking_id"], row["hold_deal_id"],
    )  # fmt: skip
    before = await everything(world)
    await cycle(net(world))
    changed = {line.split(" ", 1)[0] for line in set(await everything(world)) ^ set(before)}
    assert changed == {
        "property_object", "property_object_version", "outbox", "audit_log", "project_recalc_request",
    }  # fmt: skip


# What it says.


@pytest.mark.req("HLD-07", "HLD-39", "HLD-88", "HLD-89", "HLD-90", "HLD-91")
async def test_log_lines_carry_the_names_of_the_source(world: World) -> None:
    units = {"Reserved": await lost(world), "Booked": await lost(world, "Booked", world.ago(hours=2))}
    rows = {status: await world.object_row(unit) for status, unit in units.items()}
    with capture_logs() as logs:
        await cycle(net(world))
    (started,) = [line for line in logs if line["event"] == "cycle started"]
    (run,) = {row["run_id"] for row in await world.outbox()}
    assert (started["runId"], started["AsOf"]) == (str(run), rfc3339(world.now))
    assert started["HoldGrace"] == "0:10:00"
    selected = [line for line in logs if line["event"] == "batch selected"]
    assert [(line["phase"], line["count"]) for line in selected] == [("reserved", 1), ("booked", 1)]
    warned = {line["FromStatus"]: line for line in logs if line["event"] == "lost CRM release"}
    assert len(warned) == len([line for line in logs if line["event"] == "lost CRM release"]) == 2
    for status, row in rows.items():
        until = row["reserved_until"] or row["booked_until"]
        line = warned[status]
        assert line["log_level"] == "warning"
        assert (line["PropertyObjectId"], line["TenantId"]) == (str(row["id"]), str(TENANT))
        assert (line["ProjectId"], line["HoldDealId"]) == (str(row["project_id"]), str(row["hold_deal_id"]))
        assert (line["expiredTimer"], line["overdueBy"]) == (rfc3339(until), (world.now - until).total_seconds())
    (completed,) = [line for line in logs if line["event"] == "cycle completed"]
    assert {name: completed[name] for name in counted()} == counted(1, 1)
    assert completed["DurationMs"] >= 0


@pytest.mark.req("HLD-79", "HLD-93a", "HLD-93b", "HLD-93c", "HLD-93d", "HLD-93e", "HLD-93f")
async def test_metrics_carry_the_names_of_the_source(world: World) -> None:
    board = net(world, batch_size=2)
    before = await scrape(board)
    for sample in (
        "run_total", 'items_total{phase="reserved"}', 'items_total{phase="booked"}', "backlog", "skip_locked_total",
        "errors_total", "cycle_duration_seconds_count",
    ):  # fmt: skip
        assert before[f"{PREFIX}_{sample}"] == 0
    for _ in range(3):
        await lost(world)
    await lost(world, "Booked")
    counts = (await driver_of(board).run_once()).counts
    assert list(counts) == [
        "ReservedReleasedCount", "BookedReleasedCount", "SkippedLockedCount", "FailedCount", "DurationMs",
    ]  # fmt: skip
    after = await scrape(board)
    assert after[f"{PREFIX}_run_total"] == after[f"{PREFIX}_cycle_duration_seconds_count"] == 1
    assert (after[f'{PREFIX}_items_total{{phase="reserved"}}'], after[f'{PREFIX}_items_total{{phase="booked"}}']) == (
        2, 1,
    )  # fmt: skip
    assert (after[f"{PREFIX}_backlog"], after[f"{PREFIX}_errors_total"]) == (1, 0)


@pytest.mark.req("HLD-16")
async def test_nothing_is_freed_nor_warned_of_while_the_normal_path_works(world: World) -> None:
    for until in (world.ago(minutes=9), world.ago(hours=-1)):
        await lost(world, until=until)
    board = net(world)
    with capture_logs() as logs:
        await cycle(board)
    assert [line["event"] for line in logs if line["log_level"] != "info"] == []
    assert sum(value for name, value in (await scrape(board)).items() if name.startswith(f"{PREFIX}_items")) == 0


# Its ticks.


@pytest.mark.req("HLD-01", "HLD-14", "HLD-18", "HLD-19", "HLD-24")
async def test_ticks_never_overlap_and_those_that_a_cycle_takes_are_skipped_and_counted(
    world: World, eventually: Any
) -> None:
    unit = await lost(world)
    board = net(world, job_property_object_hold_expiration_interval=0.05)
    driver, stop = driver_of(board), Stop()

    async def samples(name: str) -> float:
        return (await scrape(board))[f"{PREFIX}_{name}"]

    async with world.admin.transaction():
        await world.admin.execute("lock table chessboard.audit_log in access exclusive mode")
        running = asyncio.create_task(driver.run(stop))
        await eventually(world.blocked_pid)
        elapsed = asyncio.get_running_loop().time() + 0.3

        async def passed() -> bool:
            return asyncio.get_running_loop().time() > elapsed

        await eventually(passed)
        assert await samples("run_total") == 1, "five ticks have passed and no cycle stands beside the first"

    async def skipped_and_went_on() -> bool:
        return await samples("skipped_ticks_total") >= 4 and await samples("run_total") >= 2

    await eventually(skipped_and_went_on)
    stop.request()
    await running
    assert await in_status(world, "Free") == {unit}
