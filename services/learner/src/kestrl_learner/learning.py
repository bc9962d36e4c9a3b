"""Whether a run has learned anything, and if not, why. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from kestrl.episode import Group
from kestrl_learner.trainer import StepResult


class Reason(StrEnum):
    """Why the weights are as they were at the start."""

    NO_TOOL_CALL = "no_tool_call"
    NO_REWARD_SPREAD = "no_reward_spread"
    ZERO_GRADIENT = "zero_gradient"
    WEIGHTS_UNCHANGED = "weights_unchanged"


class Learning(NamedTuple):
    """Whether the weights have changed since version 0, for people and for `status`."""

    learned: bool
    reason: str = ""
    """A `Reason`; empty when something was learned."""
    message: str = ""
    """What to look at."""


def tallied(before: Mapping[str, Any], groups: Sequence[Group], result: StepResult) -> dict[str, Any]:
    """The run's counts with one more step: groups, those without an advantage, tool calls, the largest gradient norm.

    Args:
        before: The counts so far; kept in checkpoints, so that they cover the whole run.
        groups: The step's.
        result: What the step did.
    """
    calls = sum(len(episode.tool_calls) for group in groups for episode in group.episodes)
    return {
        **before,
        "steps": before.get("steps", 0) + 1,
        "groups": before.get("groups", 0) + len(groups),
        "idle_groups": before.get("idle_groups", 0) + result.idle_groups,
        "tool_calls": before.get("tool_calls", 0) + calls,
        "largest_gradient": max(before.get("largest_gradient", 0.0), result.grad_norm),
    }


def learning(counts: Mapping[str, Any], newest: str, *, tools: bool, learning_rate: float) -> Learning | None:
    """The verdict on a run; None before its first step.

    Args:
        counts: As `tallied` makes them, with `first`: the digest of version 0.
        newest: Digest of the newest version.
        tools: Whether the job offers any.
        learning_rate: For the message.
    """
    if not counts.get("steps"):
        return None
    first = counts.get("first")
    if (newest != first) if first else counts["largest_gradient"] > 0:
        return Learning(learned=True)
    steps = f"{counts['steps']} step" + ("s" if counts["steps"] > 1 else "")
    if counts["idle_groups"] == counts["groups"]:
        equal = f"in {steps} every group's rewards were equal, so no episode was better than another"
        if tools and not counts["tool_calls"]:
            return Learning(
                learned=False,
                reason=Reason.NO_TOOL_CALL,
                message=f"{equal}, and no episode called a tool; see `kestrl episodes show` for what the model answers",
            )
        return Learning(
            learned=False,
            reason=Reason.NO_REWARD_SPREAD,
            message=f"{equal}; look at the rewards, take easier or harder data, or raise algorithm.groupSize or "
            "sampling.temperature",
        )
    if counts["largest_gradient"] == 0:
        return Learning(
            learned=False,
            reason=Reason.ZERO_GRADIENT,
            message=f"in {steps} the gradient was 0, though rewards differed: no trainable weight had a part in the loss",
        )
    return Learning(
        learned=False,
        reason=Reason.WEIGHTS_UNCHANGED,
        message=f"in {steps} the weights did not change; raise algorithm.learningRate (now {learning_rate:g})",
    )
