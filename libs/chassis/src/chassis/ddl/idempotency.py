"""The table of stored answers, as migrations make it; never changed once released: a new revision gets a new module.

A row is seen by the tenant and the subject that sent the key, and by the service's own jobs.
"""

from typing import Final

_UPGRADE: Final = """
create table {schema}.idempotency_key (
  tenant_id uuid not null,
  subject text not null,
  operation text not null,
  key text not null,
  fingerprint bytea not null,
  created_at timestamptz not null,
  status smallint,
  headers jsonb,
  body bytea,
  primary key (tenant_id, subject, operation, key)
);
create index ix_idempotency_key_created_at on {schema}.idempotency_key (created_at);
grant select, insert, delete on {schema}.idempotency_key to {schema}_api, {schema}_system;
grant update (status, headers, body) on {schema}.idempotency_key to {schema}_api, {schema}_system;
alter table {schema}.idempotency_key enable row level security;
alter table {schema}.idempotency_key force row level security;
create policy system_all on {schema}.idempotency_key to {schema}_system using (true) with check (true);
create policy own_keys on {schema}.idempotency_key to {schema}_api
  using (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid
         and subject = current_setting('app.user', true))
  with check (tenant_id = nullif(current_setting('app.tenant', true), '')::uuid
              and subject = current_setting('app.user', true))
"""


def upgrade(schema: str) -> list[str]:
    """Return the statements that make the table, its grants and its policies."""
    return [statement.strip() for statement in _UPGRADE.format(schema=schema).split(";")]


def downgrade(schema: str) -> list[str]:
    """Return the statements that take it away."""
    return [f"drop table {schema}.idempotency_key"]
