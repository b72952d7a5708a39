"""The schema `crm` and its mapping onto the domain; the database enforces what must hold for every writer."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import registry

from chassis.audit import audit_seal_table, audit_table
from chassis.batching import job_poison_table
from chassis.clock import EARLIEST, LATEST
from chassis.consumers.tables import dead_letter_table, inbox_table, parked_key_table
from chassis.idempotency import idempotency_table
from chassis.job_records import job_control_table, job_run_table
from chassis.outbox import outbox_parked_key_table, outbox_table
from crm.domain import Asked, BookingState, Deal, DealStatus, DealTimelineEventType, Outcome, StepStatus, TimelineStep

SCHEMA: Final = "crm"
metadata = MetaData(schema=SCHEMA)
mapper = registry(metadata=metadata)


class _TextEnum(TypeDecorator[str]):
    """A StrEnum kept as text; a CHECK constraint, not a database type, lists the values."""

    impl = Text
    cache_ok = True

    def __init__(self, enum: type[DealStatus | StepStatus | DealTimelineEventType]) -> None:
        super().__init__()
        self.enum = enum

    def process_bind_param(self, value: str | None, dialect: object) -> str | None:  # noqa: ARG002
        return None if value is None else self.enum(value).value

    def process_result_value(self, value: str | None, dialect: object) -> str | None:  # noqa: ARG002
        return None if value is None else self.enum(value)


def _one_of(column: str, enum: type[StrEnum], *, nullable: bool = False) -> CheckConstraint:
    allowed = f"{column} in ({_listed(enum)})"
    return CheckConstraint(f"{column} is null or {allowed}" if nullable else allowed, name=f"ck_{column}_known")


def _listed(values: Iterable[StrEnum]) -> str:
    return ", ".join(f"'{value.value}'" for value in values)


deals = Table(
    "deal",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("title", Text, nullable=False),
    Column("status", _TextEnum(DealStatus), nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("id", "tenant_id", name="uq_deal_id_tenant"),
    Index("ix_deal_tenant_id", "tenant_id", "id"),
    _one_of("status", DealStatus),
)

steps = Table(
    "deal_timeline_event",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("deal_id", Uuid, nullable=False),
    Column("tenant_id", Uuid, nullable=False),
    Column("type", _TextEnum(DealTimelineEventType), nullable=False),
    Column("status", _TextEnum(StepStatus), nullable=False),
    Column("occurred_at", DateTime(timezone=True), nullable=False),
    Column("due_at", DateTime(timezone=True)),
    Column("payload", JSONB, nullable=False),
    Column("actor_user_id", Text),
    Column("actor_role", Text),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    Column("completed_at", DateTime(timezone=True)),
    ForeignKeyConstraint(["deal_id", "tenant_id"], ["crm.deal.id", "crm.deal.tenant_id"], name="fk_step_deal_tenant"),
    _one_of("status", StepStatus),
    _one_of("type", DealTimelineEventType),
    CheckConstraint("(completed_at is not null) = (status = 'Done')", name="ck_completed_iff_done"),
    CheckConstraint("status <> 'Overdue' or due_at is not null", name="ck_overdue_has_due"),
    CheckConstraint(
        f"occurred_at >= '{EARLIEST}' and occurred_at < '{LATEST}'"
        f" and (due_at is null or (due_at >= '{EARLIEST}' and due_at < '{LATEST}'))",
        name="ck_instants_representable",
    ),
    Index("ix_deal_timeline_event_in_progress", "due_at", "id", postgresql_where=text("status = 'InProgress'")),
    Index("ix_deal_timeline_event_deal", "deal_id", "occurred_at", "id"),
)

bookings = Table(
    "booking",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("deal_id", Uuid, nullable=False),
    Column("partner_id", Uuid),
    Column("state", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("reserved_until", DateTime(timezone=True)),
    Column("booked_until", DateTime(timezone=True)),
    Column("quote_expires_at", DateTime(timezone=True)),
    Column("answer_due_at", DateTime(timezone=True)),
    Column("registration_asked_at", DateTime(timezone=True)),
    Column("price_minor", BigInteger),
    Column("amended_price_minor", BigInteger),
    Column("currency", Text),
    Column("charged_minor", BigInteger, nullable=False),
    Column("reason", Text),
    Column("came_from", Text),
    Column("probes", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("id", "tenant_id", name="uq_booking_id_tenant"),
    ForeignKeyConstraint(
        ["deal_id", "tenant_id"], ["crm.deal.id", "crm.deal.tenant_id"], name="fk_booking_deal_tenant"
    ),
    _one_of("state", BookingState),
    _one_of("came_from", BookingState, nullable=True),
    CheckConstraint("(quote_expires_at is not null) = (state = 'quoted')", name="ck_quote_iff_quoted"),
    CheckConstraint(
        "state = 'unknown' or (reserved_until is not null) = (state in ('pending_supplier', 'held', 'pending_payment',"
        " 'committing', 'partially_confirmed', 'confirmed', 'amendment_pending'))",
        name="ck_reserved_until_iff_reserved",
    ),
    CheckConstraint(
        "state = 'unknown' or (booked_until is not null) = (state in ('committing', 'partially_confirmed',"
        " 'confirmed', 'amendment_pending'))",
        name="ck_booked_until_iff_booked",
    ),
    CheckConstraint(
        "(answer_due_at is not null) = (state in ('pending_supplier', 'committing', 'partially_confirmed',"
        " 'cancellation_pending', 'unknown'))",
        name="ck_answer_due_iff_waiting",
    ),
    CheckConstraint("(came_from is not null) = (state = 'unknown')", name="ck_came_from_iff_unknown"),
    CheckConstraint(
        "(price_minor is null) = (currency is null) and price_minor >= 0 and amended_price_minor >= 0"
        " and charged_minor >= 0",
        name="ck_price_has_currency",
    ),
    Index("ix_booking_tenant_id", "tenant_id", "id"),
    Index("ix_booking_deal", "deal_id", "id"),
    Index("ix_booking_reserved", "reserved_until", "id", postgresql_where=text("state in ('held', 'pending_payment')")),
    Index(
        "ix_booking_booked", "booked_until", "id", postgresql_where=text("state in ('confirmed', 'amendment_pending')")
    ),
    Index("ix_booking_answer_due", "answer_due_at", "id", postgresql_where=text("answer_due_at is not null")),
    Index("ix_booking_quoted", "quote_expires_at", "id", postgresql_where=text("state = 'quoted'")),
)


def _of_booking(name: str) -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["booking_id", "tenant_id"], ["crm.booking.id", "crm.booking.tenant_id"], name=name)


object_claims = Table(
    "object_claim",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("property_object_id", Uuid, primary_key=True),
    Column("booking_id", Uuid),
    Column("sequence", BigInteger, nullable=False),
    _of_booking("fk_claim_booking_tenant"),
)

booking_objects = Table(
    "booking_object",
    metadata,
    Column("booking_id", Uuid, primary_key=True),
    Column("property_object_id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("position", Integer, nullable=False),
    Column("sequence", BigInteger),
    Column("asked", Text),
    Column("outcome", Text),
    Column("reason", Text),
    Column("object_version", BigInteger),
    _of_booking("fk_booking_object_booking_tenant"),
    ForeignKeyConstraint(
        ["tenant_id", "property_object_id"],
        ["crm.object_claim.tenant_id", "crm.object_claim.property_object_id"],
        name="fk_booking_object_claim",
    ),
    UniqueConstraint("booking_id", "position", name="uq_booking_object_position"),
    _one_of("asked", Asked, nullable=True),
    _one_of("outcome", Outcome, nullable=True),
    CheckConstraint("(sequence is not null) = (asked is not null)", name="ck_sequence_iff_asked"),
    CheckConstraint("outcome is null or asked is not null", name="ck_outcome_of_asked"),
    Index("ix_booking_object_object", "property_object_id", "booking_id"),
)

booking_history = Table(
    "booking_history",
    metadata,
    Column("booking_id", Uuid, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("from_state", Text, nullable=False),
    Column("to_state", Text, nullable=False),
    Column("reason", Text),
    Column("actor", Text),
    Column("changed_at", DateTime(timezone=True), nullable=False),
    _of_booking("fk_booking_history_booking_tenant"),
)

partner_limits = Table(
    "partner_limit",
    metadata,
    Column("tenant_id", Uuid, primary_key=True),
    Column("partner_id", Uuid, primary_key=True),
    Column("currency", Text, nullable=False),
    Column("limit_minor", BigInteger, nullable=False),
    Column("used_minor", BigInteger, nullable=False),
    CheckConstraint("limit_minor >= 0 and used_minor >= 0", name="ck_limit_not_negative"),
)

outbox = outbox_table(metadata)
outbox_parked_key = outbox_parked_key_table(metadata)
audit_log = audit_table(metadata)
audit_seal = audit_seal_table(metadata)
job_poison = job_poison_table(metadata)
job_control = job_control_table(metadata)
job_run = job_run_table(metadata)
inbox = inbox_table(metadata)
dead_letter = dead_letter_table(metadata)
parked_key = parked_key_table(metadata)
idempotency_key = idempotency_table(metadata)

mapper.map_imperatively(Deal, deals)
mapper.map_imperatively(TimelineStep, steps)
