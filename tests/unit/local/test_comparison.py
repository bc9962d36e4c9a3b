"""The table of policies beside each other and what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kestrl.cli.evaluations import GREEDILY, Sampled
from kestrl.episode import Group
from kestrl.errors import UserInputError
from kestrl.local.comparison import Evaluation, as_json, details, table
from kestrl.testing.attempts import make_attempt


def evaluation(label: str, *, samples: int = 1, temperature: float | None = None, **means: float) -> Evaluation:
    return Evaluation(
        label=label,
        policy=f"job.{label}",
        means=means,
        groups=(),
        folder=Path("folder"),
        samples=samples,
        temperature=temperature,
        seed=42,
    )


def rows(*evaluations: Evaluation) -> list[str]:
    console = Console(width=80)
    with console.capture() as captured:
        console.print(table(evaluations))
    return captured.get().splitlines()


def test_estimates_follow_the_main_metrics_by_kind_and_number() -> None:
    estimates = ("pass@16", "pass@2", "best@2", "maj@16", "mean@16")
    means = dict.fromkeys((*estimates, "answered@home", "boxed", "num_turns", "reward"), 0.5)
    printed = rows(evaluation("base", samples=16, temperature=1.0, **means), evaluation("v12", reward=0.25))
    assert "held-out, 16 samples at temperature 1" in printed[1]
    order = ["reward", "num_turns", "mean@16", "maj@16", "pass@2", "pass@16", "best@2", "answered@home", "boxed"]
    assert [line.split("│")[1].strip() for line in printed if line.startswith("│")] == order
    assert any(line.split("│")[2:4] == [" 0.500 ", " 0.250 "] for line in printed if "reward" in line)
    assert [line.split("│")[3].strip() for line in printed if "mean@16" in line] == ["-"]


def test_a_greedy_evaluation_is_named_as_before_and_stored_with_its_sampling() -> None:
    printed = rows(evaluation("base", reward=1.0))
    assert "held-out" in printed[1]
    assert "sample" not in printed[1]
    assert "1 sample at temperature 0.5" in rows(evaluation("base", temperature=0.5, reward=1.0))[1]
    kept = as_json(evaluation("base", samples=4, temperature=0.5, reward=1.0))
    assert (kept["samples"], kept["temperature"], kept["seed"]) == (4, 0.5, 42)


def test_several_samples_have_the_jobs_temperature_unless_one_is_given() -> None:
    assert Sampled.chosen(1, None, 0.9) == GREEDILY
    assert Sampled.chosen(4, None, 0.9) == Sampled(4, 0.9)
    assert Sampled.chosen(4, 0.6, 0.9) == Sampled(4, 0.6)
    assert Sampled.chosen(1, 0.0, 0.9) == Sampled(1, 0.0)
    with pytest.raises(UserInputError, match="--temperature: 0 samples the same episode 4 times; raise it"):
        Sampled.chosen(4, 0.0, 0.9)


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
