"""timeline-overdue, what a cycle moves and writes: the cut-off, the order, batches, the row, the event, the audit."""

from datetime import datetime, timedelta
from uuid import UUID, uuid4

import pytest
from crm_world import CONTENT, OTHER_TENANT, TENANT, World, driver_of, scrape
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import DatabaseClock
from chassis.jobs import Run
from chassis.runtime import Stop
from crm import commands, repository
from crm.domain import BatchResult, OverdueLimits, StepOverdue
from crm.jobs import TimelineOverdue

TOPIC = "pin.crm.timeline-overdue.v1"
INSTANT = timedelta(microseconds=1)
PAYLOAD_KEYS = ["DealId", "TimelineEventId", "TenantId", "Type", "DueAt", "OverdueAt"]
HEADERS = {
    "content-type", "ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "ce_subject", "ce_aggregatetype",
    "ce_contractversion", "ce_eventclass", "ce_correlationid", "ce_tenantid",
}  # fmt: skip
OPENERS = ("DocumentRequested", "PaymentRequested", "SigningRequested", "InspectionScheduled", "RegistrationSubmitted")


class TickingClock:
    """A clock that gives another instant at each look, and counts the looks."""

    def __init__(self, start: datetime) -> None:
        self.instant = start
        self.looks = 0

    async def now(self, session: AsyncSession) -> datetime:
        self.looks += 1
        self.instant += timedelta(hours=1)
        return self.instant


def parsed(text: str) -> datetime:
    assert text.endswith("Z")
    return datetime.fromisoformat(text)


# What is moved.


@pytest.mark.req("TLO-01", "TLO-05", "TLO-28", "TLO-29", "TLO-59a")
async def test_only_steps_in_progress_whose_due_time_has_passed_are_moved(world: World) -> None:
    deal = await world.deal()
    due = await world.step(deal, due=world.now - INSTANT)
    await world.step(deal, due=world.now)
    await world.step(deal, due=world.now + INSTANT)
    await world.step(deal, due=None)
    done = await world.step(deal, due=world.ago(days=1), status="Done")
    overdue = await world.step(deal, due=world.ago(days=1), status="Overdue")
    before = {step: await world.step_row(step) for step in (done, overdue)}
    assert await world.run_job() == {"processed": 1, "batches": 1, "skipped_locked": 0, "failed": 0}
    assert await world.steps_in("Overdue") == {due, overdue}
    assert {step: await world.step_row(step) for step in (done, overdue)} == before
    assert [row["payload"]["TimelineEventId"] for row in await world.outbox()] == [str(due)]


@pytest.mark.req("TLO-29")
async def test_step_is_moved_as_soon_as_its_due_time_is_past_and_not_at_it(world: World) -> None:
    step = await world.step(await world.deal(), due=world.now)
    assert (await world.run_job())["processed"] == 0
    world.clock.advance(INSTANT)
    assert (await world.run_job())["processed"] == 1
    assert (await world.step_row(step))["updated_at"] == world.now


async def test_step_of_a_deal_that_has_ended_is_moved_like_any_other(world: World) -> None:
    step = await world.step(await world.deal(status="Completed"), due=world.ago(hours=1))
    await world.run_job()
    assert await world.steps_in("Overdue") == {step}


@pytest.mark.req("TLO-18")
async def test_one_cycle_serves_every_tenant(world: World) -> None:
    tenants = [TENANT, OTHER_TENANT, uuid4()]
    for tenant in tenants:
        await world.due_steps(2, await world.deal(tenant))
    counts = await world.run_job()
    assert (counts["processed"], counts["batches"]) == (6, 1)
    sent = [row["payload"]["TenantId"] for row in await world.outbox()]
    assert sorted(sent) == sorted(str(tenant) for tenant in tenants * 2)
    assert {row["headers"]["ce_tenantid"] for row in await world.outbox()} == set(sent)
    assert {row["tenant_id"] for row in await world.audit()} == set(tenants)


@pytest.mark.req("TLO-27")
async def test_cycle_looks_for_no_entity_by_its_id(world: World) -> None:
    """Not even the deal: its row is locked by someone, and the job does not wait for it."""
    (step,) = await world.due_steps(1)
    async with world.admin.transaction():
        await world.admin.execute("select from crm.deal for update")
        await world.admin.execute("set local lock_timeout = '5s'")
        assert (await world.run_job())["processed"] == 1
    assert await world.steps_in("Overdue") == {step}
    assert await world.admin.fetchval("select version from crm.deal") == 1


@pytest.mark.req("TLO-27")
async def test_step_whose_deal_has_vanished_is_moved_all_the_same(loose_world: World) -> None:
    (step,) = await loose_world.due_steps(1)
    await loose_world.admin.execute("delete from crm.deal")
    assert (await loose_world.run_job())["processed"] == 1
    assert await loose_world.steps_in("Overdue") == {step}


# What is written.


@pytest.mark.req("TLO-35", "TLO-36", "TLO-37", "TLO-38", "TLO-40", "TLO-60")
async def test_moved_step_has_a_new_status_and_update_instant_and_nothing_else(world: World) -> None:
    deal = await world.deal()
    steps = [
        await world.step(deal, due=world.ago(hours=1, microseconds=7), payload={"document": "паспорт", "pages": [1]}),
        await world.step(deal, due=world.ago(hours=2), kind="PaymentRequested", actor=(None, None)),
    ]
    before = [await world.step_row(step) for step in steps]
    world.clock.advance(timedelta(minutes=3, microseconds=11))
    await world.run_job()
    for step, was in zip(steps, before, strict=True):
        now = await world.step_row(step)
        assert now == was | {"status": "Overdue", "updated_at": world.now}
        assert now["completed_at"] is None
        assert {name: now[name] for name in CONTENT} == {name: was[name] for name in CONTENT}
    outbox = await world.outbox()
    assert sorted(row["payload"]["TimelineEventId"] for row in outbox) == sorted(map(str, steps))


@pytest.mark.req("TLO-37", "TLO-40")
async def test_job_needs_to_update_status_and_update_instant_and_no_other_column(world: World) -> None:
    (step,) = await world.due_steps(1)
    await world.admin.execute("revoke update (completed_at) on crm.deal_timeline_event from crm_system")
    try:
        assert (await world.run_job())["processed"] == 1
    finally:
        await world.admin.execute("grant update (completed_at) on crm.deal_timeline_event to crm_system")
    assert await world.steps_in("Overdue") == {step}


@pytest.mark.req("TLO-38")
async def test_content_is_the_same_byte_for_byte(world: World) -> None:
    query = f"select array_agg(row({', '.join(CONTENT)})::text order by id) from crm.deal_timeline_event"
    for step in await world.due_steps(5):
        await world.admin.execute(
            "update crm.deal_timeline_event set payload = $2, due_at = due_at - interval '1 microsecond' where id = $1",
            step,
            '{"a": 1.50, "b": "é\\t", "c": null}',
        )
    before = await world.admin.fetchval(query)
    assert (await world.run_job())["processed"] == 5
    assert await world.admin.fetchval(query) == before


@pytest.mark.req("TLO-08", "TLO-43", "TLO-44", "TLO-45", "TLO-46", "TLO-47", "TLO-48", "TLO-60e")
@pytest.mark.parametrize("kind", OPENERS)
async def test_each_transition_has_one_event_in_the_outbox(world: World, kind: str) -> None:
    deal = await world.deal()
    due = world.ago(hours=1, microseconds=5)
    step = await world.step(deal, due=due, kind=kind)
    await world.run_job()
    (row,) = await world.outbox()
    assert list(row["payload"]) == PAYLOAD_KEYS
    assert row["payload"] == {
        "DealId": str(deal),
        "TimelineEventId": str(step),
        "TenantId": str(TENANT),
        "Type": kind,
        "DueAt": due.isoformat().replace("+00:00", "Z"),
        "OverdueAt": "2026-11-30T09:00:00Z",
    }
    assert [UUID(row["payload"][name]) for name in PAYLOAD_KEYS[:3]] == [deal, step, TENANT]
    assert (parsed(row["payload"]["DueAt"]), parsed(row["payload"]["OverdueAt"])) == (due, world.now)
    assert (row["topic"], row["message_key"], row["aggregatetype"], row["aggregateid"], row["type"]) == (
        TOPIC, str(deal), "Deal", str(deal), TOPIC,
    )  # fmt: skip
    headers = row["headers"]
    assert set(headers) == HEADERS, "and no ce_sequence: no version is touched"
    assert headers == headers | {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": str(row["event_id"]),
        "ce_source": "/pin/crm",
        "ce_type": TOPIC,
        "ce_time": "2026-11-30T09:00:00Z",
        "ce_subject": str(deal),
        "ce_aggregatetype": "Deal",
        "ce_contractversion": "1",
        "ce_tenantid": str(TENANT),
        "ce_eventclass": "domain",
    }


@pytest.mark.req("TLO-20", "TLO-49")
async def test_event_carries_no_name_no_sum_and_no_escrow(world: World) -> None:
    deal = await world.deal(title="Квартира Иванова Ивана Ивановича")
    secrets = {"fullName": "Иванов Иван", "sum": 5_150_000, "escrow": {"account": "40702810", "state": "open"}}
    await world.step(deal, due=world.ago(hours=1), payload=secrets, actor=("ivanov@example.com", "ivanov"))
    await world.run_job()
    raw = await world.admin.fetchrow("select convert_from(payload, 'UTF8') as value, headers::text from crm.outbox")
    audit = await world.admin.fetchval("select details::text from crm.audit_log")
    for text in (*raw, audit):
        for secret in ("Иван", "ivanov", "5150000", "40702810", "scrow", "ullName", "sum"):
            assert secret not in text


@pytest.mark.req("TLO-17", "TLO-39")
async def test_system_acts_and_the_creator_of_the_step_stays(world: World) -> None:
    step = await world.step(await world.deal(), due=world.ago(hours=1), actor=("user-1", "MANAGER"))
    await world.run_job()
    (record,) = await world.audit()
    assert record["actor"] is None
    assert (record["action"], record["entity_type"], record["entity_id"], record["tenant_id"]) == (
        "timeline-step.overdue", "timeline-step", step, TENANT,
    )  # fmt: skip
    assert record["details"] == {
        "from": "InProgress",
        "to": "Overdue",
        "dueAt": "2026-11-30T08:00:00Z",
        "overdueAt": "2026-11-30T09:00:00Z",
    }
    assert record["occurred_at"] == world.now
    (event,) = await world.outbox()
    assert not [name for name in (*event["payload"], *event["headers"]) if "actor" in name.lower()]
    row = await world.step_row(step)
    assert (row["actor_user_id"], row["actor_role"]) == ("user-1", "MANAGER")


@pytest.mark.req("TLO-24")
async def test_id_of_the_run_is_the_correlation_id_of_all_it_writes(world: World) -> None:
    await world.due_steps(5)
    job = world.job(batch_size=2)
    await world.cycle(job)
    outbox = await world.outbox()
    runs = {row["run_id"] for row in outbox}
    assert len(runs) == 1
    run = str(runs.pop())
    assert {row["headers"]["ce_correlationid"] for row in outbox} == {run}
    assert {row["correlation_id"] for row in await world.audit()} == {run}
    await world.due_steps(1)
    await world.cycle(job)
    assert str((await world.outbox())[-1]["run_id"]) != run, "another cycle is another run"


# One cycle: its cut-off, order, batches and limits.


@pytest.mark.req("TLO-21", "TLO-36", "TLO-48f")
async def test_one_instant_serves_the_whole_cycle(world: World) -> None:
    await world.due_steps(7)
    clock = TickingClock(world.now)
    job = world.crm("jobs", clock=clock, job_timeline_overdue_batch_size=2)
    assert await world.cycle(job) == {"processed": 7, "batches": 4, "skipped_locked": 0, "failed": 0}
    assert clock.looks == 1
    steps = await world.admin.fetch("select distinct updated_at from crm.deal_timeline_event")
    assert [row[0] for row in steps] == [clock.instant]
    for row in await world.outbox():
        assert parsed(row["payload"]["OverdueAt"]) == parsed(row["headers"]["ce_time"]) == clock.instant
        assert row["occurred_at"] == clock.instant
    assert {row["details"]["overdueAt"] for row in await world.audit()} == {clock.instant.isoformat()[:19] + "Z"}


@pytest.mark.req("TLO-21")
async def test_cut_off_is_the_systems_clock_by_default(world: World) -> None:
    before = await world.admin.fetchval("select clock_timestamp()")
    await world.step(await world.deal(), due=before - INSTANT)
    late = await world.step(await world.deal(), due=before + timedelta(hours=1))
    job = world.crm("jobs", clock=DatabaseClock())
    assert (await world.cycle(job))["processed"] == 1
    after = await world.admin.fetchval("select clock_timestamp()")
    (event,) = await world.outbox()
    assert before <= parsed(event["payload"]["OverdueAt"]) <= after
    assert (await world.step_row(late))["status"] == "InProgress"


@pytest.mark.req("TLO-22", "TLO-23", "TLO-30", "TLO-54", "TLO-56")
async def test_steps_are_taken_by_due_time_and_id_in_batches_up_to_the_limit(world: World) -> None:
    deal = await world.deal()
    ids = sorted(uuid4() for _ in range(12))
    places = {step: world.ago(hours=3 - number // 4) for number, step in enumerate(ids)}
    for step in sorted(ids, key=lambda step: step.bytes[::-1]):
        await world.step(deal, due=places[step], step_id=step)
    counts = await world.run_job(batch_size=5, max_batches=2)
    assert counts == {"processed": 10, "batches": 2, "skipped_locked": 0, "failed": 0}
    outbox = await world.outbox()
    assert [UUID(row["payload"]["TimelineEventId"]) for row in outbox] == ids[:10]
    batches: dict[str, int] = {}
    for row in outbox:
        batches[row["tx"]] = batches.get(row["tx"], 0) + 1
    assert list(batches.values()) == [5, 5], "each batch is a transaction of its own"
    assert await world.steps_in("InProgress") == set(ids[10:])
    assert (await world.run_job(batch_size=5, max_batches=2))["processed"] == 2
    assert len(await world.outbox()) == 12


@pytest.mark.req("TLO-56")
@pytest.mark.parametrize(("due", "batches"), [(0, 1), (5, 1), (6, 2), (11, 2), (12, 3)])
async def test_batches_are_repeated_while_they_are_full(world: World, due: int, batches: int) -> None:
    await world.due_steps(due)
    counts = await world.run_job(batch_size=6)
    assert (counts["processed"], counts["batches"]) == (due, batches)


@pytest.mark.req("TLO-33", "TLO-55", "TLO-57")
async def test_empty_batch_is_a_no_op_that_has_no_more(world: World) -> None:
    await world.step(await world.deal(), due=world.now)
    before = await world.everything()
    run = Run(uuid4(), world.now, Stop(), lambda: None)
    async with world.system().write() as session:
        result = await commands.mark_overdue_steps(session, run, OverdueLimits(5, 1), None)
    assert result == BatchResult(processed_count=0, has_more=False)
    assert await world.run_job(batch_size=5) == {"processed": 0, "batches": 1, "skipped_locked": 0, "failed": 0}
    assert await world.everything() == before


@pytest.mark.req("TLO-54", "TLO-55")
async def test_batch_tells_what_it_did_and_where_the_next_goes_on(world: World) -> None:
    steps = await world.due_steps(5)
    run = Run(uuid4(), world.now, Stop(), lambda: None)
    database = world.system()
    results, cursor = [], None
    for _ in range(3):
        async with database.write() as session:
            results.append(await commands.mark_overdue_steps(session, run, OverdueLimits(2, 5), cursor))
        cursor = results[-1].cursor
    assert [(result.processed_count, result.has_more) for result in results] == [(2, True), (2, True), (1, False)]
    rows = [await world.step_row(steps[number]) for number in (1, 3, 4)]
    assert [result.cursor for result in results] == [(row["due_at"], row["id"]) for row in rows]


@pytest.mark.req("TLO-54")
async def test_next_batch_goes_on_behind_the_last_row_of_the_one_before(world: World) -> None:
    """What becomes due before that place while the cycle runs waits for the next cycle."""
    steps = await world.due_steps(4)
    run = Run(uuid4(), world.now, Stop(), lambda: None)
    database = world.system()
    async with database.write() as session:
        first = await commands.mark_overdue_steps(session, run, OverdueLimits(2, 5), None)
    early = await world.step(await world.deal(), due=world.ago(days=1))
    async with database.write() as session:
        await commands.mark_overdue_steps(session, run, OverdueLimits(2, 5), first.cursor)
    assert await world.steps_in("Overdue") == set(steps)
    await world.run_job()
    assert await world.steps_in("Overdue") == {*steps, early}


async def test_stop_ends_the_cycle_between_batches(world: World) -> None:
    await world.due_steps(6)
    driver = driver_of(world.job(batch_size=2))
    stop = Stop()
    stop.request()
    assert (await driver.run_once(stop)).counts["processed"] == 0
    assert (await driver.run_once()).counts["processed"] == 6


# Repeated.


@pytest.mark.req("TLO-06", "TLO-13", "TLO-14")
async def test_repeated_cycle_is_a_no_op(world: World) -> None:
    await world.due_steps(7)
    job = world.job(batch_size=3)
    assert (await world.cycle(job))["processed"] == 7
    before = await world.everything()
    world.clock.advance(timedelta(days=1))
    assert (await world.cycle(job))["processed"] == 0
    assert (await world.run_job(batch_size=3))["processed"] == 0, "and so is one of a restarted process"
    assert await world.everything() == before


@pytest.mark.req("TLO-15")
async def test_run_that_is_repeated_under_its_own_id_is_known_by_no_key(world: World) -> None:
    await world.due_steps(1)
    driver = driver_of(world.job())
    run = Run(uuid4(), world.now, Stop(), lambda: None)
    assert (await driver.job.run(run)).counts["processed"] == 1
    assert (await driver.job.run(run)).counts["processed"] == 0
    await world.due_steps(1)
    assert (await driver.job.run(run)).counts["processed"] == 1, "the rows' state decides, not the run's id"
    columns = await world.admin.fetch(
        "select table_name, column_name from information_schema.columns where table_schema = 'crm'"
        " and (column_name like '%idempot%' or table_name like '%idempot%') and table_name <> 'idempotency_key'"
    )
    assert columns == []


@pytest.mark.req("TLO-41")
@pytest.mark.parametrize("status", ["Done", "Overdue"])
async def test_update_itself_moves_only_what_is_in_progress(world: World, status: str) -> None:
    deal = await world.deal()
    step = await world.step(deal, due=world.ago(hours=1), status=status)
    before = await world.everything()
    row = await world.step_row(step)
    moved = StepOverdue(deal, step, TENANT, row["type"], row["due_at"], world.now)
    with pytest.raises(RuntimeError, match="UPDATE 0 where 1 locked rows were to move"):
        async with world.system().write() as session:
            await repository.move_to_overdue(session, [moved], world.now)
    assert await world.everything() == before


@pytest.mark.req("TLO-07")
async def test_worker_never_closes_a_step(world: World) -> None:
    deal = await world.deal()
    await world.step(deal, due=world.ago(hours=2))
    await world.step(deal, due=None, kind="DocumentUploaded", status="Done")
    done = await world.steps_in("Done")
    await world.run_job()
    assert await world.steps_in("Done") == done
    assert await world.admin.fetchval("select count(*) from crm.deal_timeline_event where status = 'Overdue'") == 1


# The worker as it is declared.


@pytest.mark.req("TLO-01", "TLO-58d")
async def test_worker_is_named_timeline_overdue_and_runs_every_five_minutes(world: World) -> None:
    driver = driver_of(world.crm("jobs"))
    assert (driver.job.name, TimelineOverdue.name) == ("timeline-overdue", "timeline-overdue")
    assert driver.job.schedule == timedelta(minutes=5)


@pytest.mark.req("TLO-01")
async def test_worker_ticks_by_itself(world: World, eventually) -> None:
    crm = world.crm("jobs", job_timeline_overdue_interval=0.05)
    async with crm.app.router.lifespan_context(crm.app):
        await eventually(lambda: driver_of(crm).job.metrics.runs._value.get() >= 1)
        (step,) = await world.due_steps(1)

        async def moved() -> bool:
            return await world.steps_in("Overdue") == {step}

        await eventually(moved)


@pytest.mark.req("TLO-56")
async def test_cycle_writes_its_metrics(world: World) -> None:
    await world.due_steps(7)
    job = world.job(batch_size=2, max_batches=2)
    await world.cycle(job)
    samples = await scrape(job)
    assert {name: value for name, value in samples.items() if name.startswith("crm_timeline_overdue_")} == {
        **{name: value for name, value in samples.items() if name.startswith("crm_timeline_overdue_cycle_duration")},
        "crm_timeline_overdue_run_total": 1,
        "crm_timeline_overdue_items_total": 4,
        "crm_timeline_overdue_backlog": 3,
        "crm_timeline_overdue_skip_locked_total": 0,
        "crm_timeline_overdue_errors_total": 0,
        "crm_timeline_overdue_skipped_ticks_total": 0,
        "crm_timeline_overdue_misfires_total": 0,
        "crm_timeline_overdue_paused_ticks_total": 0,
        "crm_timeline_overdue_single_runner_skips_total": 0,
    }
    assert samples["crm_timeline_overdue_cycle_duration_seconds_count"] == 1
    await world.cycle(job)
    samples = await scrape(job)
    assert (samples["crm_timeline_overdue_run_total"], samples["crm_timeline_overdue_items_total"]) == (2, 7)
    assert samples["crm_timeline_overdue_backlog"] == 0
