"""What crm reads of chessboard's messages; fields that it doesn't know are ignored."""

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID


def read_hold_answered(value: Mapping[str, Any]) -> tuple[UUID, UUID, int, str]:
    """Return booking, object, sequence and outcome of chessboard's answer."""
    return UUID(value["BookingId"]), UUID(value["PropertyObjectId"]), int(value["Sequence"]), str(value["Outcome"])


def read_status_changed(value: Mapping[str, Any]) -> tuple[UUID, str, str]:
    """Return object, status and source of a change in chessboard."""
    return UUID(value["PropertyObjectId"]), str(value["ToStatus"]), str(value["StatusSource"])


def read_offer_updated(value: Mapping[str, Any]) -> UUID:
    """Return the object whose price has changed."""
    return UUID(value["PropertyObjectId"])


CONSUMED: Final = {
    ("pin.chessboard.hold-answered.v1", "pin.chessboard.hold-answered.v1"): read_hold_answered,
    (
        "pin.chessboard.property-object-status-changed.v1",
        "pin.chessboard.property-object-status-changed.v1",
    ): read_status_changed,
    ("pin.chessboard.offer.v1", "chessboard.offer.updated"): read_offer_updated,
}
"""What is read of other services: (topic, type) -> parser."""
