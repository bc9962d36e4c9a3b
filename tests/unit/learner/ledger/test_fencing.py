"""Two learners of one run: the newer one owns it, and the older one can neither train, nor write, nor report
success."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.postgres import serving_postgres
from tests.unit.learner.fakes import until
from tests.unit.learner.ledger.learner_process import EPOCHS, GROUPS, SIZE, open_ledger

from kestrl.storage import open_store
from kestrl_learner.ledger import Ledger, Superseded
from kestrl_learner.run import LearnerRun
from kestrl_learner.store import checkpoint
from kestrl_learner.store.run_record import RunRecord

Place = tuple[str, str]
names = count()


@contextmanager
def learner_process() -> Generator[subprocess.Popen[str]]:
    """A process that takes the place of learners."""
    program = Path(__file__).with_name("learner_process.py")
    with subprocess.Popen(
        [sys.executable, program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def order(process: subprocess.Popen[str], *arguments: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(arguments) + "\n")


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return str(json.loads(process.stdout.readline()))


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving_postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgres", marks=pytest.mark.servers)])
def test_in_50_takeovers_at_random_moments_every_step_is_trained_once(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server = request.getfixturevalue("postgres") if database == "postgres" else ""
    chance = random.Random(20)
    with learner_process() as older, learner_process() as newer:
        for trial in range(25):
            place = (server, f"fencing-{next(names)}") if server else (f"sqlite:///{tmp_path}/{trial}.db", "")
            open_ledger(*place).close()  # the tables
            order(older, *place, str(tmp_path / str(trial)), 0.004)
            time.sleep(chance.uniform(0, 0.12))
            order(newer, *place, str(tmp_path / str(trial)), 0.001)
            ended = {answer(newer), answer(older)}  # the one that opened the ledger last is the newer
            assert "done" in ended
            assert all("took over this run" in how for how in ended - {"done"})
            check_accounts(place)


def check_accounts(place: Place) -> None:
    """Every scenario was trained once, and every step has its number of groups."""
    ledger = open_ledger(*place)
    trained = ledger.trained()
    ledger.close()
    assert sorted((epoch, ordinal) for epoch, ordinal, _ in trained) == [
        (epoch, ordinal) for epoch in range(EPOCHS) for ordinal in range(SIZE)
    ]
    assert Counter(step for *_, step in trained) == dict.fromkeys(range(1, SIZE * EPOCHS // GROUPS + 1), GROUPS)


def test_no_transition_is_left_to_a_learner_that_was_replaced(tmp_path: Path) -> None:
    place = (f"sqlite:///{tmp_path / 'ledger.db'}", "")
    older = open_ledger(*place)
    older.rewind(0)
    lease, other = older.lease(0), older.lease(0)
    assert lease is not None
    assert other is not None
    older.finish(other)
    newer = open_ledger(*place)
    for transition in (
        lambda: older.lease(0),
        lambda: older.finish(lease),
        lambda: older.release(lease, "broken"),
        lambda: older.drop(lease, "tool/tool_raised"),
        lambda: older.train([other], 1),
        lambda: older.rewind(0),
        older.drop_remaining,
        older.check_owner,
    ):
        with pytest.raises(Superseded, match=r"another learner .* took over this run"):
            transition()
    assert newer.counts() == {"leased": 1, "finished": 1}
    newer.check_owner()


def test_a_checkpoint_of_a_branch_that_was_given_up_is_skipped(tmp_path: Path) -> None:
    place, store = (f"sqlite:///{tmp_path / 'ledger.db'}", ""), open_store(str(tmp_path / "run"))
    older = open_ledger(*place)
    older.rewind(0)
    for step in (1, 2):
        lease = older.lease(0)
        assert lease is not None
        older.finish(lease)
        older.train([lease], step)
        checkpoint.write(store, checkpoint.Checkpoint(step, b"old", RunRecord(owner=older.token)), keep=9)
    newer = open_ledger(*place)
    newer.rewind(1)  # it read the first checkpoint, and the older one wrote the second meanwhile
    third = open_ledger(*place)
    known = checkpoint.newest(store, outdated=lambda made: third.outdated(made.step, made.record.owner))
    assert known is not None
    assert known.step == 1


async def test_a_replaced_learner_ends_and_writes_no_summary_or_checkpoint(staged: Any) -> None:
    async with staged() as stage:
        run = LearnerRun(stage.but(max_steps=6, checkpoint_every=1))
        main = asyncio.create_task(run.main())
        await until(lambda: run.progress.state.steps.done >= 1 or main.done())
        newer = Ledger(stage.settings.database, seed=1, size=1, epochs=1, run=stage.settings.run)
        frontier = newer.frontier()
        with pytest.raises(Superseded, match="took over this run"):
            await main
        assert run.progress.state.activity.failure is not None
        assert (run.progress.state.activity.phase, run.progress.state.activity.failure.code) == ("failed", "superseded")
        store = open_store(stage.settings.storage)
        assert not store.exists("summary.json")
        known = checkpoint.newest_manifest(store)
        assert known is None or (known.step <= frontier and known.record.owner < newer.token)
        assert newer.frontier() == frontier
        newer.close()
