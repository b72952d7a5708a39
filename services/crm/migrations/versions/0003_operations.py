"""Operation of jobs, seals of the audit log."""

from alembic import op

from chassis.ddl import operations

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    for statement in operations.upgrade("crm"):
        op.execute(statement)


def downgrade() -> None:
    """Revert."""
    for statement in operations.downgrade("crm"):
        op.execute(statement)
