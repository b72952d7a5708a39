"""Inbox, dead letters, parked keys."""

from alembic import op

from chassis.ddl import consumers

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    for statement in consumers.upgrade("crm"):
        op.execute(statement)


def downgrade() -> None:
    """Revert."""
    for statement in consumers.downgrade("crm"):
        op.execute(statement)
