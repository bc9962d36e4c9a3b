"""Failed attempts apart from attempts: being evicted or resumed is no failure of a scenario's."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("work", sa.Column("failures", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("work", "failures")
