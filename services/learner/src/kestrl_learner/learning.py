"""Whether a run has learned anything, and if not, why not. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from kestrl.episode import Group
from kestrl_learner.trainer import StepResult


class Reason(StrEnum):
    """Why the weights have not changed since version 0."""

    NO_TOOL_CALL = "no_tool_call"
    NO_REWARD_SPREAD = "no_reward_spread"
    ZERO_GRADIENT = "zero_gradient"
    WEIGHTS_UNCHANGED = "weights_unchanged"


class Learning(NamedTuple):
    """Whether the weights have changed since version 0."""

    learned: bool
    reason: str = ""
    """A `Reason`; empty when something was learned."""
    message: str = ""
    """What was observed and what to check or change."""


def tallied(before: Mapping[str, Any], groups: Sequence[Group], result: StepResult) -> dict[str, Any]:
    """The run's counts with one more step: groups, zero-advantage groups, tool calls, the largest gradient norm.

    Args:
        before: The counts so far; checkpoints hold them, so that they cover the whole run.
        groups: The groups of the step.
        result: The step's result.
    """
    calls = sum(len(episode.tool_calls) for group in groups for episode in group.episodes)
    return {
        **before,
        "steps": before.get("steps", 0) + 1,
        "groups": before.get("groups", 0) + len(groups),
        "idle_groups": before.get("idle_groups", 0) + result.zero_advantage_groups,
        "tool_calls": before.get("tool_calls", 0) + calls,
        "largest_gradient": max(before.get("largest_gradient", 0.0), result.grad_norm),
    }


def learning(counts: Mapping[str, Any], newest: str, *, tools: bool, learning_rate: float) -> Learning | None:
    """Whether a run has learned anything; None before its first step.

    Args:
        counts: Counts made by `tallied`, with `first`: the digest of version 0.
        newest: Digest of the newest version.
        tools: Whether the job offers tools.
        learning_rate: The job's, for the message.
    """
    if not counts.get("steps"):
        return None
    first = counts.get("first")
    if (newest != first) if first else counts["largest_gradient"] > 0:
        return Learning(learned=True)
    steps = f"{counts['steps']} step" + ("s" if counts["steps"] > 1 else "")
    if counts["idle_groups"] == counts["groups"]:
        equal = f"in {steps} every group's rewards were equal, so no episode had an advantage"
        if tools and not counts["tool_calls"]:
            return Learning(
                learned=False,
                reason=Reason.NO_TOOL_CALL,
                message=f"{equal}, and no episode called a tool; see `kestrl episodes show` for what the model answers",
            )
        return Learning(
            learned=False,
            reason=Reason.NO_REWARD_SPREAD,
            message=f"{equal}; check the rewards, use easier or harder data, or raise algorithm.groupSize or "
            "sampling.temperature",
        )
    if counts["largest_gradient"] == 0:
        return Learning(
            learned=False,
            reason=Reason.ZERO_GRADIENT,
            message=f"in {steps} the gradient was 0, although rewards differed: no trainable weight contributed to the loss",
        )
    return Learning(
        learned=False,
        reason=Reason.WEIGHTS_UNCHANGED,
        message=f"in {steps} the weights did not change; raise algorithm.learningRate (now {learning_rate:g})",
    )
