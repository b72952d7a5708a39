"""SQL of a consumer: the inbox, the dead letters and the parked keys of one group.

Lock order, for everyone: the key's row in parked_key, then the dead letter, then the inbox, then the service's rows.
"""

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, cast
from uuid import UUID

import asyncpg
import orjson
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers.envelope import Envelope
from chassis.consumers.faults import Fault, ParkingFull
from chassis.db import driver_connection
from chassis.ids import new_id
from chassis.messaging import Received
from chassis.outbox import Cause, Message, Outbox
from chassis.platform_events import QuarantinedPayload, quarantined

Disposition = Literal["quarantine", "refused", "exhausted", "parked"]
AnnouncedDisposition = Literal["quarantine", "refused", "exhausted"]
MOST_PARKED_KEYS: Final = 1000
MOST_RECORDS_PER_KEY: Final = 1000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS: Final = 253_402_300_799_999

_MARK = """
insert into {schema}.inbox (consumer, event_id, replay_id, received_at)
select $1, e.event_id, e.replay_id, $4 from unnest($2::uuid[], $3::uuid[]) as e(event_id, replay_id)
order by e.event_id, e.replay_id on conflict do nothing returning event_id, replay_id
"""
_LOCK_PARKED = """
select parking_key from {schema}.parked_key
where consumer = $1 and parking_key = any($2::bytea[]) order by parking_key for update
"""
_PARK = """
insert into {schema}.parked_key (consumer, parking_key, parked_at, attempts, next_attempt_at)
values ($1, $2, $3, 0, $4)
on conflict (consumer, parking_key) do update set attempts = parked_key.attempts
"""
_COUNT_KEYS = "select count(*) from (select from {schema}.parked_key where consumer = $1 limit $2) as k"
_COUNT_RECORDS = """
select count(*) from (
  select from {schema}.dead_letter where consumer = $1 and parking_key = $2
  and resolved_at is null and disposition in ('exhausted', 'parked') limit $3
) as r
"""
_SET_ASIDE = """
insert into {schema}.dead_letter (
  id, consumer, topic, partition, record_offset, recorded_at, parking_key, message_key, value, headers, event_id, type,
  error_class, error_code, error, attempts, first_failed_at, last_failed_at, disposition)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19)
on conflict do nothing returning id
"""


@dataclass(frozen=True, slots=True)
class Letter:
    """A record to set aside.

    Attributes:
        disposition: quarantine, refused, exhausted, or parked (behind an exhausted one).
    """

    record: Received
    envelope: Envelope | None
    type: str | None
    fault: Fault
    disposition: Disposition
    attempts: int
    first_failed_at: datetime
    last_failed_at: datetime


LONGEST_KEY: Final = 500
"""Bytes of a key that is kept as it is; an index holds 2,700 at most, Kafka a megabyte."""


def parking_key(record: Received) -> bytes:
    """Return the key whose records keep their order; one without a key stands for itself, a long one as its hash."""
    if not record.key:
        return f"\0{record.topic}/{record.partition}/{record.offset}".encode()
    return record.key if len(record.key) <= LONGEST_KEY else b"\0sha256/" + hashlib.sha256(record.key).digest()


class Store:
    """The tables of one consumer group.

    Args:
        schema: the service's schema.
        group: `pin.<context>.<consumer>`.
    """

    def __init__(self, schema: str, group: str) -> None:
        self.schema = schema
        self.group = group
        context = group.split(".")[1]
        self._outbox = Outbox(schema)
        self._quarantined = quarantined(context)
        self._sql = {
            name: text.format(schema=schema)
            for name, text in {
                "mark": _MARK,
                "lock": _LOCK_PARKED,
                "park": _PARK,
                "keys": _COUNT_KEYS,
                "records": _COUNT_RECORDS,
                "aside": _SET_ASIDE,
            }.items()
        }

    async def mark_handled(
        self, session: AsyncSession, envelopes: Sequence[Envelope], now: datetime
    ) -> set[tuple[UUID, UUID]]:
        """Write inbox rows; return (event id, replay id) of those that had none."""
        connection = await driver_connection(session)
        ids, replays = [e.event_id for e in envelopes], [e.replay_id for e in envelopes]
        rows = await connection.fetch(self._sql["mark"], self.group, ids, replays, now)
        return {(row["event_id"], row["replay_id"]) for row in rows}

    async def lock_parked(self, session: AsyncSession, keys: Sequence[bytes]) -> set[bytes]:
        """Lock and return those of the keys that are parked."""
        connection = await driver_connection(session)
        rows = await connection.fetch(self._sql["lock"], self.group, sorted(set(keys)))
        return {row["parking_key"] for row in rows}

    async def park(self, session: AsyncSession, letter: Letter, next_attempt_at: datetime) -> None:
        """Park the key of a record that keeps failing; it may be parked already, by whoever reads another partition.

        Raises:
            ParkingFull: too many keys are parked.
        """
        connection = await driver_connection(session)
        if await connection.fetchval(self._sql["keys"], self.group, MOST_PARKED_KEYS) >= MOST_PARKED_KEYS:
            raise ParkingFull(f"{MOST_PARKED_KEYS} keys are parked")
        key = parking_key(letter.record)
        await connection.execute(self._sql["park"], self.group, key, letter.last_failed_at, next_attempt_at)
        await self.set_aside(session, letter)

    async def put_behind(self, session: AsyncSession, record: Received, envelope: Envelope, now: datetime) -> None:
        """Put a record behind those of its parked key, whose row this session has locked.

        Raises:
            ParkingFull: too many records of the key wait.
        """
        connection = await driver_connection(session)
        waiting = await connection.fetchval(self._sql["records"], self.group, parking_key(record), MOST_RECORDS_PER_KEY)
        if waiting >= MOST_RECORDS_PER_KEY:
            raise ParkingFull(f"{MOST_RECORDS_PER_KEY} records of a key are parked")
        behind = Fault("", "", "its key is parked")
        await self.set_aside(session, Letter(record, envelope, envelope.type, behind, "parked", 0, now, now))

    async def set_aside(self, session: AsyncSession, letter: Letter) -> None:
        """Keep a record as a dead letter; one that is kept already stays as it is. All but `parked` are announced."""
        record, fault, envelope = letter.record, letter.fault, letter.envelope
        letter_id = await (await driver_connection(session)).fetchval(
            self._sql["aside"],
            new_id(),
            self.group,
            record.topic,
            record.partition,
            record.offset,
            _instant(record.timestamp_ms),
            parking_key(record),
            record.key,
            record.value,
            _kept_headers(record),
            envelope.event_id if envelope else None,
            letter.type,
            fault.error_class,
            fault.code,
            fault.text,
            letter.attempts,
            letter.first_failed_at,
            letter.last_failed_at,
            letter.disposition,
        )
        if letter_id is not None and letter.disposition != "parked":
            await self.announce(session, letter_id, letter)

    async def announce(self, session: AsyncSession, letter_id: UUID, letter: Letter) -> None:
        """Tell the people on call of a dead letter, in the transaction that keeps it."""
        record, envelope = letter.record, letter.envelope
        key = (record.key or b"").decode(errors="replace").replace("\0", "?")
        payload: QuarantinedPayload = {
            "consumer": self.group,
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "disposition": cast("AnnouncedDisposition", letter.disposition),
            "errorClass": letter.fault.error_class,
            "errorCode": letter.fault.code,
            "deadLetterId": str(letter_id),
            "eventId": str(envelope.event_id) if envelope else None,
            "subjectId": envelope.subject or None if envelope else None,
        }
        message = Message(
            self._quarantined,
            key if 0 < len(key) <= LONGEST_KEY else str(letter_id),
            payload,
            letter.last_failed_at,
            envelope.tenant_id if envelope else None,
            aggregate_id=str(letter_id),
        )
        # A message may be set aside more than once (parked, then refused): each time is an event of its own.
        cause = Cause(
            envelope.correlation_id if envelope else str(letter_id),
            causation_id=envelope.event_id if envelope else None,
            derives=False,
        )
        await self._outbox.emit(session, [message], cause)


def record_of(row: asyncpg.Record) -> Received:
    """Return the record that a dead letter keeps, byte for byte."""
    kept = row["headers"]  # parsed already on a session's connection, text on a plain one
    headers: list[list[str | None]] = orjson.loads(kept) if isinstance(kept, str) else kept
    return Received(
        row["topic"],
        row["partition"],
        row["record_offset"],
        (row["recorded_at"] - _EPOCH) // timedelta(milliseconds=1),
        row["message_key"],
        row["value"],
        tuple(
            (_plain_name(name or "", *coded), None if value is None else base64.b64decode(value))
            for name, value, *coded in headers
        ),
    )


def _instant(timestamp_ms: int) -> datetime:
    """Return a record's timestamp, which its producer may have made up, as one that Postgres can keep."""
    return _EPOCH + timedelta(milliseconds=min(max(timestamp_ms, 0), _LAST_MS))


def _kept_headers(record: Received) -> str:
    return orjson.dumps([_kept_header(name, value) for name, value in record.headers]).decode()


def _plain_name(name: str, coding: str | None = None) -> str:
    return base64.b64decode(name).decode() if coding else name


def _kept_header(name: str, value: bytes | None) -> list[str | None]:
    """Return name and base64 of the value (null where it is); a name that JSONB can't hold as base64, and so marked."""
    kept = None if value is None else base64.b64encode(value).decode()
    return [name, kept] if "\0" not in name else [base64.b64encode(name.encode()).decode(), kept, "base64"]
