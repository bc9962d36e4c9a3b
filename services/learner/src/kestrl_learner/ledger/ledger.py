"""Leases scenarios and records the outcome of each. Exactly-once is enforced here: every transition names the state it
leaves, and a scenario in another state is an error.

One learner owns a run. Opening the ledger takes the next fencing token (Kleppmann, "How to do distributed locking",
2016), and every transition is conditional on it: a replaced learner cannot change anything.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.resources import files
from typing import Any, NamedTuple

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, delete, event, func, insert, make_url, or_, select, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.schema import CreateSchema

from kestrl.errors import KestrlError, UserInputError, place_error
from kestrl_learner.ledger.schedule import epoch_order
from kestrl_learner.ledger.tables import owner, resumption, work


class LedgerError(KestrlError):
    """A transition that would train a scenario twice or lose it, or a failure of the ledger's database."""

    code = "ledger_conflict"


class Superseded(LedgerError):
    """Another learner has taken over the run; this one must not change or write anything of it."""

    code = "superseded"


CONNECT_SECONDS, STATEMENT_SECONDS = 10, 30
LONGEST_NAME = 63
"""Bytes of an identifier in PostgreSQL."""
END_OF_SCHEDULE = "end_of_schedule"
"""Reason of scenarios dropped because the last step did not need them. Undone when a longer schedule resumes the
run."""


class Lease(NamedTuple):
    """A scenario leased for one attempt."""

    position: int
    epoch: int
    ordinal: int
    attempt: int
    """Number of earlier leases; makes group ids unique."""
    failures: int = 0
    """Number of failed attempts."""

    def group_id(self, run: str) -> str:
        """The group id of the attempt."""
        return f"{run}/{self.epoch}-{self.ordinal}-{self.attempt}"


def _sqlite_durable(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.close()


def open_engine(url: str, *, run: str = "") -> Engine:
    """Connects and migrates the tables to the newest version.

    Args:
        url: SQLAlchemy address.
        run: Name of the run. In PostgreSQL its tables are in a schema of this name, so that runs can share a database.

    Raises:
        UserInputError: The database cannot be used.
    """
    try:
        engine = create_engine(url, **_options(url, _schema(url, run)))
        if engine.dialect.name == "sqlite":
            event.listen(engine, "connect", _sqlite_durable)
        config = Config()
        config.set_main_option("script_location", str(files("kestrl_learner.ledger") / "migrations").replace("%", "%%"))
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except ArgumentError as error:
        raise UserInputError(f"the ledger's database is not an address that SQLAlchemy knows: {error}") from error
    except SQLAlchemyError as error:
        raise UserInputError(f"the ledger's database {_shown(url)} cannot be used: {error}") from error
    return engine


def _schema(url: str, run: str) -> str:
    """Creates the run's schema in PostgreSQL; returns the connection option that selects it."""
    if not run or make_url(url).get_backend_name() != "postgresql":
        return ""
    # PostgreSQL truncates longer names silently, and two runs could share a schema.
    name = run if len(run.encode()) <= LONGEST_NAME else f"{run[:40]}-{sha256(run.encode()).hexdigest()[:12]}"
    engine = create_engine(url, **_options(url))
    try:
        with engine.begin() as connection:
            connection.execute(CreateSchema(name, if_not_exists=True))
        return f"-csearch_path={engine.dialect.identifier_preparer.quote(name)}"
    finally:
        engine.dispose()


def _options(url: str, settings: str = "") -> dict[str, Any]:
    if make_url(url).get_backend_name() != "postgresql":
        return {"connect_args": {"timeout": STATEMENT_SECONDS}}
    # A statement or connection that hangs becomes an error; a dropped connection is replaced.
    limits = f"-cstatement_timeout={STATEMENT_SECONDS * 1000} {settings}"
    return {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT_SECONDS, "options": limits}}


def _shown(url: str) -> str:
    """A database address without its password."""
    return make_url(url).render_as_string(hide_password=True)


class Ledger:
    """The ledger of one run. Opening it takes the run over from whichever learner owned it before.

    Args:
        url: SQLAlchemy address.
        seed: Seed of the order of each epoch.
        size: Scenarios of an epoch.
        epochs: Number of epochs.
        run: Name of the run; separates runs that share a database.

    Raises:
        UserInputError: The database cannot be used.
        LedgerError: The database refused.
    """

    def __init__(self, url: str, *, seed: int, size: int, epochs: int, run: str = "") -> None:
        self._engine = open_engine(url, run=run)
        self._token = 0
        self._take_ownership()
        self._seed, self._size, self._epochs = seed, size, epochs
        self._orders: dict[int, list[int]] = {}

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Generator[Connection]:
        """One transaction, committed at its end.

        Raises:
            PlaceError: The database's disk is full or cannot be written.
            LedgerError: The database refused.
        """
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            url = self._engine.url.render_as_string(hide_password=True)
            raise place_error(error, url) or LedgerError(f"{url}: {error}", code="ledger_failed") from error

    def _take_ownership(self) -> None:
        """Makes this process the run's owner. The row lock orders this against transitions of the earlier owner."""
        with self._transaction() as connection:
            name = f"process {os.getpid()} on {socket.gethostname()}"
            values = {"token": owner.c.token + 1, "name": name, "taken_at": time.time()}
            connection.execute(update(owner).values(**values))
            self._token = connection.execute(select(owner.c.token)).scalar_one()

    @contextmanager
    def _owned(self) -> Generator[Connection]:
        """A transaction of the run's owner, which locks the owner's row first.

        Raises:
            Superseded: Another learner owns the run.
            PlaceError, LedgerError: As `_transaction` does.
        """
        with self._transaction() as connection:
            # An UPDATE, not a SELECT, so that SQLite takes its lock too.
            mine = update(owner).where(owner.c.token == self._token).values(token=self._token)
            if connection.execute(mine).rowcount != 1:
                raise self._superseded(connection)
            yield connection

    def check_owner(self) -> None:
        """Checks that this process still owns the run.

        Raises:
            Superseded: Another learner owns it.
        """
        with self._transaction() as connection:
            if connection.execute(select(owner.c.token)).scalar_one() != self._token:
                raise self._superseded(connection)

    def _superseded(self, connection: Connection) -> Superseded:
        name, taken_at = connection.execute(select(owner.c.name, owner.c.taken_at)).one()
        return Superseded(
            f"another learner ({name}) took over this run {max(0.0, time.time() - taken_at):.0f} s ago; this one stops "
            "and writes nothing more of it"
        )

    @property
    def token(self) -> int:
        """The fencing token of this owner."""
        return self._token

    def outdated(self, step: int, token: int) -> bool:
        """Whether a checkpoint belongs to an abandoned branch: a later owner resumed from a step before it.

        Args:
            step: Step of the checkpoint.
            token: Fencing token of the owner that wrote it.
        """
        with self._transaction() as connection:
            query = select(resumption.c.token).where(resumption.c.token > token, resumption.c.step < step).limit(1)
            return connection.execute(query).first() is not None

    def _ordinal(self, position: int) -> int:
        epoch = position // self._size
        if epoch not in self._orders:
            self._orders = {epoch: epoch_order(self._seed, epoch, self._size)}
        return self._orders[epoch][position % self._size]

    def lease(self, policy_step: int) -> Lease | None:
        """Leases the first pending scenario, else the next new one; None when none is left."""
        with self._owned() as connection:
            pending = connection.execute(
                select(work.c.position, work.c.epoch, work.c.ordinal, work.c.attempt, work.c.failures)
                .where(work.c.state == "pending")
                .order_by(work.c.position)
                .limit(1)
            ).first()
            if pending is not None:
                lease = Lease(*pending)
                self._move(
                    connection, [lease.position], "pending", state="leased", policy_step=policy_step, reason=None
                )
                return lease
            highest = connection.execute(select(func.max(work.c.position))).scalar()
            position = 0 if highest is None else highest + 1
            if position >= self._size * self._epochs:
                return None
            lease = Lease(position, position // self._size, self._ordinal(position), 0)
            connection.execute(insert(work).values(**lease._asdict(), state="leased", policy_step=policy_step))
            return lease

    def _move(self, connection: Connection, positions: Sequence[int], leaves: str, **values: Any) -> None:
        """One conditional transition of rows: all or none."""
        changed = connection.execute(
            update(work).where(work.c.position.in_(positions), work.c.state == leaves).values(**values)
        ).rowcount
        if changed != len(positions):
            raise LedgerError(f"{len(positions) - changed} of the positions {list(positions)} are not {leaves}")

    def finish(self, lease: Lease) -> None:
        """Records that the group is complete and waits for its step."""
        with self._owned() as connection:
            self._move(connection, [lease.position], "leased", state="finished")

    def release(self, lease: Lease, reason: str, *, leaves: str = "leased", failed: bool = False) -> None:
        """Makes the scenario pending again; with `failed`, the attempt counts as failed."""
        values = {"attempt": lease.attempt + 1, "failures": lease.failures + failed, "reason": reason}
        with self._owned() as connection:
            self._move(connection, [lease.position], leaves, state="pending", **values)

    def drop(self, lease: Lease, reason: str, *, leaves: str = "leased") -> None:
        """Drops the scenario."""
        with self._owned() as connection:
            self._move(connection, [lease.position], leaves, state="dropped", reason=reason)

    def train(self, leases: Sequence[Lease], step: int) -> None:
        """Records that an optimiser step consumed the leases: all or none. What was dropped before it is stored with
        the step, and a resume from before it attempts that again.
        """
        with self._owned() as connection:
            self._move(connection, [lease.position for lease in leases], "finished", state="trained", step=step)
            dropped = update(work).where(work.c.state == "dropped", work.c.dropped_before.is_(None))
            connection.execute(dropped.values(dropped_before=step))

    def frontier(self) -> int:
        """The newest recorded optimiser step; 0 for none."""
        with self._transaction() as connection:
            return connection.execute(select(func.max(work.c.step))).scalar() or 0

    def rewind(self, step: int) -> int:
        """Resets the ledger to the step of a checkpoint; returns the number of scenarios that are pending again.

        These are scenarios in flight, those trained or dropped after the step, and those that a shorter schedule left
        over.

        Raises:
            LedgerError: The ledger does not have that step, so it does not match the checkpoint (code `ledger_behind`).
        """
        with self._owned() as connection:
            frontier = connection.execute(select(func.max(work.c.step))).scalar() or 0
            if frontier < step:
                raise LedgerError(f"the ledger ends with step {frontier}, before step {step}", code="ledger_behind")
            connection.execute(delete(resumption).where(resumption.c.token == self._token))
            connection.execute(insert(resumption).values(token=self._token, step=step))
            flying_update = update(work).where(work.c.state.in_(["leased", "finished"]))
            trained_update = update(work).where(work.c.state == "trained", work.c.step > step)
            since = or_(work.c.dropped_before.is_(None), work.c.dropped_before > step, work.c.reason == END_OF_SCHEDULE)
            dropped_update = update(work).where(work.c.state == "dropped", since)
            values: dict[str, Any] = {
                "state": "pending",
                "step": None,
                "dropped_before": None,
                "attempt": work.c.attempt + 1,
                "reason": "resumed",
            }
            return sum(
                connection.execute(statement.values(**values)).rowcount
                for statement in (flying_update, trained_update, dropped_update)
            )

    def drop_remaining(self) -> None:
        """Drops all scenarios that were not trained on, with a reason, at the end of the run."""
        with self._owned() as connection:
            connection.execute(
                update(work)
                .where(work.c.state.in_(["pending", "leased", "finished"]))
                .values(state="dropped", reason=END_OF_SCHEDULE)
            )
            highest = connection.execute(select(func.max(work.c.position))).scalar()
            positions = range(0 if highest is None else highest + 1, self._size * self._epochs)
            rows = [
                {
                    "position": position,
                    "epoch": position // self._size,
                    "ordinal": self._ordinal(position),
                    "state": "dropped",
                    "attempt": 0,
                    "failures": 0,
                    "reason": END_OF_SCHEDULE,
                }
                for position in positions
            ]
            if rows:
                connection.execute(insert(work), rows)

    def counts(self) -> dict[str, int]:
        """Scenarios by state."""
        with self._transaction() as connection:
            rows = connection.execute(select(work.c.state, func.count()).group_by(work.c.state)).all()
            return {str(state): int(count) for state, count in rows}

    def trained(self) -> list[tuple[int, int, int]]:
        """(epoch, ordinal, step) of all trained scenarios, by position."""
        with self._transaction() as connection:
            rows = connection.execute(
                select(work.c.epoch, work.c.ordinal, work.c.step)
                .where(work.c.state == "trained")
                .order_by(work.c.position)
            ).all()
            return [(int(epoch), int(ordinal), int(step)) for epoch, ordinal, step in rows]
