"""What chessboard publishes and our own view of what it consumes, in the casing of the contracts; nothing here carries
personal data or money."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Final, TypedDict, assert_never
from uuid import UUID

from chassis.clock import EARLIEST, LATEST
from chassis.instants import rfc3339
from chassis.outbox import EventType, Message
from chassis.platform_events import audit_recorded, quarantined
from chessboard.domain import Ask, Change, Hold, PriceChanged, PropertyObject, Request, Settlement, StatusChanged

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


def to_answer(request: Request, settlement: Settlement, found: PropertyObject | None, at: datetime) -> Message:
    """Return the answer to a request of CRM."""
    known = found is not None and found.tenant_id == request.tenant_id
    answered = HoldAnsweredPayload(
        BookingId=str(request.hold.booking_id),
        TenantId=str(request.tenant_id),
        PropertyObjectId=str(request.property_object_id),
        Sequence=request.sequence,
        Outcome=settlement.outcome.value,
        Reason=None if settlement.reason is None else settlement.reason.value,
        Version=found.version if found is not None and known else 0,
    )
    version = answered["Version"] if settlement.changes else None
    return Message(HOLD_ANSWERED, answered["PropertyObjectId"], answered, at, request.tenant_id, version)


@dataclass(frozen=True, slots=True)
class CrmRequest:
    """Our own view of what CRM asks about an object; its number is in the envelope.

    Attributes:
        at: until when to hold or book; when it was sold; None for a release.
    """

    ask: Ask
    property_object_id: UUID
    tenant_id: UUID
    hold: Hold
    at: datetime | None

    def numbered(self, sequence: int) -> Request:
        """Return it as the domain knows it."""
        return Request(self.ask, self.property_object_id, self.tenant_id, self.hold, sequence, self.at)


def read_request(ask: Ask, instant: str | None, value: Mapping[str, Any]) -> CrmRequest:
    """Parse a request of CRM.

    Args:
        ask: what its topic asks for.
        instant: the field that holds its instant, if it has one.
        value: the payload.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is in breach of its contract.
    """
    return CrmRequest(
        ask,
        UUID(value["PropertyObjectId"]),
        UUID(value["TenantId"]),
        Hold(UUID(value["DealId"]), UUID(value["BookingId"])),
        None if instant is None else _read_instant(value[instant]),
    )


def _read_instant(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    if at.tzinfo is None or not EARLIEST <= at < LATEST:
        raise ValueError("no instant that can be kept")
    return at


CRM_TOPICS: Final = {
    "pin.crm.booking-hold-requested.v1": partial(read_request, Ask.HOLD, "ReservedUntil"),
    "pin.crm.booking-commit-requested.v1": partial(read_request, Ask.BOOK, "BookedUntil"),
    "pin.crm.deal-completed.v1": partial(read_request, Ask.SELL, "SoldAt"),
    "pin.crm.booking-expired.v1": partial(read_request, Ask.RELEASE, None),
    "pin.crm.booking-cancelled.v1": partial(read_request, Ask.RELEASE, None),
    "pin.crm.deal-cancelled.v1": partial(read_request, Ask.RELEASE, None),
}
"""Topics of CRM's requests, each of one type that is named like it, with what reads it."""


@dataclass(frozen=True, slots=True)
class WatchedChange:
    """A change of status as those see it who watch its project.

    Attributes:
        shown: what they are told of it, in the names of HTTP.
    """

    tenant_id: UUID
    project_id: UUID
    shown: Mapping[str, Any]


def read_change(value: Mapping[str, Any]) -> WatchedChange:
    """Parse a change of status that we have published.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: it is in breach of its contract.
    """
    shown = {shown: value[name] for name, shown in _SHOWN.items()}
    return WatchedChange(UUID(value["TenantId"]), UUID(value["ProjectId"]), shown)


_SHOWN: Final = {
    name: name[0].lower() + name[1:]
    for name in PropertyObjectStatusChangedPayload.__annotations__
    if name != "TenantId"
}

CONSUMED: Final[Mapping[tuple[str, str], Callable[[Mapping[str, Any]], CrmRequest | WatchedChange]]] = {
    **{(topic, topic): read for topic, read in CRM_TOPICS.items()},
    (STATUS_CHANGED_TOPIC, STATUS_CHANGED.type): read_change,
}


def _instant(value: datetime | None) -> str | None:
    return None if value is None else rfc3339(value)
