"""Alembic's entry: runs the migrations on the connection passed by `open_engine`."""

from __future__ import annotations

from alembic import context

from kestrl_learner.ledger.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
