"""Adds a count of failed attempts: releases of stale groups and resumes are not failures of a scenario."""

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
