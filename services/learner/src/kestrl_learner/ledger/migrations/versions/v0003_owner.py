"""The learner that owns the run, and the step that each owner resumed from."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    owner = op.create_table(
        "owner",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("token", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("taken_at", sa.Float, nullable=False),
        sa.CheckConstraint("id = 1", name="owner_is_one"),
    )
    op.bulk_insert(owner, [{"id": 1, "token": 0, "name": "", "taken_at": 0.0}])
    op.create_table(
        "resumption",
        sa.Column("token", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("step", sa.Integer, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("resumption")
    op.drop_table("owner")
