"""Whether a run has learned anything, and if not, why not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kestrl.episode import Group

if TYPE_CHECKING:
    from kestrl_learner.train.trainer import StepResult


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCounts:
    """Counts over the steps of a run; checkpoints hold them, so that they cover all its processes."""

    first: str = ""
    """Digest of version 0."""
    steps: int = 0
    groups: int = 0
    idle_groups: int = 0
    """Groups whose rewards gave no advantage."""
    tool_calls: int = 0
    largest_gradient: float = 0.0
    """Largest gradient norm of a step."""

    def with_step(self, groups: Sequence[Group], result: StepResult) -> LearningCounts:
        """The counts with one more step."""
        calls = sum(len(episode.tool_calls) for group in groups for episode in group.episodes)
        return LearningCounts(
            first=self.first,
            steps=self.steps + 1,
            groups=self.groups + len(groups),
            idle_groups=self.idle_groups + result.zero_advantage_groups,
            tool_calls=self.tool_calls + calls,
            largest_gradient=max(self.largest_gradient, result.grad_norm),
        )


def learning(counts: LearningCounts, newest: str, *, tools: bool, learning_rate: float) -> Learning | None:
    """Whether a run has learned anything; None before its first step.

    Args:
        counts: The run's counts.
        newest: Digest of the newest version.
        tools: Whether the job offers tools.
        learning_rate: The job's, for the message.
    """
    if not counts.steps:
        return None
    if (newest != counts.first) if counts.first else counts.largest_gradient > 0:
        return Learning(learned=True)
    steps = f"{counts.steps} step" + ("s" if counts.steps > 1 else "")
    if counts.idle_groups == counts.groups:
        equal = f"in {steps} every group's rewards were equal, so no episode had an advantage"
        if tools and not counts.tool_calls:
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
    if counts.largest_gradient == 0:
        return Learning(
            learned=False,
            reason=Reason.ZERO_GRADIENT,
            message=f"in {steps} the gradient was 0, although rewards differed: no "
            f"trainable weight contributed to the loss",
        )
    return Learning(
        learned=False,
        reason=Reason.WEIGHTS_UNCHANGED,
        message=f"in {steps} the weights did not change; raise algorithm.learningRate (now {learning_rate:g})",
    )
