"""Deals, their timeline, outbox, audit log and poison rows, with row level security and column grants.

The grants carry invariants: no role of the service can change a step's content (INV-TLE-1) or, its owner included, an
audit row, and only the system role can make a step Overdue (INV-TLE-4).
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = """
create table crm.deal (
  id uuid primary key,
  tenant_id uuid not null,
  title text not null,
  status text not null constraint ck_status_known check (status in ('Active', 'Completed', 'Cancelled')),
  version integer not null,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  constraint uq_deal_id_tenant unique (id, tenant_id)
);
create index ix_deal_tenant_id on crm.deal (tenant_id, id);

create table crm.deal_timeline_event (
  id uuid primary key,
  deal_id uuid not null,
  tenant_id uuid not null,
  type text not null constraint ck_type_known check (type in (
    'DocumentRequested', 'DocumentUploaded', 'PaymentRequested', 'PaymentReceived', 'SigningRequested', 'Signed',
    'InspectionScheduled', 'InspectionCompleted', 'RegistrationSubmitted', 'RegistrationCompleted')),
  status text not null constraint ck_status_known check (status in ('InProgress', 'Overdue', 'Done')),
  occurred_at timestamptz not null,
  due_at timestamptz,
  payload jsonb not null,
  actor_user_id text,
  actor_role text,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  completed_at timestamptz,
  constraint fk_step_deal_tenant foreign key (deal_id, tenant_id) references crm.deal (id, tenant_id),
  constraint ck_completed_iff_done check ((completed_at is not null) = (status = 'Done')),
  constraint ck_overdue_has_due check (status <> 'Overdue' or due_at is not null),
  constraint ck_instants_representable check (
    occurred_at >= '1900-01-01 00:00:00+00' and occurred_at < '9999-01-01 00:00:00+00'
    and (due_at is null or (due_at >= '1900-01-01 00:00:00+00' and due_at < '9999-01-01 00:00:00+00')))
);
create index ix_deal_timeline_event_in_progress on crm.deal_timeline_event (due_at, id) where status = 'InProgress';
create index ix_deal_timeline_event_deal on crm.deal_timeline_event (deal_id, occurred_at, id);

create table crm.outbox (
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
create index ix_outbox_lane_id on crm.outbox (lane, id) where parked_at is null;

create table crm.audit_log (
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
create index ix_audit_log_entity on crm.audit_log (entity_type, entity_id, id);

create table crm.job_poison (
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

_QUEUE_TABLE_VACUUM = """
alter table crm.outbox set (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
                            autovacuum_vacuum_cost_delay = 0)
"""

_GRANTS = """
grant usage on schema crm to crm_api, crm_system;
grant select, insert on crm.deal to crm_api, crm_system;
grant update (title, status, version, updated_at) on crm.deal to crm_api, crm_system;
grant select, insert on crm.deal_timeline_event to crm_api, crm_system;
grant update (status, updated_at, completed_at) on crm.deal_timeline_event to crm_api, crm_system;
grant insert on crm.outbox to crm_api;
grant select, insert, update, delete on crm.outbox to crm_system;
grant insert on crm.audit_log to crm_api;
grant select, insert on crm.audit_log to crm_system;
revoke update, delete, truncate on crm.audit_log from crm_owner;
grant select, insert, update, delete on crm.job_poison to crm_system;
"""

_POLICIES = """
alter table crm.deal enable row level security;
alter table crm.deal force row level security;
create policy system_all on crm.deal to crm_system using (true) with check (true);
create policy tenant_rows on crm.deal to crm_api
  using (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid)
  with check (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid);

alter table crm.deal_timeline_event enable row level security;
alter table crm.deal_timeline_event force row level security;
create policy system_all on crm.deal_timeline_event to crm_system using (true) with check (true);
create policy tenant_sees on crm.deal_timeline_event for select to crm_api
  using (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid);
create policy tenant_adds on crm.deal_timeline_event for insert to crm_api
  with check (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid and status <> 'Overdue');
create policy tenant_closes on crm.deal_timeline_event for update to crm_api
  using (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid and status <> 'Done')
  with check (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid and status = 'Done');
"""


def upgrade() -> None:
    """Apply."""
    for script in (_TABLES, _QUEUE_TABLE_VACUUM, _GRANTS, _POLICIES):
        for statement in script.split(";"):
            if statement.strip():
                op.execute(statement)


def downgrade() -> None:
    """Revert: everything of the schema goes."""
    for table in ("job_poison", "audit_log", "outbox", "deal_timeline_event", "deal"):
        op.execute(f"drop table crm.{table}")
