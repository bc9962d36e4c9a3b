"""The tables, for SQLite and PostgreSQL alike."""

from __future__ import annotations

from sqlalchemy import CheckConstraint, Column, Float, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()
STATES = ("pending", "leased", "finished", "trained", "dropped")

work = Table(
    "work",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=False, doc="epoch x size + place in the epoch's order"),
    Column("epoch", Integer, nullable=False),
    Column("ordinal", Integer, nullable=False),
    Column("state", String(16), nullable=False),
    Column("attempt", Integer, nullable=False, default=0, doc="times it was handed out and came back"),
    Column("failures", Integer, nullable=False, default=0, server_default="0", doc="of these, because it failed"),
    Column("policy_step", Integer, doc="version it was leased under"),
    Column("step", Integer, doc="optimiser step that trained on it"),
    Column("dropped_before", Integer, doc="the first optimiser step after it was dropped, which is stored with it"),
    Column("reason", Text, doc="why it was dropped, or why it went back to pending"),
    CheckConstraint(f"state IN {STATES}", name="work_state"),
    CheckConstraint("(state = 'trained') = (step IS NOT NULL)", name="work_trained_has_step"),
    CheckConstraint("state <> 'dropped' OR reason IS NOT NULL", name="work_dropped_has_reason"),
    Index("work_epoch_ordinal", "epoch", "ordinal", unique=True),
    Index("work_by_state", "state", "position"),
)

owner = Table(
    "owner",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False, doc="1: there is one row"),
    Column("token", Integer, nullable=False, doc="fencing token of the learner that owns the run"),
    Column("name", Text, nullable=False, doc="of that learner, for people"),
    Column("taken_at", Float, nullable=False, doc="seconds since 1970"),
    CheckConstraint("id = 1", name="owner_is_one"),
)

resumption = Table(
    "resumption",
    metadata,
    Column("token", Integer, primary_key=True, autoincrement=False, doc="of the learner that resumed"),
    Column("step", Integer, nullable=False, doc="the newest step it resumed from"),
)
