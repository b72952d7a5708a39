"""Bookings, their objects, claims and history, and partners' limits, with row level security.

A timer stands in the row exactly in the states that have it. A tenant sees its own rows, a partner its own among them.
"""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_STATES = (
    "'draft', 'quoted', 'pending_supplier', 'held', 'pending_payment', 'committing', 'partially_confirmed',"
    " 'confirmed', 'amendment_pending', 'ticketed', 'cancellation_pending', 'cancelled', 'failed', 'unknown'"
)
_TABLES = f"""
create table crm.booking (
  id uuid primary key,
  tenant_id uuid not null,
  deal_id uuid not null,
  partner_id uuid,
  state text not null constraint ck_state_known check (state in ({_STATES})),
  version integer not null,
  reserved_until timestamptz,
  booked_until timestamptz,
  quote_expires_at timestamptz,
  answer_due_at timestamptz,
  registration_asked_at timestamptz,
  price_minor bigint,
  amended_price_minor bigint,
  currency text,
  charged_minor bigint not null,
  reason text,
  came_from text constraint ck_came_from_known check (came_from is null or came_from in ({_STATES})),
  probes integer not null,
  created_at timestamptz not null,
  updated_at timestamptz not null,
  constraint uq_booking_id_tenant unique (id, tenant_id),
  constraint fk_booking_deal_tenant foreign key (deal_id, tenant_id) references crm.deal (id, tenant_id),
  constraint ck_quote_iff_quoted check ((quote_expires_at is not null) = (state = 'quoted')),
  constraint ck_reserved_until_iff_reserved check (state = 'unknown' or (reserved_until is not null) = (state in (
    'pending_supplier', 'held', 'pending_payment', 'committing', 'partially_confirmed', 'confirmed',
    'amendment_pending'))),
  constraint ck_booked_until_iff_booked check (state = 'unknown' or (booked_until is not null) = (state in (
    'committing', 'partially_confirmed', 'confirmed', 'amendment_pending'))),
  constraint ck_answer_due_iff_waiting check ((answer_due_at is not null) = (state in (
    'pending_supplier', 'committing', 'partially_confirmed', 'cancellation_pending', 'unknown'))),
  constraint ck_came_from_iff_unknown check ((came_from is not null) = (state = 'unknown')),
  constraint ck_price_has_currency check ((price_minor is null) = (currency is null) and price_minor >= 0
    and amended_price_minor >= 0 and charged_minor >= 0)
);
create index ix_booking_tenant_id on crm.booking (tenant_id, id);
create index ix_booking_deal on crm.booking (deal_id, id);
create index ix_booking_reserved on crm.booking (reserved_until, id) where state in ('held', 'pending_payment');
create index ix_booking_booked on crm.booking (booked_until, id) where state in ('confirmed', 'amendment_pending');
create index ix_booking_answer_due on crm.booking (answer_due_at, id) where answer_due_at is not null;
create index ix_booking_quoted on crm.booking (quote_expires_at, id) where state = 'quoted';

create table crm.object_claim (
  tenant_id uuid not null,
  property_object_id uuid not null,
  booking_id uuid,
  sequence bigint not null,
  primary key (tenant_id, property_object_id),
  constraint fk_claim_booking_tenant foreign key (booking_id, tenant_id) references crm.booking (id, tenant_id)
);

create table crm.booking_object (
  booking_id uuid not null,
  property_object_id uuid not null,
  tenant_id uuid not null,
  position integer not null,
  sequence bigint,
  asked text constraint ck_asked_known check (asked is null or asked in ('hold', 'commit', 'release', 'sell')),
  outcome text constraint ck_outcome_known
    check (outcome is null or outcome in ('held', 'booked', 'sold', 'released', 'rejected')),
  reason text,
  object_version bigint,
  primary key (booking_id, property_object_id),
  constraint fk_booking_object_booking_tenant foreign key (booking_id, tenant_id)
    references crm.booking (id, tenant_id),
  constraint fk_booking_object_claim foreign key (tenant_id, property_object_id)
    references crm.object_claim (tenant_id, property_object_id),
  constraint uq_booking_object_position unique (booking_id, position),
  constraint ck_sequence_iff_asked check ((sequence is not null) = (asked is not null)),
  constraint ck_outcome_of_asked check (outcome is null or asked is not null)
);
create index ix_booking_object_object on crm.booking_object (property_object_id, booking_id);

create table crm.booking_history (
  booking_id uuid not null,
  version integer not null,
  tenant_id uuid not null,
  from_state text not null,
  to_state text not null,
  reason text,
  actor text,
  changed_at timestamptz not null,
  primary key (booking_id, version),
  constraint fk_booking_history_booking_tenant foreign key (booking_id, tenant_id)
    references crm.booking (id, tenant_id)
);

create table crm.partner_limit (
  tenant_id uuid not null,
  partner_id uuid not null,
  currency text not null,
  limit_minor bigint not null,
  used_minor bigint not null,
  primary key (tenant_id, partner_id),
  constraint ck_limit_not_negative check (limit_minor >= 0 and used_minor >= 0)
);
"""

_GRANTS = """
grant select, insert on crm.booking to crm_api, crm_system;
grant update (state, version, reserved_until, booked_until, quote_expires_at, answer_due_at, registration_asked_at,
  price_minor, amended_price_minor, currency, charged_minor, reason, came_from, probes, updated_at)
  on crm.booking to crm_api, crm_system;
grant select, insert on crm.object_claim to crm_api, crm_system;
grant update (booking_id, sequence) on crm.object_claim to crm_api, crm_system;
grant select, insert on crm.booking_object to crm_api, crm_system;
grant update (sequence, asked, outcome, reason, object_version) on crm.booking_object to crm_api, crm_system;
grant select, insert on crm.booking_history to crm_api, crm_system;
grant select, insert on crm.partner_limit to crm_api, crm_system;
grant update (currency, limit_minor, used_minor) on crm.partner_limit to crm_api, crm_system;
"""

_TENANT = "tenant_id = nullif(current_setting('app.tenant', true), '')::uuid"
_PARTNER = (
    "(nullif(current_setting('app.partner', true), '') is null"
    " or partner_id = nullif(current_setting('app.partner', true), '')::uuid)"
)
_MINE: dict[str, str] = {
    "booking": f"{_TENANT} and {_PARTNER}",
    "object_claim": _TENANT,
    "booking_object": f"{_TENANT} and exists (select from crm.booking b where b.id = booking_id)",
    "booking_history": f"{_TENANT} and exists (select from crm.booking b where b.id = booking_id)",
    "partner_limit": f"{_TENANT} and {_PARTNER}",
}
"""Which rows a caller of the API sees and writes."""


def upgrade() -> None:
    """Apply."""
    for script in (_TABLES, _GRANTS):
        for statement in script.split(";"):
            if statement.strip():
                op.execute(statement)
    for table, mine in _MINE.items():
        op.execute(f"alter table crm.{table} enable row level security")
        op.execute(f"alter table crm.{table} force row level security")
        op.execute(f"create policy system_all on crm.{table} to crm_system using (true) with check (true)")
        op.execute(f"create policy callers_rows on crm.{table} to crm_api using ({mine}) with check ({mine})")


def downgrade() -> None:
    """Revert."""
    for table in ("partner_limit", "booking_history", "booking_object", "object_claim", "booking"):
        op.execute(f"drop table crm.{table}")
