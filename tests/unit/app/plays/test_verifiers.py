"""`kestrl env check` plays task sets of verifiers and runs their own check (`make agents`)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.plays import playing
from kestrl._app.plays.playing import plays_of
from kestrl._app.plays.verdict import PlaysVerdict
from kestrl._shared.spec import parse_job
from kestrl._shared.spec.environments import Environment
from kestrl_rollout.hosts.inside.verifiers_host import digest

DATA = Path(__file__).parents[3] / "data"
REPORT = DATA / "reports" / "vf_validate"
ENVIRONMENTS = "KESTRL_CLIENT_ENVIRONMENTS"
PYTHON = os.path.abspath(os.path.join(os.environ.get(ENVIRONMENTS, ""), "verifiers/bin/python"))  # noqa: PTH100, PTH118
pytestmark = [
    pytest.mark.agents,
    # Imports of verifiers take seven seconds of CPU each: beside other work two of them took longer than three minutes.
    pytest.mark.timeout(900),
    pytest.mark.skipif(ENVIRONMENTS not in os.environ, reason=f"{ENVIRONMENTS} names no environments: make agents"),
]
SOUND = {"lamp": "", "chair": ""}
PLANTED = {"lamp": "", "table": "pays for nothing", "spoon": "changes", "fork": "unsolved", "knife": "reward raises"}
Check = Callable[..., PlaysVerdict]


def installed(_: Environment | None) -> str:
    """The interpreter of this test."""
    return PYTHON


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Plays `word_tasks` of given words, each with a trick."""
    monkeypatch.setattr(playing, "interpreter_of", installed)
    monkeypatch.setenv("WORD_TOKEN", "a credential, which the task set does not see")
    (tmp_path / "word_tasks").symlink_to(DATA / "word_tasks")

    def run(words: Mapping[str, str], reports: Sequence[Path] = ()) -> PlaysVerdict:
        tasks = [{"prompt": f"Say {word}.", "answer": word, "trick": trick} for word, trick in words.items()]
        rows = [{"id": task["answer"], "task": task, "digest": digest(task)} for task in tasks]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        settings = {"words": list(words), "tricks": list(words.values())}
        spec: dict[str, Any] = {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "rows.jsonl"}},
            "environment": {"verifiers": {"taskset": "word-tasks", "config": {"taskset": settings}}},
        }
        head = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"name": "words"}}
        job = parse_job({**head, "spec": spec})
        return plays_of(job, base=tmp_path, cache_dir=tmp_path, rows=len(rows), reports=reports)

    return run


async def test_a_sound_task_set_has_no_problem(check: Check) -> None:
    found = await asyncio.to_thread(check, SOUND)
    assert found.problems == []
    assert [each.split(":")[0] for each in found.warnings] == ["the solution stands in the prompt"]
    assert found.summary == "doing nothing earns 0, a wrong answer earns 0, the solution earns 1.25"


async def test_the_defects_of_tasks_are_found(check: Check) -> None:
    found = await asyncio.to_thread(check, PLANTED)
    for what, place in {
        "doing nothing earns as much as the solution: ": "rows.jsonl:2",
        "doing nothing earns as much as the solution (vf-validate): ": "task 1",
        "doing nothing earns another reward the second time: ": "rows.jsonl:3",
        "the solution of a task does not pass it (vf-validate): ": "task 3",
        "doing nothing has no reward: not_ok: ": "rows.jsonl:5",
    }.items():
        (problem,) = [each for each in found.problems if each.startswith(what)]
        assert problem.endswith((f": at {place}", f"/{place}")), problem
        assert not [each for each in ("rows.jsonl:1", "task 0") if each in problem], problem


async def test_a_reward_that_never_pays_is_a_warning_and_a_report_is_read(check: Check) -> None:
    found = await asyncio.to_thread(check, {"lamp": "never pays"}, [REPORT])
    assert [each for each in found.warnings if each.startswith("no form of the answers")], found
    assert found.problems == ["doing nothing earns as much as the solution (vf-validate): at task 0, task 1"]
