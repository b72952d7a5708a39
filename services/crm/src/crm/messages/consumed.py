"""What crm reads of the chessboard, in its own view; a field that is missing or of another kind raises.

Only what crm needs is looked at; whatever else a record says is the chessboard's affair.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from crm.domain import Answer, Outcome

HOLD_ANSWERED_TOPIC: Final = "pin.chessboard.hold-answered.v1"
STATUS_CHANGED_TOPIC: Final = "pin.chessboard.property-object-status-changed.v1"
OFFER_TOPIC: Final = "pin.chessboard.offer.v1"
OFFER_UPDATED: Final = "chessboard.offer.updated"


@dataclass(frozen=True, slots=True)
class HoldAnswered:
    """The answer to one request of crm."""

    tenant_id: UUID
    answer: Answer


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """An object's status has changed; what crm looks at is whether the safety net freed it."""

    property_object_id: UUID
    tenant_id: UUID
    is_freed_by_net: bool
    version: int


@dataclass(frozen=True, slots=True)
class OfferUpdated:
    """An object's price has changed."""

    property_object_id: UUID
    tenant_id: UUID


def read_hold_answered(value: Mapping[str, Any]) -> HoldAnswered:
    """Read an answer."""
    answer = Answer(
        UUID(value["BookingId"]),
        UUID(value["PropertyObjectId"]),
        int(value["Sequence"]),
        Outcome(value["Outcome"]),
        int(value["Version"]),
    )
    return HoldAnswered(UUID(value["TenantId"]), answer)


def read_status_changed(value: Mapping[str, Any]) -> StatusChanged:
    """Read a change of status."""
    freed = value["ToStatus"] == "Free" and value["StatusSource"] == "ExpirationJob"
    return StatusChanged(UUID(value["PropertyObjectId"]), UUID(value["TenantId"]), freed, int(value["Version"]))


def read_offer_updated(value: Mapping[str, Any]) -> OfferUpdated:
    """Read a change of price."""
    return OfferUpdated(UUID(value["PropertyObjectId"]), UUID(value["TenantId"]))


CONSUMED: Final[Mapping[tuple[str, str], Callable[[Mapping[str, Any]], object]]] = {
    (HOLD_ANSWERED_TOPIC, HOLD_ANSWERED_TOPIC): read_hold_answered,
    (STATUS_CHANGED_TOPIC, STATUS_CHANGED_TOPIC): read_status_changed,
    (OFFER_TOPIC, OFFER_UPDATED): read_offer_updated,
}
"""What is read of other services: (topic, type) -> parser."""
