"""Parked keys of the outbox."""

from alembic import op

from chassis.ddl import outbox_parking

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    for statement in outbox_parking.upgrade("crm"):
        op.execute(statement)


def downgrade() -> None:
    """Revert."""
    for statement in outbox_parking.downgrade("crm"):
        op.execute(statement)
