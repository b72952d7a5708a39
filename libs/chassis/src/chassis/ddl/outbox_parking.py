"""Parked keys of the outbox and the indexes by which their rows are found; frozen with the revision that calls it."""


def upgrade(schema: str) -> list[str]:
    """Return the statements that add them to a schema that has an outbox."""
    return [
        f"""
        create table {schema}.outbox_parked_key (
          message_key text primary key,
          topic text not null,
          parked_at timestamptz not null,
          reason text not null,
          next_attempt_at timestamptz
        )
        """,
        f"""
        create index ix_outbox_parked_key_next_attempt on {schema}.outbox_parked_key (next_attempt_at)
        where next_attempt_at is not null
        """,
        f"create index ix_outbox_parked_lane_id on {schema}.outbox (lane, id) where parked_at is not null",
        f"create index ix_outbox_parked_key_id on {schema}.outbox (message_key, id) where parked_at is not null",
        f"grant select, insert, update, delete on {schema}.outbox_parked_key to {schema}_system",
    ]


def downgrade(schema: str) -> list[str]:
    """Return the statements that take them away."""
    return [
        f"drop index {schema}.ix_outbox_parked_key_id",
        f"drop index {schema}.ix_outbox_parked_lane_id",
        f"drop table {schema}.outbox_parked_key",
    ]
