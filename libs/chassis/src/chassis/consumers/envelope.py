"""From a raw record to an event: CloudEvents 1.0 in Kafka's binary mode, read strictly where it matters.

Unknown headers are ignored; what a reader needs and doesn't find makes the record unreadable, with a code that says
why. Nothing here looks at the payload's fields.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import orjson

from chassis.messaging import Received
from chassis.tracing import PROPAGATED

READ: Final = frozenset(
    {
        "ce_id", "ce_type", "ce_contractversion", "ce_time", "ce_subject", "ce_sequence", "ce_tenantid",
        "ce_correlationid", "ce_replayid",
    }
)  # fmt: skip
"""The headers that are looked at; whatever the others hold is nobody's fault."""

LONGEST_ID: Final = 1000
"""Characters of an id that another system made up: ours travel on in the headers of what handlers emit."""

NOT_A_REPLAY: Final = UUID(int=0)
"""Replay id of an event that is read for the first time."""


class Unreadable(Exception):
    """A record that can't be understood, now or later.

    Attributes:
        code: stable code: empty_value, not_json, header_missing, header_malformed, version_unknown, schema_breached.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Envelope:
    """The headers of one event, parsed.

    Attributes:
        event_id: `ce_id`, by which consumers deduplicate.
        type: `ce_type`.
        version: `ce_contractversion`.
        occurred_at: `ce_time`, UTC.
        subject: `ce_subject`.
        sequence: `ce_sequence`: orders one entity's events of different topics.
        tenant_id: `ce_tenantid`.
        correlation_id: `ce_correlationid`; the event's id where it has none.
        replay_id: which replay delivers it; NOT_A_REPLAY usually.
    """

    event_id: UUID
    type: str
    version: str
    occurred_at: datetime
    subject: str
    sequence: int | None
    tenant_id: UUID | None
    correlation_id: str
    replay_id: UUID = NOT_A_REPLAY


def headers_of(record: Received) -> dict[str, str]:
    """Return those of a record's headers that are READ, as text; of a name that comes twice the last counts.

    Raises:
        Unreadable: a header that is looked at is not UTF-8.
    """
    found: dict[str, str] = {}
    for name, value in record.headers:
        if name not in READ:
            continue
        try:
            found[name] = (value or b"").decode()
        except UnicodeDecodeError as error:
            raise Unreadable("header_malformed", f"{name} is not UTF-8") from error
    return found


def trace_headers(record: Received) -> dict[str, str]:
    """Return the headers that a trace needs, whatever is in them."""
    wanted = ("ce_id", *PROPAGATED)
    return {name: (value or b"").decode(errors="replace") for name, value in record.headers if name in wanted}


def type_of(headers: dict[str, str]) -> str:
    """Return `ce_type`.

    Raises:
        Unreadable: the record has none.
    """
    return _required(headers, "ce_type")


def read_envelope(headers: dict[str, str]) -> Envelope:
    """Parse a record's headers.

    Raises:
        Unreadable: one that is required is missing, or one is malformed.
    """
    event_id = _uuid(headers, "ce_id", _required(headers, "ce_id"))
    return Envelope(
        event_id=event_id,
        type=type_of(headers),
        version=_required(headers, "ce_contractversion"),
        occurred_at=_instant(_required(headers, "ce_time")),
        subject=_id(headers, "ce_subject"),
        sequence=_sequence(headers.get("ce_sequence")),
        tenant_id=_optional_uuid(headers, "ce_tenantid"),
        correlation_id=_id(headers, "ce_correlationid") or str(event_id),
        replay_id=_optional_uuid(headers, "ce_replayid") or NOT_A_REPLAY,
    )


def read_payload(record: Received) -> Any:
    """Return a record's value, parsed.

    Raises:
        Unreadable: it is empty, a tombstone, or not JSON.
    """
    if not record.value:
        raise Unreadable("empty_value", "a tombstone" if record.value is None else "the value has no bytes")
    try:
        return orjson.loads(record.value)
    except orjson.JSONDecodeError as error:
        raise Unreadable("not_json", f"not JSON at byte {error.pos}") from error


def _required(headers: dict[str, str], name: str) -> str:
    value = headers.get(name)
    if not value:
        raise Unreadable("header_missing", f"{name} is missing")
    return value


def _id(headers: dict[str, str], name: str) -> str:
    value = headers.get(name, "")
    if "\0" in value or len(value) > LONGEST_ID:
        raise Unreadable("header_malformed", f"{name} is not an id")
    return value


def _uuid(_: dict[str, str], name: str, value: str) -> UUID:
    try:
        return UUID(value)
    except ValueError as error:
        raise Unreadable("header_malformed", f"{name} is not a UUID") from error


def _optional_uuid(headers: dict[str, str], name: str) -> UUID | None:
    return _uuid(headers, name, headers[name]) if headers.get(name) else None


def _instant(value: str) -> datetime:
    try:
        instant = datetime.fromisoformat(value)
        parsed = instant.astimezone(UTC) if instant.tzinfo else None
    except (ValueError, OverflowError):
        parsed = None
    if parsed is None:
        raise Unreadable("header_malformed", "ce_time is not an instant with offset")
    return parsed


def _sequence(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise Unreadable("header_malformed", "ce_sequence is not a decimal number")
    return int(value)
