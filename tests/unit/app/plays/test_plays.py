"""`kestrl env check`: it finds defects that were planted in rewards and environments, and none in sound ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.plays import playing
from kestrl._app.plays.playing import plays_of
from kestrl._app.plays.verdict import PlaysVerdict
from kestrl._shared.spec import parse_job
from kestrl._shared.spec.environments import Environment

PLANTED = Path(__file__).with_name("planted.py").read_text(encoding="utf-8")
REPORT = Path(__file__).parents[3] / "data" / "reports" / "vf_validate"
WORDS = ("lamp", "chair")
Check = Callable[..., PlaysVerdict]


def ours(_: Environment | None) -> None:
    """The interpreter of this test, in which what environments import of KestRL's is installed."""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Plays the rows of a job whose environment runs in the interpreter of this test."""
    monkeypatch.setattr(playing, "interpreter_of", ours)
    (tmp_path / "planted_plays.py").write_text(PLANTED, encoding="utf-8")

    def run(reports: Sequence[Path] = (), **spec: Any) -> PlaysVerdict:
        rows = ({"word": word} if "environment" in spec else {"prompt": "?", "answer": word} for word in WORDS)
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        job = parse_job(
            {
                "apiVersion": "kestrl.dev/v1alpha1",
                "kind": "AgentRLJob",
                "metadata": {"name": "planted"},
                "spec": {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "rows.jsonl"}}, **spec},
            }
        )
        return plays_of(job, base=tmp_path, cache_dir=tmp_path, rows=8, reports=reports)

    return run


def environment(name: str) -> dict[str, Any]:
    return {"adapter": {"use": f"planted_plays:{name}"}}


def rules(name: str) -> list[dict[str, Any]]:
    return [{"rule": f"planted_plays:{name}"}]


def test_a_sound_environment_has_no_finding(check: Check) -> None:
    found = check(environment=environment("Sound"))
    assert (found.problems, found.warnings) == ([], [])
    assert found.summary == "doing nothing earns 0, a wrong answer earns 0, the solution earns 1"


def test_reports_count_beside_plays(check: Check) -> None:
    found = check(environment=environment("Sound"), reports=[REPORT])
    assert found.problems == ["doing nothing earns as much as the solution (vf-validate): at task 0, task 1"]
    assert found.summary == "doing nothing earns 0, a wrong answer earns 0, the solution earns 1"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("AlwaysZero", "every play of every row earns 0, so that there is nothing to learn from"),
        ("PaysForNothing", "doing nothing earns as much as the solution: at "),
        ("Changes", "the solution earns another reward the second time: at "),
        ("Unlike", "reset shows something else the second time: at "),
        ("Raises", "the solution has no reward: "),
    ],
)
def test_a_defect_of_an_environment_is_found(check: Check, name: str, problem: str) -> None:
    found = check(environment=environment(name))
    assert [each for each in found.problems if each.startswith(problem)], found.problems


def test_a_solution_in_the_prompt_is_a_warning(check: Check) -> None:
    found = check(environment=environment("Leaks"))
    assert found.problems == []
    assert found.warnings[0].startswith("the solution stands in the prompt: at ")


def test_without_a_solution_a_reward_of_0_is_no_finding(check: Check) -> None:
    found = check(environment=environment("Unsolved"))
    assert found.problems == []
    assert found.warnings == ["no row has a solution, so that only doing nothing and a wrong answer were played"]


def test_a_sound_rule_has_no_finding(check: Check) -> None:
    found = check(rewards=rules("sound"))
    assert found.problems == []
    assert found.ranges["solution"] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("always_zero", "every play of every row earns 0, so that there is nothing to learn from"),
        ("pays_for_nothing", "doing nothing earns as much as the solution: at "),
        ("changes", "earns another reward the second time: at "),
    ],
)
def test_a_defect_of_a_rule_is_found(check: Check, name: str, problem: str) -> None:
    found = check(rewards=rules(name))
    assert [each for each in found.problems if problem in each], found.problems


@pytest.mark.parametrize(("name", "code"), [("sound", 0), ("always_zero", 2)])
def test_findings_are_printed_as_json(tmp_path: Path, name: str, code: int) -> None:
    (tmp_path / "planted_plays.py").write_text(PLANTED, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?", "answer": "lamp"}\n')
    spec = {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "rows.jsonl"}}, "rewards": rules(name)}
    document = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "planted"},
        "spec": spec,
    }
    (tmp_path / "job.yaml").write_text(json.dumps(document))
    done = CliRunner().invoke(app, ["env", "check", str(tmp_path / "job.yaml"), "--json"])
    printed = json.loads(done.stdout)
    assert (done.exit_code, printed["valid"]) == (code, code == 0)
    assert bool(printed["problems"]) == bool(code)
    assert set(printed["ranges"]) == {"nothing", "trying", "solution"}
