"""What operating a service needs in its schema: control and record of jobs, and the seals of the audit log.

Seals are append-only like the rows that they seal: no role may change one, the owner included. No role of the service
may choose an audit row's transaction id, which fixes its place in the chain.
"""

_TABLES = """
create table {schema}.job_control (
  name text primary key,
  paused_at timestamptz,
  paused_by text,
  pause_reason text,
  run_requested_at timestamptz,
  run_requested_by text,
  constraint ck_paused_by_somebody check ((paused_at is null) = (paused_by is null))
);
create table {schema}.job_run (
  id uuid primary key,
  name text not null,
  trigger text not null constraint ck_trigger_known check (trigger in ('schedule', 'manual', 'cli', 'misfire')),
  as_of timestamptz not null,
  started_at timestamptz not null,
  seen_at timestamptz not null,
  finished_at timestamptz,
  result text constraint ck_result_known check (result in ('ok', 'failed', 'stopped', 'abandoned')),
  counts jsonb not null,
  error text,
  process text not null,
  constraint ck_finished_with_result check ((finished_at is null) = (result is null))
);
create index ix_job_run_name_id on {schema}.job_run (name, id);
create index ix_job_run_unfinished on {schema}.job_run (name, seen_at) where finished_at is null;
alter table {schema}.audit_log add column xid xid8 not null default pg_current_xact_id();
create index ix_audit_log_xid_id on {schema}.audit_log (xid, id);
create table {schema}.audit_seal (
  sequence bigint primary key,
  audit_id bigint not null constraint uq_audit_seal_audit_id unique,
  previous_hash bytea not null,
  hash bytea not null,
  sealed_at timestamptz not null
)
"""

_GRANTS = """
grant select, insert, update on {schema}.job_control to {schema}_system;
grant select, insert, update, delete on {schema}.job_run to {schema}_system;
grant select, insert on {schema}.audit_seal to {schema}_system;
revoke update, delete, truncate on {schema}.audit_seal from {schema}_owner;
revoke insert on {schema}.audit_log from {schema}_api, {schema}_system;
grant insert (occurred_at, actor, action, entity_type, entity_id, tenant_id, correlation_id, details)
  on {schema}.audit_log to {schema}_api, {schema}_system
"""

_DOWN = """
drop table {schema}.audit_seal;
drop index {schema}.ix_audit_log_xid_id;
alter table {schema}.audit_log drop column xid;
revoke insert (occurred_at, actor, action, entity_type, entity_id, tenant_id, correlation_id, details)
  on {schema}.audit_log from {schema}_api, {schema}_system;
grant insert on {schema}.audit_log to {schema}_api, {schema}_system;
drop table {schema}.job_run;
drop table {schema}.job_control
"""


def upgrade(schema: str) -> list[str]:
    """Return the statements that make the tables; the audit log's sealed order begins with the rows that exist."""
    return _statements(_TABLES + ";" + _GRANTS, schema)


def downgrade(schema: str) -> list[str]:
    """Return the statements that take them away again."""
    return _statements(_DOWN, schema)


def _statements(script: str, schema: str) -> list[str]:
    return [statement.strip() for statement in script.format(schema=schema).split(";")]
