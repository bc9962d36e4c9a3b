"""The table of policies beside each other and what is kept of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kestrl._app.cli.evaluations import sampling_of
from kestrl._app.local.comparison import PolicyEvaluation, as_json, details, remarks, report, table
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl.episode import Group
from kestrl.errors import UserInputError
from kestrl.runstate.sampling import GREEDY, EvaluationSampling
from kestrl.testing.attempts import make_attempt


def evaluation(label: str, *, sampling: EvaluationSampling = GREEDY, **means: float) -> PolicyEvaluation:
    return PolicyEvaluation(
        label=label,
        policy=f"job.{label}",
        means=means,
        groups=(),
        folder=Path("folder"),
        sampling=sampling,
        seed=42,
    )


def rows(*evaluations: PolicyEvaluation) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(evaluations))
    return captured.get().splitlines()


@pytest.mark.parametrize(
    ("label", "policies", "parts"), [("v{}", 13, 2), ("openai:a-family-of-models/policy-{}", 3, 3), ("x" * 90, 1, 1)]
)
def test_policies_are_beside_each_other_as_far_as_80_columns_reach(
    label: str, policies: int, parts: int, tmp_path: Path
) -> None:
    labels = [label.format(number) for number in range(policies)]
    console = Console(width=80)
    with console.capture() as captured:
        evaluated = [evaluation(each, sampled_reward=0.5, reward=0.25) for each in labels]
        report(console, evaluated, tmp_path / "compared.json", with_details=False)
    *lines, path = captured.get().splitlines()
    assert path == str(tmp_path / "compared.json")
    assert max(map(len, lines)) <= 80
    assert sum("sampled_reward" in line for line in lines) == parts
    words = [word for line in lines for word in line.split()]
    assert words.count("0.250") == policies
    assert not any("\u2026" in word for word in words)
    if policies > 1:
        assert [word for word in words if word in labels] == labels


def test_estimates_follow_the_main_metrics_by_kind_and_number() -> None:
    estimates = ("pass@16", "pass@2", "best@2", "maj@16", "mean@16")
    means = dict.fromkeys((*estimates, "answered@home", "boxed", "num_turns", "reward"), 0.5)
    printed = rows(
        evaluation("base", sampling=EvaluationSampling(samples=16, temperature=1.0), **means),
        evaluation("v12", reward=0.25),
    )
    assert "held-out, 16 samples at temperature 1" in printed[1]
    order = ["reward", "num_turns", "mean@16", "maj@16", "pass@2", "pass@16", "best@2", "answered@home", "boxed"]
    assert [line.split("│")[1].strip() for line in printed if line.startswith("│")] == order
    assert any(line.split("│")[2:4] == [" 0.500 ", " 0.250 "] for line in printed if "reward" in line)
    assert [line.split("│")[3].strip() for line in printed if "mean@16" in line] == ["-"]


def test_a_greedy_evaluation_is_named_as_before_and_stored_with_its_sampling() -> None:
    printed = rows(evaluation("base", reward=1.0))
    assert "held-out" in printed[1]
    assert "sample" not in printed[1]
    assert "1 sample at temperature 0.5" in rows(evaluation("base", sampling=EvaluationSampling(temperature=0.5)))[1]
    sampling = EvaluationSampling(samples=30, temperature=1.0, top_p=0.6, top_k=20)
    assert str(sampling) == "30 samples at temperature 1, top-p 0.6, top-k 20"
    kept = as_json(evaluation("base", sampling=sampling, reward=1.0))
    assert (kept["samples"], kept["temperature"], kept["top_p"], kept["top_k"], kept["seed"]) == (30, 1.0, 0.6, 20, 42)


def test_other_sampling_tools_and_failures_are_said_below_the_table() -> None:
    own = EvaluationSampling(samples=4, temperature=0.9, own_temperature=True)
    endpoint = replace(evaluation("openai:x", sampling=own), failures={"engine/rate_limited": 2, "tool/timeout": 1})
    assert [*remarks([evaluation("base"), endpoint])] == [
        "openai:x: 4 samples at the model's own temperature",
        "openai:x: failures, which are in no mean: engine/rate_limited 2, tool/timeout 1",
    ]
    assert [*remarks([evaluation("base"), evaluation("v1")])] == []
    other = replace(evaluation("v1"), changed_servers=["files", "notes"])
    assert [*remarks([other])] == [
        "warning: v1: spec.tools: files, notes: the server lists other tools than in training"
    ]
    assert as_json(other)["changed_servers"] == ["files", "notes"]


def job(evaluation: Mapping[str, float]) -> AgentRLJob:
    return parse_job(
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "AgentRLJob",
            "metadata": {"name": "job"},
            "spec": {
                "model": {"base": "demo://tiny"},
                "data": {"train": {"uri": "train.jsonl"}},
                "rewards": [{"rule": "exact_answer"}],
                "sampling": {"temperature": 0.9},
                "evaluation": evaluation,
            },
        }
    )


@pytest.mark.parametrize(
    ("evaluation", "options", "expected"),
    [
        ({}, {}, GREEDY),
        ({}, {"samples": 4}, EvaluationSampling(samples=4, temperature=0.9)),
        ({}, {"samples": 4, "temperature": 0.6}, EvaluationSampling(samples=4, temperature=0.6)),
        ({}, {"top_p": 0.6}, EvaluationSampling(temperature=0.9, top_p=0.6)),
        ({}, {"top_k": 20, "temperature": 1.0}, EvaluationSampling(temperature=1.0, top_k=20)),
        ({"samples": 3, "topP": 0.6}, {}, EvaluationSampling(samples=3, temperature=0.9, top_p=0.6)),
        ({"samples": 3, "topP": 0.6}, {"top_p": 1.0}, EvaluationSampling(samples=3, temperature=0.9)),
        ({"samples": 3, "topP": 0.6}, {"samples": 1, "temperature": 0.0, "top_p": 1.0}, GREEDY),
    ],
)
def test_options_come_before_the_jobs_sampling(
    evaluation: dict[str, float], options: dict[str, float], expected: EvaluationSampling
) -> None:
    assert sampling_of(job(evaluation), **options) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 4}, "--temperature: 0 samples the same episode 4 times; raise it"),
        ({"top_p": 0.6}, "--temperature: 0 takes the most probable token, whatever topP and topK are"),
        ({"top_k": 5}, "--temperature: 0 takes the most probable token, whatever topP and topK are"),
    ],
)
def test_greedy_episodes_take_no_other_options(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        sampling_of(job({}), temperature=0.0, **options)


def test_details_show_the_answer_of_every_sample() -> None:
    attempt = make_attempt(r"\boxed{72}", prompt="6 * 12?", ground_truth="72")
    groups = [
        Group(id=name, scenario=attempt.scenario, episodes=[replace(attempt.episode, reward=1.0, answer=answer)])
        for name, answer in (("a", "72"), ("b", ""), ("c", None))
    ]
    printed = [*details([replace(evaluation("base", reward=1.0), groups=groups)])]
    assert printed[0] == "scenario: 6 * 12?"
    assert [line for line in printed if line.startswith("  base:")] == [
        "  base: answer '72'",
        "  base: answer ''",
        "  base:",
    ]


def test_json_is_printed_in_place_of_the_table_and_is_what_is_kept(tmp_path: Path) -> None:
    console = Console(width=40)
    with console.capture() as captured:
        report(console, [evaluation("v12", reward=0.5)], tmp_path / "kept.json", with_details=True, print_json=True)
    assert json.loads(captured.get()) == json.loads((tmp_path / "kept.json").read_text())
    assert json.loads(captured.get())[0]["means"] == {"reward": 0.5}
