"""The domain of crm: the whole state machine of a step, the pairs, the limits, the deal's end."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from datetime import UTC, datetime, timedelta
from itertools import product
from uuid import UUID, uuid4

import pytest

from crm.domain import (
    CLOSES,
    STEP_TRANSITIONS,
    ClaimedStep,
    Deal,
    DealEnded,
    DealNotActive,
    DealStatus,
    DealTimelineEventType,
    OverdueLimits,
    StepAct,
    StepAdded,
    StepDone,
    StepNotDue,
    StepOverdue,
    StepStatus,
    StepTransitionRefused,
    TimelineStep,
    ValidationError,
    next_status,
    opening_status,
)

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
MUTABLE = {"status", "updated_at", "completed_at"}

TABLE = {
    (StepStatus.IN_PROGRESS, StepAct.MARK_OVERDUE): StepStatus.OVERDUE,
    (StepStatus.IN_PROGRESS, StepAct.CLOSE): StepStatus.DONE,
    (StepStatus.OVERDUE, StepAct.MARK_OVERDUE): None,
    (StepStatus.OVERDUE, StepAct.CLOSE): StepStatus.DONE,
    (StepStatus.DONE, StepAct.MARK_OVERDUE): None,
    (StepStatus.DONE, StepAct.CLOSE): None,
}
"""Status x act -> the new status, or None for a refusal; written out once more, by hand."""

PAIRS = {
    "DocumentRequested": "DocumentUploaded",
    "PaymentRequested": "PaymentReceived",
    "SigningRequested": "Signed",
    "InspectionScheduled": "InspectionCompleted",
    "RegistrationSubmitted": "RegistrationCompleted",
}


def a_step(
    status: StepStatus = StepStatus.IN_PROGRESS,
    kind: DealTimelineEventType = DealTimelineEventType.DOCUMENT_REQUESTED,
    due_at: datetime | None = NOW - timedelta(hours=1),
) -> TimelineStep:
    return TimelineStep(
        id=uuid4(),
        deal_id=uuid4(),
        tenant_id=uuid4(),
        type=kind,
        status=status,
        occurred_at=NOW - timedelta(days=1),
        due_at=due_at,
        payload={"document": "passport"},
        actor_user_id="user-1",
        actor_role="MANAGER",
        created_at=NOW - timedelta(days=1),
        updated_at=NOW - timedelta(days=1),
        completed_at=NOW - timedelta(minutes=1) if status is StepStatus.DONE else None,
    )


def claimed(
    status: StepStatus = StepStatus.IN_PROGRESS, due_at: datetime | None = NOW - timedelta(hours=1)
) -> ClaimedStep:
    return ClaimedStep(uuid4(), uuid4(), uuid4(), DealTimelineEventType.DOCUMENT_REQUESTED, status, due_at)


def a_deal(status: DealStatus = DealStatus.ACTIVE) -> Deal:
    return Deal(uuid4(), uuid4(), "Flat 12", NOW - timedelta(days=2), NOW - timedelta(days=2), status)


def contents(step: TimelineStep) -> dict[str, object]:
    return {field.name: getattr(step, field.name) for field in fields(step)}


def mark_overdue(status: StepStatus) -> StepStatus:
    claimed(status).mark_overdue(NOW)
    return StepStatus.OVERDUE


def close(status: StepStatus) -> StepStatus:
    step = a_step(status)
    step.close(NOW, None)
    return step.status


ACTS: dict[StepAct, Callable[[StepStatus], StepStatus]] = {
    StepAct.MARK_OVERDUE: mark_overdue,
    StepAct.CLOSE: close,
}


def test_the_table_of_this_test_is_complete() -> None:
    assert set(TABLE) == set(product(StepStatus, StepAct))
    assert set(ACTS) == set(StepAct)


@pytest.mark.req("TLO-13", "TLO-34")
@pytest.mark.parametrize(("status", "act"), list(product(StepStatus, StepAct)))
def test_every_status_and_act_does_what_the_table_says(status: StepStatus, act: StepAct) -> None:
    expected = TABLE[status, act]
    if expected is None:
        with pytest.raises(StepTransitionRefused, match=f"{act} is not possible from {status}"):
            next_status(status, act)
        with pytest.raises(StepTransitionRefused):
            ACTS[act](status)
    else:
        assert next_status(status, act) is expected
        assert ACTS[act](status) is expected


@pytest.mark.req("TLO-04")
def test_only_the_act_of_the_job_leads_to_overdue() -> None:
    assert {act for (_, act), after in STEP_TRANSITIONS.items() if after is StepStatus.OVERDUE} == {
        StepAct.MARK_OVERDUE
    }
    assert {opening_status(kind) for kind in DealTimelineEventType} == {StepStatus.IN_PROGRESS, StepStatus.DONE}


def test_a_step_that_is_done_stays_as_it_is_when_it_is_closed_again() -> None:
    step = a_step(StepStatus.DONE)
    before = contents(step)
    with pytest.raises(StepTransitionRefused):
        step.close(NOW, uuid4())
    assert contents(step) == before


def test_statuses_are_written_as_the_source_writes_them() -> None:
    assert [status.value for status in StepStatus] == ["InProgress", "Overdue", "Done"]
    assert [status.value for status in DealStatus] == ["Active", "Completed", "Cancelled"]


def test_every_type_is_an_opener_or_the_closer_of_one() -> None:
    assert {opener.value: closer.value for closer, opener in CLOSES.items()} == PAIRS
    assert {kind.value for kind in DealTimelineEventType} == set(PAIRS) | set(PAIRS.values())


@pytest.mark.parametrize("kind", list(DealTimelineEventType))
def test_an_opener_begins_in_progress_and_a_closer_is_done_by_being_there(kind: DealTimelineEventType) -> None:
    assert opening_status(kind) is (StepStatus.IN_PROGRESS if kind.value in PAIRS else StepStatus.DONE)


@pytest.mark.req("TLO-29", "TLO-05")
@pytest.mark.parametrize("early", [timedelta(0), INSTANT, timedelta(days=365)])
def test_a_step_is_not_overdue_at_its_due_time_or_before(early: timedelta) -> None:
    with pytest.raises(StepNotDue):
        claimed(due_at=NOW + early).mark_overdue(NOW)


@pytest.mark.req("TLO-29", "TLO-05")
def test_a_step_is_overdue_one_microsecond_after_its_due_time() -> None:
    step = claimed(due_at=NOW - INSTANT)
    assert step.mark_overdue(NOW) == StepOverdue(
        step.deal_id, step.id, step.tenant_id, step.type, NOW - INSTANT, overdue_at=NOW
    )


@pytest.mark.req("TLO-05")
def test_a_step_without_a_due_time_is_never_overdue() -> None:
    with pytest.raises(StepNotDue):
        claimed(due_at=None).mark_overdue(datetime.max.replace(tzinfo=UTC))


@pytest.mark.req("TLO-38")
def test_the_job_cannot_change_what_it_claimed() -> None:
    step = claimed()
    step.mark_overdue(NOW)
    for name in (field.name for field in fields(step)):
        with pytest.raises(FrozenInstanceError):
            setattr(step, name, None)


@pytest.mark.parametrize("status", [StepStatus.IN_PROGRESS, StepStatus.OVERDUE])
def test_closing_changes_status_and_instants_and_no_content(status: StepStatus) -> None:
    step = a_step(status)
    before = contents(step)
    closer = uuid4()
    event = step.close(NOW, closer)
    after = contents(step)
    assert {name for name in before if before[name] != after[name]} == MUTABLE
    assert (step.status, step.completed_at, step.updated_at) == (StepStatus.DONE, NOW, NOW)
    assert event == StepDone(
        step.deal_id, step.id, step.tenant_id, step.type, NOW, closer, was_overdue=status is StepStatus.OVERDUE
    )


def test_a_closer_closes_the_step_it_is_paired_with() -> None:
    deal, opener = a_deal(), a_step(StepStatus.OVERDUE)
    closer = a_step(StepStatus.DONE, DealTimelineEventType.DOCUMENT_UPLOADED, due_at=None)
    added, done = deal.add_step(closer, opener, NOW)
    assert isinstance(added, StepAdded)
    assert added.step_id == closer.id
    assert isinstance(done, StepDone)
    assert (done.step_id, done.closed_by, done.was_overdue) == (opener.id, closer.id, True)
    assert (deal.version, deal.updated_at) == (2, NOW)


def test_a_deal_that_ends_closes_its_open_steps() -> None:
    deal, steps = a_deal(), [a_step(), a_step(StepStatus.OVERDUE)]
    events = deal.end(DealStatus.COMPLETED, steps, NOW)
    assert {step.status for step in steps} == {StepStatus.DONE}
    assert [event.closed_by for event in events if isinstance(event, StepDone)] == [None, None]
    assert events[-1] == DealEnded(deal.id, deal.tenant_id, DealStatus.COMPLETED, NOW)
    assert (deal.status, deal.version, deal.updated_at) == (DealStatus.COMPLETED, 2, NOW)


@pytest.mark.parametrize("status", [DealStatus.COMPLETED, DealStatus.CANCELLED])
def test_a_deal_that_has_ended_takes_nothing_more(status: DealStatus) -> None:
    deal, open_step = a_deal(status), a_step()
    with pytest.raises(DealNotActive):
        deal.add_step(a_step(), open_step, NOW)
    with pytest.raises(DealNotActive):
        deal.end(DealStatus.CANCELLED, [open_step], NOW)
    assert (deal.version, deal.status, open_step.status) == (1, status, StepStatus.IN_PROGRESS)


@pytest.mark.req("TLO-25")
@pytest.mark.parametrize("size", [-1, 0, 1001, 1_000_000])
def test_a_batch_size_outside_1_to_1000_is_refused(size: int) -> None:
    with pytest.raises(ValidationError, match="BatchSize must be a whole number from 1 to 1000"):
        OverdueLimits(batch_size=size, max_batches_per_cycle=1)


@pytest.mark.req("TLO-26")
@pytest.mark.parametrize("batches", [-1, 0, 201, 1_000_000])
def test_a_cycle_of_other_than_1_to_200_batches_is_refused(batches: int) -> None:
    with pytest.raises(ValidationError, match="MaxBatchesPerCycle must be a whole number from 1 to 200"):
        OverdueLimits(batch_size=1, max_batches_per_cycle=batches)


@pytest.mark.req("TLO-25", "TLO-26")
@pytest.mark.parametrize(("size", "batches"), [(1, 1), (1000, 200), (500, 20)])
def test_limits_inside_their_range_are_taken(size: int, batches: int) -> None:
    assert OverdueLimits(size, batches) == OverdueLimits(batch_size=size, max_batches_per_cycle=batches)


def test_events_name_the_deal_as_the_parent_of_the_step() -> None:
    deal_id, step = UUID(int=1), claimed()
    moved = ClaimedStep(step.id, deal_id, step.tenant_id, step.type, step.status, step.due_at).mark_overdue(NOW)
    assert moved.deal_id == deal_id
