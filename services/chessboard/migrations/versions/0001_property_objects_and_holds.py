"""Projects, buildings, property objects, their holds and history, with row level security and grants; and the tables
of the chassis.

The grants carry invariants: only the API's role adds objects, no role of the service can change where an object stands
or delete one, and versions and audit rows, their owner included, are only added.
"""

from alembic import op

from chassis.ddl import consumers, idempotency, operations, outbox_parking

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = """
create table chessboard.project (
  id uuid primary key,
  tenant_id uuid not null,
  name text not null,
  property_objects_free_count integer not null default 0
    constraint ck_free_count_not_negative check (property_objects_free_count >= 0),
  aggregates_as_of timestamptz,
  version integer not null,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  constraint uq_project_id_tenant unique (id, tenant_id)
);
create index ix_project_tenant_id on chessboard.project (tenant_id, id);

create table chessboard.building (
  id uuid primary key,
  tenant_id uuid not null,
  project_id uuid not null,
  name text not null,
  sections integer not null constraint ck_sections_positive check (sections >= 1),
  created_at timestamptz not null,
  updated_at timestamptz not null,
  constraint uq_building_id_project_tenant unique (id, project_id, tenant_id),
  constraint uq_building_name unique (project_id, name),
  constraint fk_building_project_tenant foreign key (project_id, tenant_id)
    references chessboard.project (id, tenant_id)
);

create table chessboard.property_object (
  id uuid primary key,
  tenant_id uuid not null,
  project_id uuid not null,
  building_id uuid not null,
  section integer not null,
  number text not null,
  floor integer not null,
  rooms integer not null,
  area numeric(10, 2) not null,
  price_minor bigint not null constraint ck_price_not_negative check (price_minor >= 0),
  currency text not null constraint ck_currency_code check (currency ~ '^[A-Z]{3}$'),
  status text not null
    constraint ck_status_known check (status in ('Free', 'Reserved', 'Booked', 'Sold', 'Hidden')),
  reserved_until timestamptz,
  booked_until timestamptz,
  hold_deal_id uuid,
  hold_booking_id uuid,
  sold_at timestamptz,
  status_source text not null
    constraint ck_status_source_known check (status_source in ('Crm', 'Admin', 'Import', 'ExpirationJob')),
  status_changed_at timestamptz not null,
  version integer not null,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  constraint uq_property_object_number unique (building_id, number),
  constraint fk_property_object_building_tenant foreign key (building_id, project_id, tenant_id)
    references chessboard.building (id, project_id, tenant_id),
  constraint ck_reserved_until_iff_reserved check ((reserved_until is not null) = (status = 'Reserved')),
  constraint ck_booked_until_iff_booked check ((booked_until is not null) = (status = 'Booked')),
  constraint ck_hold_iff_held check (
    (hold_deal_id is not null) = (status in ('Reserved', 'Booked'))
    and (hold_booking_id is not null) = (status in ('Reserved', 'Booked'))),
  constraint ck_sold_at_iff_sold check ((sold_at is not null) = (status = 'Sold')),
  constraint ck_measures_positive check (section >= 1 and rooms >= 0 and area > 0),
  constraint ck_instants_representable check (
    (reserved_until is null
     or (reserved_until >= '1900-01-01 00:00:00+00' and reserved_until < '9999-01-01 00:00:00+00'))
    and (booked_until is null
     or (booked_until >= '1900-01-01 00:00:00+00' and booked_until < '9999-01-01 00:00:00+00'))
    and (sold_at is null
     or (sold_at >= '1900-01-01 00:00:00+00' and sold_at < '9999-01-01 00:00:00+00')))
);
create index ix_property_objects_reserved_until on chessboard.property_object (reserved_until, id)
  where reserved_until is not null;
create index ix_property_objects_booked_until on chessboard.property_object (booked_until, id)
  where booked_until is not null;
create index ix_property_object_project
  on chessboard.property_object (project_id, building_id, floor, section, number);

create table chessboard.property_object_version (
  property_object_id uuid not null,
  version integer not null,
  tenant_id uuid not null,
  from_status text not null,
  to_status text not null,
  source text not null,
  reserved_until timestamptz,
  booked_until timestamptz,
  hold_deal_id uuid,
  hold_booking_id uuid,
  price_minor bigint not null,
  currency text not null,
  actor text,
  correlation_id text not null,
  changed_at timestamptz not null,
  primary key (property_object_id, version)
);
create view chessboard.property_object_history with (security_barrier) as
  select * from chessboard.property_object_version
  where tenant_id = nullif(current_setting('app.tenant', true), '')::uuid;

create table chessboard.hold_ledger (
  property_object_id uuid not null constraint fk_hold_ledger_property_object
    references chessboard.property_object (id),
  booking_id uuid not null,
  deal_id uuid not null,
  last_sequence bigint not null constraint ck_last_sequence_positive check (last_sequence >= 1),
  released boolean not null,
  primary key (property_object_id, booking_id)
);

create table chessboard.project_recalc_request (
  id bigint generated always as identity primary key,
  project_id uuid not null,
  requested_at timestamptz not null
);
create index ix_project_recalc_request_project on chessboard.project_recalc_request (project_id, requested_at);

create table chessboard.outbox (
  id bigint generated always as identity primary key,
  event_id uuid not null,
  aggregatetype text not null,
  aggregateid text not null,
  type text not null,
  payload bytea not null,
  headers jsonb not null,
  topic text not null,
  message_key text not null,
  lane smallint not null,
  tenant_id uuid,
  occurred_at timestamptz not null,
  created_at timestamptz not null default clock_timestamp(),
  run_id uuid,
  attempts integer not null default 0,
  parked_at timestamptz,
  xid xid8 not null default pg_current_xact_id()
);
create index ix_outbox_lane_id on chessboard.outbox (lane, id) where parked_at is null;

create table chessboard.audit_log (
  id bigint generated always as identity primary key,
  occurred_at timestamptz not null,
  actor text,
  action text not null,
  entity_type text not null,
  entity_id uuid not null,
  tenant_id uuid,
  correlation_id text not null,
  details jsonb not null
);
create index ix_audit_log_entity on chessboard.audit_log (entity_type, entity_id, id);

create table chessboard.job_poison (
  job text not null,
  id uuid not null,
  failures integer not null,
  last_error text not null,
  last_run_id uuid not null,
  first_failed_at timestamptz not null,
  last_failed_at timestamptz not null,
  primary key (job, id)
);
"""

_QUEUE_TABLES_VACUUM = """
alter table chessboard.outbox set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
                                   autovacuum_vacuum_cost_delay = 0);
alter table chessboard.project_recalc_request set (autovacuum_vacuum_scale_factor = 0,
                                                   autovacuum_vacuum_threshold = 5000)
"""

_GRANTS = """
grant usage on schema chessboard to chessboard_api, chessboard_system;
grant select, insert on chessboard.project, chessboard.building to chessboard_api, chessboard_system;
grant update (name, version, updated_at) on chessboard.project to chessboard_api;
grant update (property_objects_free_count, aggregates_as_of) on chessboard.project to chessboard_system;
grant update (sections, updated_at) on chessboard.building to chessboard_api;
grant select, insert on chessboard.property_object to chessboard_api, chessboard_system;
grant update (section, floor, rooms, area) on chessboard.property_object to chessboard_api;
grant update (price_minor, currency, status, reserved_until, booked_until, hold_deal_id, hold_booking_id, sold_at,
              status_source, status_changed_at, version, updated_at)
  on chessboard.property_object to chessboard_api, chessboard_system;
grant insert on chessboard.property_object_version to chessboard_api;
grant select, insert on chessboard.property_object_version to chessboard_system;
revoke update, delete, truncate on chessboard.property_object_version from chessboard_owner;
grant select, insert, update on chessboard.hold_ledger to chessboard_system;
grant insert (project_id, requested_at) on chessboard.project_recalc_request to chessboard_api;
grant select, insert, delete on chessboard.project_recalc_request to chessboard_system;
grant insert on chessboard.outbox to chessboard_api;
grant select, insert, update, delete on chessboard.outbox to chessboard_system;
grant insert on chessboard.audit_log to chessboard_api;
grant select, insert on chessboard.audit_log to chessboard_system;
revoke update, delete, truncate on chessboard.audit_log from chessboard_owner;
grant select, insert, update, delete on chessboard.job_poison to chessboard_system
"""

_HISTORY = "grant select on chessboard.property_object_history to chessboard_api"

_POLICIES = """
alter table chessboard.{table} enable row level security;
alter table chessboard.{table} force row level security;
create policy system_all on chessboard.{table} to chessboard_system using (true) with check (true);
create policy tenant_rows on chessboard.{table} to chessboard_api
  using (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid)
  with check (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid)
"""
_OF_TENANTS = ("project", "building", "property_object")
_CHASSIS = (outbox_parking, operations, idempotency, consumers)
_DROPPED = (
    "job_poison", "audit_log", "outbox", "project_recalc_request", "hold_ledger", "property_object_version",
    "property_object", "building", "project",
)  # fmt: skip


def upgrade() -> None:
    """Apply."""
    for script in (
        _TABLES,
        _QUEUE_TABLES_VACUUM,
        _GRANTS,
        _HISTORY,
        *(_POLICIES.format(table=table) for table in _OF_TENANTS),
    ):
        for statement in script.split(";"):
            if statement.strip():
                op.execute(statement)
    for part in _CHASSIS:
        for statement in part.upgrade("chessboard"):
            op.execute(statement)


def downgrade() -> None:
    """Revert: everything of the schema goes."""
    for part in reversed(_CHASSIS):
        for statement in part.downgrade("chessboard"):
            op.execute(statement)
    op.execute("drop view chessboard.property_object_history")
    for table in _DROPPED:
        op.execute(f"drop table chessboard.{table}")
