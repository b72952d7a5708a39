"""What crm publishes of deals and their timeline, and the records that every service publishes."""

from datetime import datetime
from typing import Final, TypedDict, assert_never
from uuid import UUID

from chassis.instants import rfc3339
from chassis.outbox import EventType, Message
from chassis.platform_events import audit_recorded, quarantined
from crm.domain import DealEnded, DealStatus, DomainEvent, StepAdded, StepDone, StepOverdue

_SOURCE: Final = "/pin/crm"
TIMELINE_OVERDUE_TOPIC: Final = "pin.crm.timeline-overdue.v1"
DEAL_TIMELINE_TOPIC: Final = "pin.crm.deal-timeline.v1"


def _deal_event(topic: str, kind: str) -> EventType:
    return EventType(topic=topic, type=kind, source=_SOURCE, aggregate_type="Deal", event_class="domain")


DEAL_TIMELINE_OVERDUE: Final = _deal_event(TIMELINE_OVERDUE_TOPIC, TIMELINE_OVERDUE_TOPIC)
STEP_ADDED: Final = _deal_event(DEAL_TIMELINE_TOPIC, "crm.deal.step-added")
STEP_DONE: Final = _deal_event(DEAL_TIMELINE_TOPIC, "crm.deal.step-done")
DEAL_COMPLETED: Final = _deal_event(DEAL_TIMELINE_TOPIC, "crm.deal.completed")
DEAL_CANCELLED: Final = _deal_event(DEAL_TIMELINE_TOPIC, "crm.deal.cancelled")
AUDIT_RECORDED: Final = audit_recorded("crm")
OF_DEALS: Final = (
    DEAL_TIMELINE_OVERDUE,
    STEP_ADDED,
    STEP_DONE,
    DEAL_COMPLETED,
    DEAL_CANCELLED,
    AUDIT_RECORDED,
    quarantined("crm"),
)


class DealTimelineOverduePayload(TypedDict):
    """Payload of DealTimelineOverdueEvent: ids, an enum and instants."""

    DealId: str
    TimelineEventId: str
    TenantId: str
    Type: str
    DueAt: str
    OverdueAt: str


class StepAddedPayload(TypedDict):
    """Payload of crm.deal.step-added."""

    DealId: str
    TimelineEventId: str
    TenantId: str
    Type: str
    OccurredAt: str
    DueAt: str | None


class StepDonePayload(TypedDict):
    """Payload of crm.deal.step-done."""

    DealId: str
    TimelineEventId: str
    TenantId: str
    Type: str
    CompletedAt: str
    ClosedByEventId: str | None
    WasOverdue: bool


class DealEndedPayload(TypedDict):
    """Payload of crm.deal.completed and crm.deal.cancelled."""

    DealId: str
    TenantId: str
    EndedAt: str


def to_message(event: DomainEvent, at: datetime, version: int | None = None) -> Message:
    """Return the message that announces a domain event.

    Args:
        event: what happened.
        at: when it happened here (`ce_time`); what a step tells of, and when that was, is its own content.
        version: the deal's version after it (`ce_sequence`); None for an overdue step, which changes no version.
    """
    match event:
        case StepOverdue():
            return _overdue(event, at)
        case StepAdded():
            added = StepAddedPayload(
                DealId=str(event.deal_id),
                TimelineEventId=str(event.step_id),
                TenantId=str(event.tenant_id),
                Type=event.type.value,
                OccurredAt=rfc3339(event.occurred_at),
                DueAt=None if event.due_at is None else rfc3339(event.due_at),
            )
            return Message(STEP_ADDED, str(event.deal_id), added, at, event.tenant_id, version)
        case StepDone():
            done = StepDonePayload(
                DealId=str(event.deal_id),
                TimelineEventId=str(event.step_id),
                TenantId=str(event.tenant_id),
                Type=event.type.value,
                CompletedAt=rfc3339(event.completed_at),
                ClosedByEventId=_text(event.closed_by),
                WasOverdue=event.was_overdue,
            )
            return Message(STEP_DONE, str(event.deal_id), done, at, event.tenant_id, version)
        case DealEnded():
            ended = DealEndedPayload(
                DealId=str(event.deal_id), TenantId=str(event.tenant_id), EndedAt=rfc3339(event.ended_at)
            )
            kind = DEAL_COMPLETED if event.status is DealStatus.COMPLETED else DEAL_CANCELLED
            return Message(kind, str(event.deal_id), ended, at, event.tenant_id, version)
        case _:
            assert_never(event)


def _overdue(event: StepOverdue, at: datetime) -> Message:
    payload = DealTimelineOverduePayload(
        DealId=str(event.deal_id),
        TimelineEventId=str(event.step_id),
        TenantId=str(event.tenant_id),
        Type=event.type.value,
        DueAt=rfc3339(event.due_at),
        OverdueAt=rfc3339(event.overdue_at),
    )
    return Message(DEAL_TIMELINE_OVERDUE, payload["DealId"], payload, at, event.tenant_id)


def _text(value: UUID | None) -> str | None:
    return None if value is None else str(value)
