"""The table of work."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "work",
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("ordinal", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("policy_step", sa.Integer),
        sa.Column("step", sa.Integer),
        sa.Column("reason", sa.Text),
        sa.CheckConstraint("state IN ('pending', 'leased', 'finished', 'trained', 'dropped')", name="work_state"),
        sa.CheckConstraint("(state = 'trained') = (step IS NOT NULL)", name="work_trained_has_step"),
        sa.CheckConstraint("state <> 'dropped' OR reason IS NOT NULL", name="work_dropped_has_reason"),
    )
    op.create_index("work_epoch_ordinal", "work", ["epoch", "ordinal"], unique=True)
    op.create_index("work_by_state", "work", ["state", "position"])


def downgrade() -> None:
    op.drop_table("work")
