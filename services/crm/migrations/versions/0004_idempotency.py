"""Stored answers of Idempotency-Key."""

from alembic import op

from chassis.ddl import idempotency

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    for statement in idempotency.upgrade("crm"):
        op.execute(statement)


def downgrade() -> None:
    """Revert."""
    for statement in idempotency.downgrade("crm"):
        op.execute(statement)
