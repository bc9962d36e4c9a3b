"""`kestrl compare`: two stored evaluations, the questions that flipped, and what cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.comparison.stored import EvaluationName
from kestrl.episode import Episode, Group, Purpose, Scenario, StopReason
from kestrl.errors import Boundary, Failure, UserInputError
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, GroupOutcome, ObjectEpisodeStore, StoredGroup
from kestrl.testing.attempts import make_attempt

FAILED = Failure(boundary=Boundary.TOOL, code="tool_raised", message="it raised")


def compare(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def attempt(group: str, reward: float | None, correct: float | None) -> Episode:
    failure = FAILED if reward is None else None
    metrics = {} if correct is None else {"answer_correct": correct}
    return replace(
        make_attempt("two").episode, id=f"{group}/0", group_id=group, reward=reward, metrics=metrics, failure=failure,
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip


def evaluated(
    ordinal: int, step: int, reward: float | None, correct: float | None, text: str = "How many"
) -> StoredGroup:
    messages = [{"role": "user", "content": f"{text} {ordinal}?\x1b[31m"}]
    scenario = Scenario(id=f"q{ordinal}", ordinal=ordinal, messages=messages, ground_truth="two")
    name = f"eval-{step}-{ordinal}"
    group = Group(id=name, scenario=scenario, episodes=[attempt(name, reward, correct)])
    return StoredGroup(group=group, outcome=GroupOutcome.EVALUATED)


def write_run(folder: Path, steps: dict[int, Sequence[StoredGroup]], **spec: Any) -> None:
    folder.mkdir(parents=True)
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "job"},
        "spec": {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "train.jsonl"}},
            "rewards": [{"rule": "exact_answer"}],
            **spec,
        },
    }
    (folder / "job.json").write_text(json.dumps(document))
    episodes = ObjectEpisodeStore(open_store(str(folder)), folder.name)
    for step, groups in steps.items():
        episodes.append(EpisodeBatch(purpose=Purpose.EVALUATION, step=step, stored=groups))


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of two runs: one evaluated at the steps 0, 4 and 8, the other at step 4, with another agent."""
    before = [evaluated(0, 0, 1.0, 1.0), evaluated(1, 0, -1.0, 0.0), evaluated(2, 0, 0.5, 1.0)]
    middle = [evaluated(0, 4, 1.0, 1.0), evaluated(1, 4, 1.0, 1.0), evaluated(2, 4, None, None)]
    after = [evaluated(0, 8, -1.0, 0.0), evaluated(1, 8, 1.0, 1.0), evaluated(2, 8, 0.75, 1.0)]
    write_run(tmp_path / "runs" / "job-1", {0: before, 4: middle, 8: after})
    write_run(tmp_path / "runs" / "job-2", {4: middle}, agent={"maxTurns": 3})
    return tmp_path / "runs"


def test_a_run_is_compared_with_its_first_evaluation_and_flipped_questions_are_listed(runs: Path) -> None:
    printed = compare("job-1", "--runs", runs)
    assert "job-1@8 against job-1@0: answer_correct +0.000 ±0.577 over 3 questions that both answered" in printed
    assert "questions whose answer_correct differs: 2, of which 1 became worse\n" in printed
    lines = printed.splitlines()
    assert "1.000 -> 0.000  q0: How many 0?\\x1b[31m" in lines, "worse ones first, terminal escapes are shown as text"
    assert lines.index("1.000 -> 0.000  q0: How many 0?\\x1b[31m") < lines.index(
        "0.000 -> 1.000  q1: How many 1?\\x1b[31m"
    )
    assert lines[-1].startswith("see why: kestrl episodes diff eval-0-0/0 eval-8-0/0 --run job-1 --runs ")


def test_steps_and_runs_are_named_and_differing_jobs_warn(runs: Path) -> None:
    printed = compare("job-1@0", "job-2@4", "--runs", runs)
    assert "warning: the jobs of job-1@0 and job-2@4 differ in spec.agent" in printed
    assert "job-2@4: failures, which are in no mean: tool/tool_raised 1" in printed
    assert "answered different questions, as episodes failed: 1 only by job-1@0, 0 only by job-2@4" in printed
    assert "see why" not in printed
    address = (runs / "job-2").as_uri()
    assert "warning" not in compare(f"{address}@4", address, "--runs", runs), "an address has no job"


def test_json_has_every_flip_and_most_limits_the_lines(runs: Path) -> None:
    document = json.loads(compare("job-1@8", "job-1@4", "--json", "--runs", runs))
    assert [flip["scenario"] for flip in document["flips"]] == ["q0"]
    assert document["evaluations"][1]["against_first"]["reward"]["only_first"] == 1
    assert document["metric"] == "answer_correct"
    assert "and 1 more (--most, --json)" in compare("job-1", "--most", "1", "--runs", runs)


def test_without_correct_answers_questions_are_compared_by_reward(tmp_path: Path) -> None:
    run = {0: [evaluated(0, 0, 0.5, None)], 2: [evaluated(0, 2, 0.25, None)]}
    write_run(tmp_path / "runs" / "job-1", run)
    assert "questions whose reward differs: 1, of which 1 became worse" in compare("--runs", tmp_path / "runs")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["job-1@5"], "job-1 has no stored evaluation of step 5 (there are: 0, 4, 8)"),
        (["job-3"], "job-3 has no stored evaluation: its job has no spec.data.validation"),
        (["job-1", "job-4"], "job-1@8 and job-4@2 were evaluated on different data: question 0 is 'q0' in one"),
        (["job-9"], "job-9"),
    ],
)
def test_what_cannot_be_compared_is_one_error(runs: Path, names: list[str], message: str) -> None:
    write_run(runs / "job-3", {})
    write_run(runs / "job-4", {2: [evaluated(0, 2, 1.0, 1.0, text="Where")]})
    with pytest.raises(UserInputError) as refusal:
        compare(*names, "--runs", runs)
    assert message in str(refusal.value)


def test_only_a_number_after_the_last_at_is_a_step() -> None:
    assert EvaluationName.parse("s3://a@b/run@12") == EvaluationName("s3://a@b/run", 12)
    assert EvaluationName.parse("a@b") == EvaluationName("a@b", None)
    assert EvaluationName.parse("@3") == EvaluationName(None, 3)
    assert EvaluationName.parse(None) == EvaluationName(None, None)
