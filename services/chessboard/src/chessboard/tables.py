"""The schema `chessboard`; the database enforces what must hold for every writer."""

from enum import StrEnum
from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    Numeric,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    text,
)

from chassis.audit import audit_seal_table, audit_table
from chassis.batching import job_poison_table
from chassis.clock import EARLIEST, LATEST
from chassis.consumers.tables import dead_letter_table, inbox_table, parked_key_table
from chassis.idempotency import idempotency_table
from chassis.job_records import job_control_table, job_run_table
from chassis.outbox import outbox_parked_key_table, outbox_table
from chessboard.domain import Status, StatusSource

SCHEMA: Final = "chessboard"
metadata = MetaData(schema=SCHEMA)


def _one_of(column: str, enum: type[StrEnum]) -> CheckConstraint:
    values = ", ".join(f"'{member.value}'" for member in enum)
    return CheckConstraint(f"{column} in ({values})", name=f"ck_{column}_known")


def _representable(*columns: str) -> CheckConstraint:
    ranges = (f"({column} is null or ({column} >= '{EARLIEST}' and {column} < '{LATEST}'))" for column in columns)
    return CheckConstraint(" and ".join(ranges), name="ck_instants_representable")


projects = Table(
    "project",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("name", Text, nullable=False),
    Column("property_objects_free_count", Integer, nullable=False, server_default=text("0")),
    Column("aggregates_as_of", DateTime(timezone=True)),
    Column("version", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("id", "tenant_id", name="uq_project_id_tenant"),
    CheckConstraint("property_objects_free_count >= 0", name="ck_free_count_not_negative"),
    Index("ix_project_tenant_id", "tenant_id", "id"),
)

buildings = Table(
    "building",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("project_id", Uuid, nullable=False),
    Column("name", Text, nullable=False),
    Column("sections", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("id", "project_id", "tenant_id", name="uq_building_id_project_tenant"),
    UniqueConstraint("project_id", "name", name="uq_building_name"),
    ForeignKeyConstraint(
        ["project_id", "tenant_id"],
        ["chessboard.project.id", "chessboard.project.tenant_id"],
        name="fk_building_project_tenant",
    ),
    CheckConstraint("sections >= 1", name="ck_sections_positive"),
)

property_objects = Table(
    "property_object",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("project_id", Uuid, nullable=False),
    Column("building_id", Uuid, nullable=False),
    Column("section", Integer, nullable=False),
    Column("number", Text, nullable=False),
    Column("floor", Integer, nullable=False),
    Column("rooms", Integer, nullable=False),
    Column("area", Numeric(10, 2), nullable=False),
    Column("price_minor", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("reserved_until", DateTime(timezone=True)),
    Column("booked_until", DateTime(timezone=True)),
    Column("hold_deal_id", Uuid),
    Column("hold_booking_id", Uuid),
    Column("sold_at", DateTime(timezone=True)),
    Column("status_source", Text, nullable=False),
    Column("status_changed_at", DateTime(timezone=True), nullable=False),
    Column("version", Integer, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("updated_at", DateTime(timezone=True), nullable=False),
    UniqueConstraint("building_id", "number", name="uq_property_object_number"),
    ForeignKeyConstraint(
        ["building_id", "project_id", "tenant_id"],
        ["chessboard.building.id", "chessboard.building.project_id", "chessboard.building.tenant_id"],
        name="fk_property_object_building_tenant",
    ),
    _one_of("status", Status),
    _one_of("status_source", StatusSource),
    CheckConstraint("(reserved_until is not null) = (status = 'Reserved')", name="ck_reserved_until_iff_reserved"),
    CheckConstraint("(booked_until is not null) = (status = 'Booked')", name="ck_booked_until_iff_booked"),
    CheckConstraint(
        "(hold_deal_id is not null) = (status in ('Reserved', 'Booked'))"
        " and (hold_booking_id is not null) = (status in ('Reserved', 'Booked'))",
        name="ck_hold_iff_held",
    ),
    CheckConstraint("(sold_at is not null) = (status = 'Sold')", name="ck_sold_at_iff_sold"),
    CheckConstraint("price_minor >= 0", name="ck_price_not_negative"),
    CheckConstraint("currency ~ '^[A-Z]{3}$'", name="ck_currency_code"),
    CheckConstraint("section >= 1 and rooms >= 0 and area > 0", name="ck_measures_positive"),
    _representable("reserved_until", "booked_until", "sold_at"),
    Index(
        "ix_property_objects_reserved_until",
        "reserved_until",
        "id",
        postgresql_where=text("reserved_until is not null"),
    ),
    Index("ix_property_objects_booked_until", "booked_until", "id", postgresql_where=text("booked_until is not null")),
    Index("ix_property_object_project", "project_id", "building_id", "floor", "section", "number"),
)

property_object_versions = Table(
    "property_object_version",
    metadata,
    Column("property_object_id", Uuid, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("tenant_id", Uuid, nullable=False),
    Column("from_status", Text, nullable=False),
    Column("to_status", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("reserved_until", DateTime(timezone=True)),
    Column("booked_until", DateTime(timezone=True)),
    Column("hold_deal_id", Uuid),
    Column("hold_booking_id", Uuid),
    Column("price_minor", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("actor", Text),
    Column("correlation_id", Text, nullable=False),
    Column("changed_at", DateTime(timezone=True), nullable=False),
)
"""What every version of an object was; rows are only added. It has no row level security, since COPY knows none: the
API's role may add rows and reads them through the view `property_object_history`, which shows a tenant its own."""

hold_ledger = Table(
    "hold_ledger",
    metadata,
    Column("property_object_id", Uuid, primary_key=True),
    Column("booking_id", Uuid, primary_key=True),
    Column("deal_id", Uuid, nullable=False),
    Column("last_sequence", BigInteger, nullable=False),
    Column("released", Boolean, nullable=False),
    ForeignKeyConstraint(
        ["property_object_id"], ["chessboard.property_object.id"], name="fk_hold_ledger_property_object"
    ),
    CheckConstraint("last_sequence >= 1", name="ck_last_sequence_positive"),
)
"""What CRM has last asked for each booking of an object; written under the object's row lock."""

project_recalc_requests = Table(
    "project_recalc_request",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("project_id", Uuid, nullable=False),
    Column("requested_at", DateTime(timezone=True), nullable=False),
    Index("ix_project_recalc_request_project", "project_id", "requested_at"),
)
"""Projects whose free objects are to be counted again; rows are only added, and the job deletes what it has counted."""

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
