"""The transactional outbox: an event is a row written in the transaction that it announces, or it doesn't exist.

Rows are spread over 64 lanes by a hash of their message key, for ever: a relay that holds a lane sends that lane's
rows in id order, which is what keeps one key's events in order while several relays work. Whoever emits for a key
holds the row lock of its aggregate, so the order of ids within a key is the order of commits.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from typing import Any, Final
from uuid import UUID
from zlib import crc32

import orjson
from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.contracts.checker import ContractBreach, ContractChecker
from chassis.db import COPY_NULL, copy_bytes, copy_lines, copy_text, mark_emitted
from chassis.ids import derived_event_id, new_id
from chassis.instants import rfc3339
from chassis.sqltypes import Xid8
from chassis.tracing import inject_trace

LANES: Final = 64
MAX_RECORD_BYTES: Final = 900_000
"""Largest encoded record (key, payload, headers) in bytes; below the broker's default limit of 1 MiB with room for
framing."""


class MessageRefused(ValueError):
    """An event that can't be published: not encodable, too large, or in breach of its envelope."""


@dataclass(frozen=True, slots=True)
class EventType:
    """What is the same for every event of one type; one constant per type, declared in the service's contract.

    Attributes:
        topic: Kafka topic.
        type: `ce_type`.
        source: `ce_source`, `/pin/<context>`.
        aggregate_type: `ce_aggregatetype`.
        event_class: domain, saga, audit, operational, compliance or analytical.
        contract_version: `ce_contractversion`.
    """

    topic: str
    type: str
    source: str
    aggregate_type: str
    event_class: str
    contract_version: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """One event to publish.

    Attributes:
        event: its type.
        key: Kafka message key: the id of the entity whose order matters to the readers.
        payload: the record's value, in the casing of its contract; JSON types, UUIDs and instants (RFC 3339) as text.
        occurred_at: when it happened, timezone-aware.
        tenant_id: the tenant it concerns, if any.
        sequence: version of the aggregate at emission; None where the class has no per-entity order.
        aggregate_id: id of the aggregate; the key if not given.
        event_id: `ce_id`.
    """

    event: EventType
    key: str
    payload: Mapping[str, Any]
    occurred_at: datetime
    tenant_id: UUID | None = None
    sequence: int | None = None
    aggregate_id: str | None = None
    event_id: UUID = field(default_factory=new_id)


@dataclass(frozen=True, slots=True)
class Cause:
    """Why events are emitted: what ties them to a request, a job run or another event.

    Attributes:
        correlation_id: id of the job run or request.
        causation_id: id of the event that is being handled, if one is.
        run_id: id of the job run, kept on the outbox row, if a job emits.
        derives: whether the ids of what is emitted follow from `causation_id`, as they must where handling twice has to
            give the same events.
        emitter: the consumer group that handles, part of the derived ids.
    """

    correlation_id: str
    causation_id: UUID | None = None
    run_id: UUID | None = None
    derives: bool = True
    emitter: str = ""


def lane_of(key: str) -> int:
    """Return the lane (0..63) of a message key; stable for ever, as stored rows depend on it."""
    return crc32(key.encode()) % LANES


def envelope(message: Message, cause: Cause) -> dict[str, str]:
    """Return the CloudEvents 1.0 headers (Kafka binary mode) of a message, and the current trace.

    Raises:
        ValueError: `occurred_at` is naive.
    """
    headers = _same_for_all(message.event).copy()
    headers["ce_id"] = str(message.event_id)
    headers["ce_time"] = rfc3339(message.occurred_at)
    headers["ce_subject"] = message.aggregate_id or message.key
    headers["ce_correlationid"] = cause.correlation_id
    if message.sequence is not None:
        headers["ce_sequence"] = str(message.sequence)
    if message.tenant_id is not None:
        headers["ce_tenantid"] = str(message.tenant_id)
    if cause.causation_id is not None:
        headers["ce_causationid"] = str(cause.causation_id)
    inject_trace(headers)
    return headers


@lru_cache(maxsize=256)
def _same_for_all(event: EventType) -> dict[str, str]:
    return {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_source": event.source,
        "ce_type": event.type,
        "ce_aggregatetype": event.aggregate_type,
        "ce_contractversion": str(event.contract_version),
        "ce_eventclass": event.event_class,
    }


def outbox_table(metadata: MetaData) -> Table:
    """Return the outbox table for a service's metadata; Debezium's outbox column names where they exist."""
    return Table(
        "outbox",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("event_id", Uuid, nullable=False),
        Column("aggregatetype", Text, nullable=False),
        Column("aggregateid", Text, nullable=False),
        Column("type", Text, nullable=False),
        Column("payload", LargeBinary, nullable=False),
        Column("headers", JSONB, nullable=False),
        Column("topic", Text, nullable=False),
        Column("message_key", Text, nullable=False),
        Column("lane", SmallInteger, nullable=False),
        Column("tenant_id", Uuid),
        Column("occurred_at", DateTime(timezone=True), nullable=False),
        Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
        Column("run_id", Uuid),
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("parked_at", DateTime(timezone=True)),
        Column("xid", Xid8, nullable=False, server_default=text("pg_current_xact_id()")),
        Index("ix_outbox_lane_id", "lane", "id", postgresql_where=text("parked_at is null")),
        Index("ix_outbox_parked_lane_id", "lane", "id", postgresql_where=text("parked_at is not null")),
        Index("ix_outbox_parked_key_id", "message_key", "id", postgresql_where=text("parked_at is not null")),
    )


def outbox_parked_key_table(metadata: MetaData) -> Table:
    """Return the table of keys that wait because a row of theirs was refused (see `chassis.relay.parking`)."""
    return Table(
        "outbox_parked_key",
        metadata,
        Column("message_key", Text, primary_key=True),
        Column("topic", Text, nullable=False),
        Column("parked_at", DateTime(timezone=True), nullable=False),
        Column("reason", Text, nullable=False),
        Column("next_attempt_at", DateTime(timezone=True)),
        Index(
            "ix_outbox_parked_key_next_attempt",
            "next_attempt_at",
            postgresql_where=text("next_attempt_at is not null"),
        ),
    )


_COLUMNS = (
    "event_id", "aggregatetype", "aggregateid", "type", "payload", "headers", "topic", "message_key", "lane",
    "tenant_id", "occurred_at", "run_id",
)  # fmt: skip


class Outbox:
    """Writes events into one service's outbox table.

    Args:
        schema: the service's Postgres schema.
        checker: judges every event by its contract; None: nothing is judged (chassis's own events are judged in tests).
    """

    def __init__(self, schema: str, checker: ContractChecker | None = None) -> None:
        self._table = f"{schema}.outbox"
        self._checker = checker

    async def emit(self, session: AsyncSession, messages: Sequence[Message], cause: Cause) -> None:
        """Write events in the session's transaction, in the given order, with one statement.

        Args:
            session: an open write session; nothing is sent before it commits.
            messages: the events; an empty sequence does nothing.
            cause: what ties them together; events that another event caused get ids derived from it, so that
                handling it twice gives the same ids.

        Raises:
            MessageRefused: an event breaks its contract, can't be encoded or is too large; nothing is written. Of more
                than LINES_AT_ONCE events the first may be on their way: the transaction, or its savepoint, can then
                only be rolled back.
        """
        if messages:
            await self.write(session, self._lines(session, messages, cause))

    def lines(self, session: AsyncSession, messages: Sequence[Message], cause: Cause) -> list[str]:
        """Make the rows of events, for `write`: in order, one per event.

        Raises:
            MessageRefused: as `emit` does.
        """
        return list(self._lines(session, messages, cause))

    async def write(self, session: AsyncSession, lines: Iterable[str]) -> None:
        """Write rows that `lines` has made for this session."""
        await copy_lines(session, self._table, _COLUMNS, lines)
        mark_emitted(session)

    def _lines(self, session: AsyncSession, messages: Sequence[Message], cause: Cause) -> Iterator[str]:
        if cause.causation_id is not None and cause.derives:
            messages = [_derived(session, message, cause.causation_id, cause.emitter) for message in messages]
        return (self._line(message, cause) for message in messages)

    def _line(self, message: Message, cause: Cause) -> str:
        event = message.event
        try:
            headers = envelope(message, cause)
            line = _line(message, cause, headers)
            if self._checker is not None:
                self._checker.check(event.topic, event.type, headers, message.payload)
        except ContractBreach as error:
            raise MessageRefused(f"{message.event_id}: {error}") from error
        except MessageRefused:
            raise
        except (TypeError, ValueError) as error:
            raise MessageRefused(f"{event.type} {message.event_id} can't be encoded: {error}") from error
        return line


def _derived(session: AsyncSession, message: Message, causation_id: UUID, emitter: str) -> Message:
    counts: dict[tuple[UUID, str], int] = session.info.setdefault("emitted_for", {})
    ordinal = counts.get((causation_id, message.event.type), 0)
    counts[causation_id, message.event.type] = ordinal + 1
    return replace(message, event_id=derived_event_id(causation_id, message.event.type, ordinal, emitter))


def _line(message: Message, cause: Cause, envelope_headers: dict[str, str]) -> str:
    """Return a message as a line of COPY's text format, in the order of _COLUMNS."""
    event = message.event
    payload = _encoded(message.payload)
    encoded = orjson.dumps(envelope_headers)
    headers = encoded.decode()
    size = len(message.key.encode()) + len(payload) + len(encoded)
    if "\0" in message.key or "\\u0000" in headers:
        raise MessageRefused(f"{event.type} {message.event_id} has a NUL in its key or envelope")
    if size > MAX_RECORD_BYTES:
        raise MessageRefused(f"{event.type} {message.event_id} has {size} bytes; the limit is {MAX_RECORD_BYTES}")
    key = copy_text(message.key)
    return "\t".join(
        (
            str(message.event_id),
            event.aggregate_type,
            copy_text(message.aggregate_id) if message.aggregate_id else key,
            event.type,
            copy_bytes(payload),
            copy_text(headers),
            event.topic,
            key,
            str(lane_of(message.key)),
            COPY_NULL if message.tenant_id is None else str(message.tenant_id),
            rfc3339(message.occurred_at),
            COPY_NULL if cause.run_id is None else str(cause.run_id),
        )
    )


_PLAIN: Final = frozenset({str, int, bool, type(None)})


def _encoded(payload: Mapping[str, Any]) -> bytes:
    """Encode a payload, refusing what the encoder would change silently: datetimes without offset, NaN as null."""
    encoded = orjson.dumps(payload, option=orjson.OPT_PASSTHROUGH_DATETIME)
    if b"null" in encoded and _holds_no_number(payload):
        raise ValueError("NaN and infinity are not JSON")
    return encoded


def _holds_no_number(value: Any) -> bool:
    if type(value) in _PLAIN:
        return False
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_holds_no_number, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_no_number, value))
