"""The tables of a service that consumes: what it has handled, what it set aside, and which keys wait."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB


def inbox_table(metadata: MetaData) -> Table:
    """Return the inbox: one row per (consumer, event, replay) that has been handled."""
    return Table(
        "inbox",
        metadata,
        Column("consumer", Text, primary_key=True),
        Column("event_id", Uuid, primary_key=True),
        Column(
            "replay_id", Uuid, primary_key=True, server_default=text("'00000000-0000-0000-0000-000000000000'::uuid")
        ),
        Column("received_at", DateTime(timezone=True), nullable=False),
        Index("ix_inbox_received_at", "received_at"),
    )


def dead_letter_table(metadata: MetaData) -> Table:
    """Return the dead letters: records byte for byte, with what was wrong with them and what became of them.

    `parking_key` is the record's key, or a name of the record's own where it has none; `position` is the order in which
    records of a parked key came.
    """
    unresolved = "resolved_at is null"
    return Table(
        "dead_letter",
        metadata,
        Column("id", Uuid, primary_key=True),
        Column("position", BigInteger, Identity(always=True), nullable=False),
        Column("consumer", Text, nullable=False),
        Column("topic", Text, nullable=False),
        Column("partition", Integer, nullable=False),
        Column("record_offset", BigInteger, nullable=False),
        Column("recorded_at", DateTime(timezone=True), nullable=False),
        Column("parking_key", LargeBinary, nullable=False),
        Column("message_key", LargeBinary),
        Column("value", LargeBinary),
        Column("headers", JSONB, nullable=False),
        Column("event_id", Uuid),
        Column("type", Text),
        Column("error_class", Text, nullable=False),
        Column("error_code", Text, nullable=False),
        Column("error", Text, nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("first_failed_at", DateTime(timezone=True), nullable=False),
        Column("last_failed_at", DateTime(timezone=True), nullable=False),
        Column("disposition", Text, nullable=False),
        Column("retry_requested_at", DateTime(timezone=True)),
        Column("resolved_at", DateTime(timezone=True)),
        Column("resolution", Text),
        UniqueConstraint(
            "consumer", "topic", "partition", "record_offset", "recorded_at", name="uq_dead_letter_record"
        ),
        CheckConstraint("length(error) <= 1000", name="ck_dead_letter_error_short"),
        CheckConstraint("disposition in ('quarantine', 'refused', 'exhausted', 'parked')", name="ck_disposition_known"),
        CheckConstraint("resolution in ('handled', 'duplicate', 'discarded')", name="ck_resolution_known"),
        CheckConstraint("(resolved_at is null) = (resolution is null)", name="ck_resolved_how"),
        Index(
            "ix_dead_letter_parked",
            "consumer",
            "parking_key",
            "position",
            postgresql_where=text(f"{unresolved} and disposition in ('exhausted', 'parked')"),
        ),
        Index("ix_dead_letter_open", "id", postgresql_where=text(unresolved)),
        Index("ix_dead_letter_event", "consumer", "event_id", postgresql_where=text(unresolved)),
        Index(
            "ix_dead_letter_retry",
            "consumer",
            "position",
            postgresql_where=text(f"{unresolved} and retry_requested_at is not null"),
        ),
        Index("ix_dead_letter_resolved_at", "resolved_at", postgresql_where=text("resolved_at is not null")),
    )


def parked_key_table(metadata: MetaData) -> Table:
    """Return the parked keys: whoever handles or adds to one of them locks its row."""
    return Table(
        "parked_key",
        metadata,
        Column("consumer", Text, primary_key=True),
        Column("parking_key", LargeBinary, primary_key=True),
        Column("parked_at", DateTime(timezone=True), nullable=False),
        Column("attempts", Integer, nullable=False),
        Column("next_attempt_at", DateTime(timezone=True), nullable=False),
        Index("ix_parked_key_due", "consumer", "next_attempt_at"),
    )
