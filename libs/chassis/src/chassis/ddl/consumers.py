"""Inbox, dead letters and parked keys (first form). Workers and the people on call reach them, tenants' roles don't."""

_TABLES = """
create table {schema}.inbox (
  consumer text not null,
  event_id uuid not null,
  replay_id uuid not null default '00000000-0000-0000-0000-000000000000',
  received_at timestamptz not null,
  primary key (consumer, event_id, replay_id)
);
create index ix_inbox_received_at on {schema}.inbox (received_at);

create table {schema}.dead_letter (
  id uuid primary key,
  position bigint generated always as identity,
  consumer text not null,
  topic text not null,
  partition integer not null,
  record_offset bigint not null,
  recorded_at timestamptz not null,
  parking_key bytea not null,
  message_key bytea,
  value bytea,
  headers jsonb not null,
  event_id uuid,
  type text,
  error_class text not null,
  error_code text not null,
  error text not null constraint ck_dead_letter_error_short check (length(error) <= 1000),
  attempts integer not null,
  first_failed_at timestamptz not null,
  last_failed_at timestamptz not null,
  disposition text not null
    constraint ck_disposition_known check (disposition in ('quarantine', 'refused', 'exhausted', 'parked')),
  retry_requested_at timestamptz,
  resolved_at timestamptz,
  resolution text constraint ck_resolution_known check (resolution in ('handled', 'duplicate', 'discarded')),
  constraint uq_dead_letter_record unique (consumer, topic, partition, record_offset, recorded_at),
  constraint ck_resolved_how check ((resolved_at is null) = (resolution is null))
);
create index ix_dead_letter_parked on {schema}.dead_letter (consumer, parking_key, position)
  where resolved_at is null and disposition in ('exhausted', 'parked');
create index ix_dead_letter_open on {schema}.dead_letter (id) where resolved_at is null;
create index ix_dead_letter_event on {schema}.dead_letter (consumer, event_id) where resolved_at is null;
create index ix_dead_letter_retry on {schema}.dead_letter (consumer, position)
  where resolved_at is null and retry_requested_at is not null;
create index ix_dead_letter_resolved_at on {schema}.dead_letter (resolved_at) where resolved_at is not null;

create table {schema}.parked_key (
  consumer text not null,
  parking_key bytea not null,
  parked_at timestamptz not null,
  attempts integer not null,
  next_attempt_at timestamptz not null,
  primary key (consumer, parking_key)
);
create index ix_parked_key_due on {schema}.parked_key (consumer, next_attempt_at)
"""

_GRANTS = """
grant select, insert, delete on {schema}.inbox to {schema}_system;
grant select, insert, update, delete on {schema}.dead_letter to {schema}_system;
grant select, insert, update, delete on {schema}.parked_key to {schema}_system
"""


def upgrade(schema: str) -> list[str]:
    """Return the statements that make the tables in a service's schema."""
    return [statement.strip() for statement in (_TABLES + ";" + _GRANTS).format(schema=schema).split(";")]


def downgrade(schema: str) -> list[str]:
    """Return the statements that drop them."""
    return [f"drop table {schema}.{table}" for table in ("parked_key", "dead_letter", "inbox")]
