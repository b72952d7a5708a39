"""Deals, timeline steps and their rules; pure.

Invariants: a step's content never changes after it was added (INV-TLE-1); only the job timeline-overdue makes a step
Overdue, and only an InProgress one whose due time has come (INV-TLE-4).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID

from crm.domain.errors import DomainError, ValidationError


class DealNotFound(DomainError):
    """No such deal in the caller's tenant."""


class DealNotActive(DomainError):
    """The deal has ended; its timeline takes nothing more."""


class NoOpenStep(DomainError):
    """A closing event came, and no step that it could close is open."""


class StepTransitionRefused(DomainError):
    """The step's status doesn't allow what was asked."""


class StepNotDue(DomainError):
    """The step has no due time, or it has not come yet."""


class DealStatus(StrEnum):
    """Where a deal is in its life."""

    ACTIVE = "Active"
    COMPLETED = "Completed"
    CANCELLED = "Cancelled"


class StepStatus(StrEnum):
    """Where a timeline step is in its life."""

    IN_PROGRESS = "InProgress"
    OVERDUE = "Overdue"
    DONE = "Done"


class StepAct(StrEnum):
    """What can happen to a step: the job marks it overdue, a command closes it."""

    MARK_OVERDUE = "mark-overdue"
    CLOSE = "close"


STEP_TRANSITIONS: Final[Mapping[tuple[StepStatus, StepAct], StepStatus]] = MappingProxyType(
    {
        (StepStatus.IN_PROGRESS, StepAct.MARK_OVERDUE): StepStatus.OVERDUE,
        (StepStatus.IN_PROGRESS, StepAct.CLOSE): StepStatus.DONE,
        (StepStatus.OVERDUE, StepAct.CLOSE): StepStatus.DONE,
    }
)
"""The whole state machine: what isn't here is refused."""


class DealTimelineEventType(StrEnum):
    """Kinds of timeline steps: openers ask for something, closers say that it came."""

    DOCUMENT_REQUESTED = "DocumentRequested"
    DOCUMENT_UPLOADED = "DocumentUploaded"
    PAYMENT_REQUESTED = "PaymentRequested"
    PAYMENT_RECEIVED = "PaymentReceived"
    SIGNING_REQUESTED = "SigningRequested"
    SIGNED = "Signed"
    INSPECTION_SCHEDULED = "InspectionScheduled"
    INSPECTION_COMPLETED = "InspectionCompleted"
    REGISTRATION_SUBMITTED = "RegistrationSubmitted"
    REGISTRATION_COMPLETED = "RegistrationCompleted"


CLOSES: Final[Mapping[DealTimelineEventType, DealTimelineEventType]] = MappingProxyType(
    {
        DealTimelineEventType.DOCUMENT_UPLOADED: DealTimelineEventType.DOCUMENT_REQUESTED,
        DealTimelineEventType.PAYMENT_RECEIVED: DealTimelineEventType.PAYMENT_REQUESTED,
        DealTimelineEventType.SIGNED: DealTimelineEventType.SIGNING_REQUESTED,
        DealTimelineEventType.INSPECTION_COMPLETED: DealTimelineEventType.INSPECTION_SCHEDULED,
        DealTimelineEventType.REGISTRATION_COMPLETED: DealTimelineEventType.REGISTRATION_SUBMITTED,
    }
)
"""Closer -> the opener that it closes."""


@dataclass(frozen=True, slots=True)
class StepAdded:
    """A step was appended to a deal's timeline."""

    deal_id: UUID
    step_id: UUID
    tenant_id: UUID
    type: DealTimelineEventType
    occurred_at: datetime
    due_at: datetime | None


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step was closed, by the paired event or with its deal."""

    deal_id: UUID
    step_id: UUID
    tenant_id: UUID
    type: DealTimelineEventType
    completed_at: datetime
    closed_by: UUID | None
    was_overdue: bool


@dataclass(frozen=True, slots=True)
class StepOverdue:
    """The due time of a step came and it was still in progress."""

    deal_id: UUID
    step_id: UUID
    tenant_id: UUID
    type: DealTimelineEventType
    due_at: datetime
    overdue_at: datetime


@dataclass(frozen=True, slots=True)
class DealEnded:
    """A deal was completed or cancelled."""

    deal_id: UUID
    tenant_id: UUID
    status: DealStatus
    ended_at: datetime


DomainEvent = StepAdded | StepDone | StepOverdue | DealEnded


@dataclass(eq=False)
class TimelineStep:
    """One element of a deal's timeline; only `status`, `updated_at` and `completed_at` ever change."""

    id: UUID
    deal_id: UUID
    tenant_id: UUID
    type: DealTimelineEventType
    status: StepStatus
    occurred_at: datetime
    due_at: datetime | None
    payload: dict[str, Any]
    actor_user_id: str | None
    actor_role: str | None
    created_at: datetime
    updated_at: datetime
    completed_at: datetime | None = None

    def close(self, now: datetime, closed_by: UUID | None) -> StepDone:
        """Close the step, overdue or not; never before its last change, which may have come while `now` waited.

        Raises:
            StepTransitionRefused: it is done already.
        """
        was_overdue = self.status is StepStatus.OVERDUE
        self.status = next_status(self.status, StepAct.CLOSE)
        at = max(now, self.updated_at)
        self.completed_at = self.updated_at = at
        return StepDone(self.deal_id, self.id, self.tenant_id, self.type, at, closed_by, was_overdue)


@dataclass(eq=False)
class Deal:
    """A deal of a tenant; its version counts the changes of the deal and its timeline."""

    id: UUID
    tenant_id: UUID
    title: str
    created_at: datetime
    updated_at: datetime
    status: DealStatus = DealStatus.ACTIVE
    version: int = 1

    def add_step(self, step: TimelineStep, closes: TimelineStep | None, now: datetime) -> list[DomainEvent]:
        """Append a step; a closer also closes the open step it is paired with.

        Raises:
            DealNotActive: the deal has ended.
            StepTransitionRefused: the step to close is done already.
        """
        self._change(now)
        events: list[DomainEvent] = [
            StepAdded(self.id, step.id, self.tenant_id, step.type, step.occurred_at, step.due_at)
        ]
        if closes is not None:
            events.append(closes.close(now, step.id))
        return events

    def end(self, status: DealStatus, open_steps: Iterable[TimelineStep], now: datetime) -> list[DomainEvent]:
        """Complete or cancel the deal and close what is still open.

        Raises:
            DealNotActive: it has ended already.
        """
        self._change(now)
        self.status = status
        closed: list[DomainEvent] = [step.close(now, None) for step in open_steps]
        return [*closed, DealEnded(self.id, self.tenant_id, status, self.updated_at)]

    def _change(self, now: datetime) -> None:
        if self.status is not DealStatus.ACTIVE:
            raise DealNotActive(f"deal {self.id} is {self.status}")
        self.version += 1
        self.updated_at = max(now, self.updated_at)


@dataclass(frozen=True, slots=True)
class ClaimedStep:
    """What the job timeline-overdue knows of a step whose row it has locked."""

    id: UUID
    deal_id: UUID
    tenant_id: UUID
    type: DealTimelineEventType
    status: StepStatus
    due_at: datetime | None

    def mark_overdue(self, now: datetime) -> StepOverdue:
        """Return the transition InProgress -> Overdue at the cycle's `now`.

        Raises:
            StepTransitionRefused: the step is not in progress.
            StepNotDue: it has no due time, or it is not past.
        """
        next_status(self.status, StepAct.MARK_OVERDUE)
        if self.due_at is None or self.due_at >= now:
            raise StepNotDue(f"step {self.id} is not due")
        return StepOverdue(self.deal_id, self.id, self.tenant_id, self.type, self.due_at, now)


@dataclass(frozen=True, slots=True)
class OverdueLimits:
    """How much one cycle of timeline-overdue may do.

    Raises:
        ValidationError: a number is outside its range.
    """

    batch_size: int
    max_batches_per_cycle: int

    def __post_init__(self) -> None:
        _check_range("BatchSize", self.batch_size, 1000)
        _check_range("MaxBatchesPerCycle", self.max_batches_per_cycle, 200)


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch of timeline-overdue did."""

    processed_count: int
    has_more: bool
    skipped_locked: int = 0
    failed_count: int = 0
    cursor: tuple[datetime, UUID] | None = field(default=None)


def next_status(status: StepStatus, act: StepAct) -> StepStatus:
    """Return the status after an act.

    Raises:
        StepTransitionRefused: the table has no such transition.
    """
    try:
        return STEP_TRANSITIONS[status, act]
    except KeyError:
        raise StepTransitionRefused(f"{act} is not possible from {status}") from None


def opening_status(kind: DealTimelineEventType) -> StepStatus:
    """Return the status in which a step of this type begins: a closer is done by being there."""
    return StepStatus.DONE if kind in CLOSES else StepStatus.IN_PROGRESS


def _check_range(name: str, value: int, top: int) -> None:
    if not 1 <= value <= top:
        raise ValidationError(f"{name} must be a whole number from 1 to {top}, not {value!r}")
