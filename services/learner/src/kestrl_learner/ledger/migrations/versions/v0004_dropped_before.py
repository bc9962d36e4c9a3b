"""The first step after each drop: a resume from before it attempts the scenario again. Earlier drops stay."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("work", sa.Column("dropped_before", sa.Integer))
    work = sa.table("work", sa.column("state", sa.String), sa.column("dropped_before", sa.Integer))
    op.execute(sa.update(work).where(work.c.state == "dropped").values(dropped_before=0))


def downgrade() -> None:
    op.drop_column("work", "dropped_before")
