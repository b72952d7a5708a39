"""What chessboard publishes and our own view of what it consumes, in the casing of the contracts; nothing here carries
personal data or money."""

from datetime import datetime
from typing import Final, TypedDict, assert_never

from chassis.instants import rfc3339
from chassis.outbox import EventType, Message
from chassis.platform_events import audit_recorded, quarantined
from chessboard.domain import Change, PriceChanged, StatusChanged

_SOURCE: Final = "/pin/chessboard"
STATUS_CHANGED_TOPIC: Final = "pin.chessboard.property-object-status-changed.v1"
HOLD_ANSWERED_TOPIC: Final = "pin.chessboard.hold-answered.v1"
OFFER_TOPIC: Final = "pin.chessboard.offer.v1"


def _object_event(topic: str, kind: str) -> EventType:
    return EventType(topic=topic, type=kind, source=_SOURCE, aggregate_type="PropertyObject", event_class="domain")


STATUS_CHANGED: Final = _object_event(STATUS_CHANGED_TOPIC, STATUS_CHANGED_TOPIC)
HOLD_ANSWERED: Final = _object_event(HOLD_ANSWERED_TOPIC, HOLD_ANSWERED_TOPIC)
OFFER_UPDATED: Final = _object_event(OFFER_TOPIC, "chessboard.offer.updated")
AUDIT_RECORDED: Final = audit_recorded("chessboard")
PUBLISHED: Final = (STATUS_CHANGED, HOLD_ANSWERED, OFFER_UPDATED, AUDIT_RECORDED, quarantined("chessboard"))


class PropertyObjectStatusChangedPayload(TypedDict):
    """Payload of PropertyObjectStatusChangedKafkaEvent."""

    PropertyObjectId: str
    TenantId: str
    ProjectId: str
    BuildingId: str
    FromStatus: str
    ToStatus: str
    StatusSource: str
    ReservedUntil: str | None
    BookedUntil: str | None
    HoldDealId: str | None
    SoldAt: str | None
    StatusChangedAt: str
    Version: int


class HoldAnsweredPayload(TypedDict):
    """Payload of hold-answered: what became of one request of CRM."""

    BookingId: str
    TenantId: str
    PropertyObjectId: str
    Sequence: int
    Outcome: str
    Reason: str | None
    Version: int


class OfferUpdatedPayload(TypedDict):
    """Payload of chessboard.offer.updated: a price changed; the price itself is asked of chessboard."""

    PropertyObjectId: str
    TenantId: str
    ProjectId: str
    ChangedAt: str
    Version: int


def to_message(event: Change) -> Message:
    """Return the message that announces a change of an object; `ce_sequence` is the object's version after it."""
    match event:
        case StatusChanged():
            changed_at = rfc3339(event.changed_at)
            changed = PropertyObjectStatusChangedPayload(
                PropertyObjectId=str(event.property_object_id),
                TenantId=str(event.tenant_id),
                ProjectId=str(event.project_id),
                BuildingId=str(event.building_id),
                FromStatus=event.from_status.value,
                ToStatus=event.to_status.value,
                StatusSource=event.source.value,
                ReservedUntil=_instant(event.reserved_until),
                BookedUntil=_instant(event.booked_until),
                HoldDealId=None if event.hold is None else str(event.hold.deal_id),
                SoldAt=_instant(event.sold_at),
                StatusChangedAt=changed_at,
                Version=event.version,
            )
            return Message(
                STATUS_CHANGED,
                changed["PropertyObjectId"],
                changed,
                event.changed_at,
                event.tenant_id,
                event.version,
            )
        case PriceChanged():
            updated = OfferUpdatedPayload(
                PropertyObjectId=str(event.property_object_id),
                TenantId=str(event.tenant_id),
                ProjectId=str(event.project_id),
                ChangedAt=rfc3339(event.changed_at),
                Version=event.version,
            )
            return Message(
                OFFER_UPDATED,
                updated["PropertyObjectId"],
                updated,
                event.changed_at,
                event.tenant_id,
                event.version,
            )
        case _:
            assert_never(event)


def _instant(value: datetime | None) -> str | None:
    return None if value is None else rfc3339(value)
