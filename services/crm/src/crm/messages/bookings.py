"""What crm publishes of bookings: their transitions, what is asked of the chessboard per object, calls for a person.

Requests about one object travel on six topics; `ce_sequence`, the sequence of crm's claim, orders them.
"""

from datetime import datetime
from types import MappingProxyType
from typing import Final, Literal, TypedDict, assert_never

from chassis.instants import rfc3339
from chassis.outbox import EventType, Message
from crm.domain import (
    Asked,
    BookingEvent,
    BookingMoved,
    ObjectAsked,
    PersonAsked,
    QuoteInvalidated,
    Reason,
)

SOURCE: Final = "/pin/crm"
BOOKING_TOPIC: Final = "pin.crm.booking.v1"
HOLD_REQUESTED_TOPIC: Final = "pin.crm.booking-hold-requested.v1"
COMMIT_REQUESTED_TOPIC: Final = "pin.crm.booking-commit-requested.v1"
DEAL_COMPLETED_TOPIC: Final = "pin.crm.deal-completed.v1"
BOOKING_EXPIRED_TOPIC: Final = "pin.crm.booking-expired.v1"
BOOKING_CANCELLED_TOPIC: Final = "pin.crm.booking-cancelled.v1"
DEAL_CANCELLED_TOPIC: Final = "pin.crm.deal-cancelled.v1"
INTERVENTION_TOPIC: Final = "pin.crm.intervention.v1"


def _booking_event(topic: str, kind: str, event_class: str = "domain") -> EventType:
    return EventType(topic=topic, type=kind, source=SOURCE, aggregate_type="Booking", event_class=event_class)


def _object_event(topic: str) -> EventType:
    return EventType(topic=topic, type=topic, source=SOURCE, aggregate_type="PropertyObject", event_class="domain")


BOOKING_STATE_CHANGED: Final = _booking_event(BOOKING_TOPIC, "crm.booking.state-changed")
BOOKING_QUOTE_INVALIDATED: Final = _booking_event(BOOKING_TOPIC, "crm.booking.quote-invalidated")
HOLD_REQUESTED: Final = _object_event(HOLD_REQUESTED_TOPIC)
COMMIT_REQUESTED: Final = _object_event(COMMIT_REQUESTED_TOPIC)
OBJECT_SOLD: Final = _object_event(DEAL_COMPLETED_TOPIC)
RELEASED_BY_EXPIRY: Final = _object_event(BOOKING_EXPIRED_TOPIC)
RELEASED_BY_CANCELLATION: Final = _object_event(BOOKING_CANCELLED_TOPIC)
RELEASED_WITH_DEAL: Final = _object_event(DEAL_CANCELLED_TOPIC)
INTERVENTION_NEEDED: Final = _booking_event(INTERVENTION_TOPIC, "intervention.needed", "operational")
INTERVENTION_RESOLVED: Final = _booking_event(INTERVENTION_TOPIC, "intervention.resolved", "operational")
OF_BOOKINGS: Final = (
    BOOKING_STATE_CHANGED,
    BOOKING_QUOTE_INVALIDATED,
    HOLD_REQUESTED,
    COMMIT_REQUESTED,
    OBJECT_SOLD,
    RELEASED_BY_EXPIRY,
    RELEASED_BY_CANCELLATION,
    RELEASED_WITH_DEAL,
    INTERVENTION_NEEDED,
    INTERVENTION_RESOLVED,
)
_RELEASES: Final = MappingProxyType({Reason.EXPIRED: RELEASED_BY_EXPIRY, Reason.DEAL_CANCELLED: RELEASED_WITH_DEAL})


class BookingStateChangedPayload(TypedDict):
    """Payload of crm.booking.state-changed."""

    BookingId: str
    DealId: str
    TenantId: str
    PartnerId: str | None
    OperationId: str | None
    FromState: str
    ToState: str
    Reason: str | None
    PropertyObjectIds: list[str]
    ReservedUntil: str | None
    BookedUntil: str | None
    ChangedAt: str
    Version: int


class BookingQuoteInvalidatedPayload(TypedDict):
    """Payload of crm.booking.quote-invalidated."""

    BookingId: str
    DealId: str
    TenantId: str
    PartnerId: str | None
    Reason: str
    PropertyObjectIds: list[str]
    InvalidatedAt: str
    Version: int


class HoldRequestedPayload(TypedDict):
    """Payload of pin.crm.booking-hold-requested.v1."""

    BookingId: str
    DealId: str
    TenantId: str
    PropertyObjectId: str
    ReservedUntil: str


class CommitRequestedPayload(HoldRequestedPayload):
    """Payload of pin.crm.booking-commit-requested.v1."""

    BookedUntil: str


class ObjectSoldPayload(TypedDict):
    """Payload of pin.crm.deal-completed.v1."""

    DealId: str
    BookingId: str
    TenantId: str
    PropertyObjectId: str
    SoldAt: str


class ObjectReleasedPayload(TypedDict):
    """Payload of the three release topics."""

    BookingId: str
    DealId: str
    TenantId: str
    PropertyObjectId: str
    Reason: str


class InterventionPayload(TypedDict):
    """Payload of intervention.needed and intervention.resolved."""

    subjectType: Literal["booking"]
    subjectId: str
    actorType: Literal["system", "user"]
    occurredAt: str
    reason: str
    severity: Literal["normal", "high"]
    tenantId: str


def to_booking_message(event: BookingEvent) -> Message:
    """Return the message that announces an event of a booking."""
    match event:
        case BookingMoved():
            return _moved(event)
        case QuoteInvalidated():
            gone = BookingQuoteInvalidatedPayload(
                BookingId=str(event.booking_id),
                DealId=str(event.deal_id),
                TenantId=str(event.tenant_id),
                PartnerId=None if event.partner_id is None else str(event.partner_id),
                Reason=event.reason.value,
                PropertyObjectIds=[str(one) for one in event.property_object_ids],
                InvalidatedAt=rfc3339(event.invalidated_at),
                Version=event.version,
            )
            key = gone["BookingId"]
            return Message(BOOKING_QUOTE_INVALIDATED, key, gone, event.invalidated_at, event.tenant_id, event.version)
        case ObjectAsked():
            return _asked(event)
        case PersonAsked():
            call = InterventionPayload(
                subjectType="booking",
                subjectId=str(event.booking_id),
                actorType="user" if event.by_person else "system",
                occurredAt=rfc3339(event.at),
                reason=event.reason.value,
                severity="high",
                tenantId=str(event.tenant_id),
            )
            kind = INTERVENTION_NEEDED if event.is_needed else INTERVENTION_RESOLVED
            return Message(kind, call["subjectId"], call, event.at, event.tenant_id)
        case _:
            assert_never(event)


def _moved(event: BookingMoved) -> Message:
    payload = BookingStateChangedPayload(
        BookingId=str(event.booking_id),
        DealId=str(event.deal_id),
        TenantId=str(event.tenant_id),
        PartnerId=None if event.partner_id is None else str(event.partner_id),
        OperationId=None,
        FromState=event.from_state.value,
        ToState=event.to_state.value,
        Reason=None if event.reason is None else event.reason.value,
        PropertyObjectIds=[str(one) for one in event.property_object_ids],
        ReservedUntil=_instant(event.reserved_until),
        BookedUntil=_instant(event.booked_until),
        ChangedAt=rfc3339(event.changed_at),
        Version=event.version,
    )
    key = payload["BookingId"]
    return Message(BOOKING_STATE_CHANGED, key, payload, event.changed_at, event.tenant_id, event.version)


def _asked(event: ObjectAsked) -> Message:
    kind, payload = _request(event)
    return Message(kind, str(event.property_object_id), payload, event.asked_at, event.tenant_id, event.sequence)


def _request(
    event: ObjectAsked,
) -> tuple[EventType, HoldRequestedPayload | CommitRequestedPayload | ObjectSoldPayload | ObjectReleasedPayload]:
    booking, deal, tenant = str(event.booking_id), str(event.deal_id), str(event.tenant_id)
    one = str(event.property_object_id)
    match event.asked:
        case Asked.HOLD:
            hold = HoldRequestedPayload(
                BookingId=booking,
                DealId=deal,
                TenantId=tenant,
                PropertyObjectId=one,
                ReservedUntil=_said(event.reserved_until),
            )
            return HOLD_REQUESTED, hold
        case Asked.COMMIT:
            commit = CommitRequestedPayload(
                BookingId=booking,
                DealId=deal,
                TenantId=tenant,
                PropertyObjectId=one,
                ReservedUntil=_said(event.reserved_until),
                BookedUntil=_said(event.booked_until),
            )
            return COMMIT_REQUESTED, commit
        case Asked.SELL:
            sold = ObjectSoldPayload(
                DealId=deal,
                BookingId=booking,
                TenantId=tenant,
                PropertyObjectId=one,
                SoldAt=rfc3339(event.asked_at),
            )
            return OBJECT_SOLD, sold
        case Asked.RELEASE:
            reason = event.reason or Reason.CANCELLED
            released = ObjectReleasedPayload(
                BookingId=booking, DealId=deal, TenantId=tenant, PropertyObjectId=one, Reason=reason.value
            )
            return _RELEASES.get(reason, RELEASED_BY_CANCELLATION), released
        case _:
            assert_never(event.asked)


def _instant(value: datetime | None) -> str | None:
    return None if value is None else rfc3339(value)


def _said(value: datetime | None) -> str:
    if value is None:
        raise ValueError("a request without its time")
    return rfc3339(value)
