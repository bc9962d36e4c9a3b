"""A run of the example mails goes on where a release has renewed their rows, and no other run whose data changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.learner.conftest import make_settings

from kestrl._shared.plan.settings.common import DataSettings
from kestrl.data import load_scenarios
from kestrl.errors import UserInputError
from kestrl_email.data import provide
from kestrl_learner.run import LearnerRun
from kestrl_learner.store.records import identity_digest, identity_digest_of_edition_2

pytestmark = pytest.mark.usefixtures("quick")
ROWS = 6
SETTINGS: dict[str, Any] = {"rank": 16, "alpha": 32.0, "seed": 42, "max_tokens": 160}
ALGORITHM: dict[str, Any] = {
    "group_size": 4,
    "groups_per_step": 4,
    "learning_rate": 2e-3,
    "clip_high": 0.28,
    "horizon": 160,
}
RECORDED = "e7780bbb44652ccc5d9101e8eecedf51eb2c10cb880228c7dbb22de712b90549"
"""From a checkpoint that a learner of commit cf80a83 wrote on a cluster with these settings, which the operator of that
commit rendered from its quickstart with 400 rows and groups of four."""


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes each row of a file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_edition_2(row: dict[str, Any]) -> None:
    row["agent_name"] = "tool_agent"
    for tool in row["extra_info"]["tools_kwargs"].values():
        tool["create_kwargs"]["database"] = tool["create_kwargs"]["database"].replace("-v3.db", "-v2.db")


def ask_otherwise(row: dict[str, Any]) -> None:
    row["prompt"][-1]["content"] += " Answer in a word."


async def test_a_run_goes_on_with_the_renewed_rows_of_the_example(staged: Any, tmp_path: Path) -> None:
    newer = provide("train", ROWS, 42, tmp_path)
    older = tmp_path / "older.jsonl"
    older.write_bytes(newer.read_bytes())
    changed(older, as_edition_2)
    async with staged() as stage:
        await LearnerRun(stage.but(data=DataSettings(path=str(older)), max_steps=2)).main()
        await LearnerRun(stage.but(data=DataSettings(path=str(newer)), max_steps=4)).main()
        assert (stage.summary["status"], stage.summary["steps"]) == ("succeeded", 4)
        ordinals = [group.scenario.ordinal for step in range(4) for group in stage.groups(step + 1)]
        assert sorted(ordinals[:ROWS]) == list(range(ROWS)), "its first epoch takes each row once"


async def test_a_run_does_not_go_on_with_other_questions(staged: Any, tmp_path: Path) -> None:
    path = provide("train", ROWS, 42, tmp_path)
    async with staged() as stage:
        settings = stage.but(data=DataSettings(path=str(path)), max_steps=2)
        await LearnerRun(settings).main()
        changed(path, ask_otherwise)
        with pytest.raises(UserInputError, match="another model, algorithm or data"):
            await LearnerRun(settings).main()


def test_a_digest_of_an_earlier_release_is_recognised(tmp_path: Path) -> None:
    path = provide("train", 400, 42, tmp_path)
    path.write_text(path.read_text().replace(str(tmp_path), "/kestrl/data"))
    scenarios = load_scenarios(path, size=400)
    settings = make_settings(tmp_path, Path("/kestrl/model"), rollout_addresses=(), **SETTINGS)
    settings = settings.model_copy(update={"algorithm": settings.algorithm.model_copy(update=ALGORITHM)})
    assert identity_digest_of_edition_2(settings, scenarios) == RECORDED
    assert identity_digest(settings, scenarios) != RECORDED
