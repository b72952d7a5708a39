"""The schema `crm` and its mapping onto the domain; the database enforces what must hold for every writer."""

from typing import Final

from sqlalchemy import (
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
from crm.domain import Deal, DealStatus, DealTimelineEventType, StepStatus, TimelineStep

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


def _one_of(column: str, enum: type[DealStatus | StepStatus | DealTimelineEventType]) -> CheckConstraint:
    values = ", ".join(f"'{member.value}'" for member in enum)
    return CheckConstraint(f"{column} in ({values})", name=f"ck_{column}_known")


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
