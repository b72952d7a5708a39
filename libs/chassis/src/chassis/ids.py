"""Identifiers: UUIDv7 for what a command creates, UUIDv5 for what a handler derives from another event."""

from uuid import NAMESPACE_URL, UUID, uuid5

import uuid_utils
from asyncpg.pgproto import pgproto

EVENTS_NAMESPACE = uuid5(NAMESPACE_URL, "pin:events")


def new_id() -> UUID:
    """Return a new UUIDv7: unique, and ordered by creation time within a process.

    It has the class that the database driver returns, a `uuid.UUID` that is made and printed several times as fast.
    """
    return pgproto.UUID(uuid_utils.uuid7().bytes)


def derived_event_id(causation_id: UUID, event_type: str, ordinal: int, emitter: str = "") -> UUID:
    """Return the id of an event that a handler emits, the same however often the handler runs.

    Args:
        causation_id: id of the event that is handled.
        event_type: `ce_type` of the event that is emitted.
        ordinal: position among the events emitted for that cause, from 0.
        emitter: the consumer group that handles it: two that emit one type for one cause tell two events.
    """
    name = f"{causation_id}/{event_type}/{ordinal}"
    return uuid5(EVENTS_NAMESPACE, f"{name}/{emitter}" if emitter else name)
