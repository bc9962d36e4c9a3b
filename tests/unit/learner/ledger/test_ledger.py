"""The ledger: exactly once, whatever happens in whatever order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from tests.fakes.postgres import serving_postgres

from kestrl.errors import UserInputError
from kestrl_learner.ledger import Lease, Ledger, LedgerError
from kestrl_learner.ledger.tables import metadata, work

SIZE, EPOCHS = 3, 2
names = count()
FOLDER = tempfile.TemporaryDirectory()


Place = tuple[str, str]
"""A database's address and the run whose ledger it holds."""


def open_ledger(place: Place, *, epochs: int = EPOCHS) -> Ledger:
    url, run = place
    return Ledger(url, seed=1, size=SIZE, epochs=epochs, run=run)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.db'}", ""
    return request.getfixturevalue("postgres"), f"a-run.{next(names)}"


class LedgerMachine(RuleBasedStateMachine):
    """The ledger against a dictionary of what every scenario has become."""

    url = ""
    """A server's; without it, each example has a file of its own."""

    @initialize()
    def begin(self) -> None:
        number = next(names)
        self.place = (self.url, f"machine-{number}") if self.url else (f"sqlite:///{FOLDER.name}/{number}.db", "")
        self.ledger = open_ledger(self.place)
        self.leased: dict[int, Lease] = {}
        self.finished: dict[int, Lease] = {}
        self.trained: dict[int, int] = {}
        self.dropped: dict[int, int] = {}
        """The first step after each drop."""
        self.step = 0
        self.group_ids: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.close()

    @rule()
    def lease(self) -> None:
        lease = self.ledger.lease(self.step)
        taken = {*self.leased, *self.finished, *self.trained, *self.dropped}
        free = [position for position in range(SIZE * EPOCHS) if position not in taken]
        if lease is None:
            assert not free
            return
        assert lease.position == free[0]
        assert lease.group_id("run") not in self.group_ids
        self.group_ids.add(lease.group_id("run"))
        self.leased[lease.position] = lease

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        position = data.draw(st.sampled_from(sorted(self.leased)))
        self.ledger.finish(self.leased[position])
        self.finished[position] = self.leased.pop(position)

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), failed=st.booleans())
    def give_back(self, data: Any, failed: bool) -> None:
        position = data.draw(st.sampled_from(sorted(self.leased)))
        lease = self.leased.pop(position)
        self.ledger.release(lease, "broken", failed=failed)
        again = self.ledger.lease(self.step)
        assert again is not None
        # The first pending one: this one, or one given back before it.
        self.leased[again.position] = again
        self.group_ids.add(again.group_id("run"))
        if again.position == position:
            assert again.failures == lease.failures + failed

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def drop(self, data: Any) -> None:
        position = data.draw(st.sampled_from(sorted(self.leased)))
        self.ledger.drop(self.leased.pop(position), "tool/tool_raised")
        self.dropped[position] = self.step + 1

    @precondition(lambda self: self.finished)
    @rule()
    def train(self) -> None:
        self.step += 1
        leases = list(self.finished.values())
        self.ledger.train(leases, self.step)
        self.trained |= dict.fromkeys(self.finished, self.step)
        self.finished.clear()
        with pytest.raises(LedgerError):
            self.ledger.train(leases[:1], self.step + 1)
        with pytest.raises(LedgerError):
            self.ledger.finish(leases[0])

    @rule(back=st.integers(0, 3))
    def crash_and_resume(self, back: int) -> None:
        self.ledger.close()
        self.ledger = open_ledger(self.place)
        self.step = max(0, self.step - back)
        self.ledger.rewind(self.step)
        self.leased.clear()
        self.finished.clear()
        self.trained = {position: step for position, step in self.trained.items() if step <= self.step}
        self.dropped = {position: step for position, step in self.dropped.items() if step <= self.step}

    @invariant()
    def the_books_add_up(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts()
        assert counts.get("leased", 0) == len(self.leased)
        assert counts.get("finished", 0) == len(self.finished)
        assert counts.get("trained", 0) == len(self.trained)
        assert counts.get("dropped", 0) == len(self.dropped)
        seen = self.ledger.trained()
        assert len({(epoch, ordinal) for epoch, ordinal, _ in seen}) == len(seen)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=12, stateful_step_count=20)


@pytest.mark.servers
def test_the_ledger_machine_on_postgresql(postgres: str) -> None:
    machine = type("OnPostgres", (LedgerMachine,), {"url": postgres})
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=20))


@pytest.fixture
def ledger(place: Place) -> Any:
    opened = open_ledger(place)
    yield opened
    opened.close()


def test_epochs_are_leased_one_after_another_each_in_its_own_order(ledger: Ledger) -> None:
    leases = [ledger.lease(0) for _ in range(SIZE * EPOCHS)]
    assert ledger.lease(0) is None
    assert [lease.epoch for lease in leases if lease] == [0, 0, 0, 1, 1, 1]
    assert sorted(lease.ordinal for lease in leases[:3] if lease) == [0, 1, 2]


def test_a_step_is_recorded_whole_or_not_at_all(ledger: Ledger) -> None:
    first, second = ledger.lease(0), ledger.lease(0)
    assert first is not None
    assert second is not None
    ledger.finish(first)
    with pytest.raises(LedgerError):
        ledger.train([first, second], 1)
    assert ledger.counts() == {"finished": 1, "leased": 1}


def test_left_over_scenarios_are_dropped_and_return_with_a_longer_schedule(place: Place) -> None:
    ledger = open_ledger(place, epochs=1)
    lease = ledger.lease(0)
    assert lease is not None
    ledger.finish(lease)
    ledger.train([lease], 1)
    ledger.drop_remaining()
    assert ledger.counts() == {"trained": 1, "dropped": 2}
    ledger.close()
    longer = open_ledger(place, epochs=2)
    longer.rewind(1)
    handed = [longer.lease(1) for _ in range(6)]
    assert [lease.position for lease in handed if lease] == [1, 2, 3, 4, 5]
    longer.close()


@pytest.mark.parametrize(
    "row",
    [
        {"state": "trained"},
        {"state": "dropped"},
        {"state": "lost"},
        {"state": "pending", "step": 3},
    ],
    ids=["trained in no step", "dropped for no reason", "an unknown state", "a step without being trained"],
)
def test_what_a_row_may_never_say_the_database_refuses(ledger: Ledger, row: dict[str, Any]) -> None:
    values = {"position": 9, "epoch": 3, "ordinal": 0, "attempt": 0, **row}
    with pytest.raises(IntegrityError), ledger._engine.begin() as connection:
        connection.execute(insert(work).values(**values))


def test_a_scenario_of_an_epoch_has_one_row(ledger: Ledger) -> None:
    lease = ledger.lease(0)
    assert lease is not None
    values = {"position": 9, "epoch": lease.epoch, "ordinal": lease.ordinal, "attempt": 0, "state": "pending"}
    with pytest.raises(IntegrityError), ledger._engine.begin() as connection:
        connection.execute(insert(work).values(**values))


def test_the_migrations_make_the_tables_that_the_code_speaks_of(ledger: Ledger) -> None:
    with ledger._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_what_an_older_version_dropped_stays_dropped(place: Place) -> None:
    ledger = open_ledger(place)
    lease = ledger.lease(0)
    assert lease is not None
    ledger.drop(lease, "tool/tool_raised")
    config = Config()
    config.set_main_option("script_location", str(files("kestrl_learner.ledger") / "migrations"))
    with ledger._engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0003")
    ledger.close()
    newer = open_ledger(place)
    newer.rewind(0)
    assert newer.counts() == {"dropped": 1}
    newer.close()


def test_a_database_that_cannot_be_opened_is_an_input_error() -> None:
    with pytest.raises(UserInputError, match="nowhere"):
        Ledger("sqlite:////nowhere/at/all/ledger.db", seed=1, size=1, epochs=1)


def test_an_unreachable_server_is_reported_without_the_password() -> None:
    with pytest.raises(UserInputError) as caught:
        Ledger("postgresql+psycopg://me:secret@127.0.0.1:9/x", seed=1, size=1, epochs=1)
    assert "postgresql+psycopg://me:***@127.0.0.1:9/x cannot be used" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_malformed_address_is_reported() -> None:
    with pytest.raises(UserInputError, match="not an address that SQLAlchemy knows"):
        Ledger("nowhere", seed=1, size=1, epochs=1)


@pytest.mark.servers
@pytest.mark.parametrize("name", ["shared", "a-name-longer-than-any-identifier-of-the-database-may-be-in-all-" * 2])
def test_runs_that_share_a_database_do_not_see_each_other(postgres: str, name: str) -> None:
    first, second = open_ledger((postgres, f"{name}-1")), open_ledger((postgres, f"{name}-2"))
    lease = first.lease(0)
    assert lease is not None
    first.finish(lease)
    assert second.counts() == {}
    assert second.lease(0) == lease
    first.close()
    second.close()
