"""A run that learns nothing says so, and why."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kestrl._shared.rpc.run_report import report_of
from kestrl.episode import Group
from kestrl.runstate.history import LearningCounts
from kestrl.runstate.state import Learning
from kestrl_learner.progress.learning import Reason, learning, step_counts
from kestrl_learner.run import LearnerRun

CASES: list[tuple[str, dict[str, Any], bool, Reason | None]] = [
    ("the digest is another", {"newest": "b"}, True, None),
    ("all rewards were equal", {"idle": 2, "gradient": 0.0}, True, Reason.NO_TOOL_CALL),
    (
        "all rewards were equal, tools were called",
        {"idle": 2, "gradient": 0.0, "calls": 1},
        True,
        Reason.NO_REWARD_SPREAD,
    ),
    ("all rewards were equal, no tool is offered", {"idle": 2, "gradient": 0.0}, False, Reason.NO_REWARD_SPREAD),
    ("rewards differed, the gradient was 0", {"idle": 1, "gradient": 0.0}, True, Reason.ZERO_GRADIENT),
    ("the update was too small", {"idle": 1, "gradient": 0.3}, True, Reason.WEIGHTS_UNCHANGED),
]


def counts(*, idle: int = 1, gradient: float = 0.3, calls: int = 0) -> LearningCounts:
    group: Any = SimpleNamespace(episodes=[SimpleNamespace(tool_calls=[None] * calls)])
    result: Any = SimpleNamespace(zero_advantage_groups=idle, grad_norm=gradient, diagnostics={})
    step = step_counts([group, group], result)
    return LearningCounts(first="a").with_step(step).with_step(step)


@pytest.mark.parametrize(("facts", "tools", "reason"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_reason_names_what_was_missing(facts: dict[str, Any], tools: bool, reason: Reason | None) -> None:
    facts = dict(facts)
    newest = facts.pop("newest", "a")
    verdict = learning(counts(**facts), newest, tools=tools, learning_rate=1e-12)
    assert verdict.learned == (reason is None)
    assert verdict.reason == (reason or "")
    assert bool(verdict.message) == (reason is not None)


def test_before_the_first_step_nothing_is_said() -> None:
    assert learning(LearningCounts(first="a"), "a", tools=True, learning_rate=1e-3) == Learning()


@pytest.mark.parametrize(
    ("shares", "updates", "warned"),
    [((0.5, 0.3), 1, True), ((0.15, 0.01), 1, False), ((0.5, 0.5), 4, False)],
    ids=["single updates", "a single step", "later updates of a step move ratios by what was learned"],
)
def test_tokens_that_are_clipped_before_anything_was_learned_are_warned_of(
    shares: tuple[float, ...], updates: int, warned: bool
) -> None:
    state = LearningCounts(first="a")
    for share in shares:
        facts = {"clip_fraction": share, "updates": float(updates)}
        result: Any = SimpleNamespace(zero_advantage_groups=0, grad_norm=1.0, diagnostics=facts)
        state = state.with_step(step_counts([], result))
    verdict = learning(state, "b", tools=False, learning_rate=1e-6)
    assert verdict.learned
    assert bool(verdict.warning) == warned
    if warned:
        assert verdict.warning.startswith("40% of the tokens had a ratio beyond the clip range")
        assert "algorithm.correction.mode to decoupled" in verdict.warning


async def test_a_run_that_loses_tokens_to_clipping_says_so_everywhere(staged: Any) -> None:
    """The behaviour policy of the scripted worker is far from the learner's, and the range is narrow."""
    async with staged() as stage:
        run = LearnerRun(stage.but(max_steps=2, algorithm={"clip_low": 1e-9, "clip_high": 1e-9}))
        await run.main()
        assert stage.summary["learned"] is True
        assert "of the tokens had a ratio beyond the clip range" in stage.summary["learning_warning"]
        assert report_of(run.progress.state).learning_warning == stage.summary["learning_warning"]


def equal_rewards(_: Any, group: Group) -> Group:
    return replace(group, episodes=[replace(episode, reward=0.5) for episode in group.episodes])


async def test_a_run_of_equal_rewards_ends_with_learned_false(staged: Any) -> None:
    async with staged() as stage:
        for worker in stage.workers:
            worker.script = equal_rewards
        run = LearnerRun(stage.but(max_steps=3))
        await run.main()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["learned"] is False
        assert stage.summary["not_learned"]["reason"] == "no_reward_spread"
        report = report_of(run.progress.state)
        assert (report.HasField("learned"), report.learned) == (True, False)
        assert report.not_learned.startswith("in 3 steps every group's rewards were equal")


async def test_what_was_learned_before_a_resume_counts(staged: Any) -> None:
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=2)).main()
        assert (stage.summary["learned"], stage.summary["not_learned"]) == (True, None)
        for worker in stage.workers:
            worker.script = equal_rewards
        await LearnerRun(stage.but(max_steps=4)).main()
        assert stage.summary["learned"] is True
        again = LearnerRun(stage.but(max_steps=4, keep_alive=True))
        await again.main()
        assert report_of(again.progress.state).learned
