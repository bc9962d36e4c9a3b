"""Plays of an environment that runs its episodes itself, by a host of this process, and its vf-validate, by a stand-in.
The real ones are those of test_verifiers.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kestrl._app.plays.validation import validate_taskset
from kestrl._app.plays.verdict import PlaysVerdict
from kestrl._shared.checking import NOTHING, SOLUTION, TRYING, RunsCheck
from kestrl._shared.plan.settings.common import DataSettings
from kestrl._shared.plan.settings.rollout import OutsideEnvironment
from kestrl._shared.spec.environments import NAME
from kestrl.agents.runs import RunResult
from kestrl.errors import UserInputError
from kestrl_rollout import plays
from kestrl_rollout.hosts.host import RunEnded, RunRequest

ENVIRONMENT = OutsideEnvironment(
    name=NAME,
    taskset="words",
    python=sys.executable,
    config={"taskset": {"id": "words"}, "agent": {"runtime": {"type": "subprocess"}}},
    sessions=2,
    wait_seconds=5,
    start_seconds=30,
)
VALIDATE = """
import json, os, sys
from pathlib import Path
settings = json.loads(Path(sys.argv[2]).read_text())
if "WORD_TOKEN" in os.environ:
    sys.exit("it has a credential")
if settings["taskset"]["id"] == "none":
    sys.exit("no such task set")
folder = Path(settings["output_dir"]) / settings["run"]["dir"]
folder.mkdir()
for index in range(settings["select"]["limit"]):
    gold, noop = ({"reason": reason} for reason in ("valid", "invalid" if index else "valid"))
    with (folder / "results.jsonl").open("a") as file:
        print(json.dumps({"index": index, "mode": "all", "gold": gold, "noop": noop}), file=file)
"""
Scoring = Callable[[str, str], float]


class ScoringHost:
    """Runs episodes of one call, in this process."""

    field, name = "environment.verifiers", "words"

    def __init__(self, score: Scoring) -> None:
        self._score = score
        self.running = self.most_running = 0

    async def run(self, request: RunRequest) -> RunResult:
        task: Any = request.row["metadata"]["task"]
        if task.get("fails"):
            raise RunEnded("it fell", code="raised")
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        async with httpx2.AsyncClient(headers={"authorization": f"Bearer {request.key}"}) as client:
            asked = {"messages": [{"role": "user", "content": task["prompt"]}]}
            answer = await client.post(f"{request.base_url}/chat/completions", json=asked)
        self.running -= 1
        text = answer.json()["choices"][0]["message"]["content"]
        return RunResult(info={"rewards": {"right": self._score(text, task["answer"])}, "weights": {"right": 0.5}})


def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, score: Scoring, *tasks: dict[str, Any]
) -> tuple[dict[str, Any], ScoringHost]:
    """What the program of plays reports of tasks."""
    host = ScoringHost(score)

    @asynccontextmanager
    async def opened(*_: object) -> AsyncGenerator[ScoringHost]:
        yield host

    monkeypatch.setattr(plays, "opened_environment_host", opened)
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'id': str(index), 'task': task})}\n" for index, task in enumerate(tasks)))
    data = DataSettings(path=str(rows), size=None, promptless=True)
    settings = RunsCheck(environment=ENVIRONMENT, python_path=(str(tmp_path),), data=data, rows=8, seconds=30)
    return plays.check(settings), host


def earned(row: dict[str, Any]) -> dict[str, list[float]]:
    return {
        name: [play["environments"][NAME]["get_reward"]["right"] for play in several]
        for name, several in row["plays"].items()
    }


async def test_each_play_is_played_twice_and_the_answer_in_the_form_that_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def boxed(text: str, answer: str) -> float:
        return float(text == f"\\boxed{{{answer}}}")

    tasks = [{"prompt": f"Say {word}.", "answer": word} for word in ("lamp", "chair", "desk")]
    report, host = await asyncio.to_thread(check, tmp_path, monkeypatch, boxed, *tasks)
    assert [earned(row) for row in report["rows"]] == 3 * [{NOTHING: [0, 0], TRYING: [0, 0], SOLUTION: [1, 1]}]
    assert [(row["solution"], row["apart"]) for row in report["rows"]] == [
        (["lamp"], True),
        (["chair"], True),
        (["desk"], True),
    ]
    assert "Say lamp." in report["rows"][0]["plays"][NOTHING][0]["prompt"]
    assert report["unpaid"] is False
    assert host.most_running == ENVIRONMENT.sessions


async def test_a_reward_that_never_pays_is_noticed_and_no_solution_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = {"prompt": "Say lamp.", "answer": "lamp"}
    report, _ = await asyncio.to_thread(check, tmp_path, monkeypatch, lambda *_: 0.0, task)
    assert (report["unpaid"], list(report["rows"][0]["plays"])) == (True, [NOTHING, TRYING])


async def test_a_failed_play_is_no_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, _ = await asyncio.to_thread(check, tmp_path, monkeypatch, lambda *_: 1.0, {"fails": True})
    assert report["rows"][0]["plays"] == {NOTHING: 2 * [{"failure": "it fell"}], TRYING: 2 * [{"failure": "it fell"}]}
    assert report["unpaid"] is False


@pytest.fixture
def validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PlaysVerdict]:
    """Runs a stand-in for vf-validate."""
    package = tmp_path / "verifiers" / "v1" / "cli"
    package.mkdir(parents=True)
    (package / "validate.py").write_text(VALIDATE, encoding="utf-8")
    monkeypatch.setenv("WORD_TOKEN", "a credential, which the task set does not see")

    def run(taskset: str = "words") -> PlaysVerdict:
        config = {**ENVIRONMENT.config, "taskset": {"id": taskset}}
        return validate_taskset(ENVIRONMENT.model_copy(update={"config": config}), folder=tmp_path, tasks=2)

    return run


def test_the_findings_of_vf_validate_are_those_of_the_first_tasks(validate: Callable[..., PlaysVerdict]) -> None:
    assert validate().problems == ["doing nothing earns as much as the solution (vf-validate): at task 1"]


def test_a_vf_validate_that_cannot_check_is_an_error_of_its_field(validate: Callable[..., PlaysVerdict]) -> None:
    message = r"^spec\.environment\.verifiers: vf-validate cannot check .* \(exit code 1\); .*: no such task set$"
    with pytest.raises(UserInputError, match=message):
        validate("none")
