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


CLIPPED_SHARE = 0.1
"""Share of clipped tokens of a step's only update above which there is a warning. Nothing has been learned from the
tokens yet, so that only a difference between engine and learner, or an older policy, can have moved their ratios."""


class Learning(NamedTuple):
    """Whether the weights have changed since version 0."""

    learned: bool
    reason: str = ""
    """A `Reason`; empty when something was learned."""
    message: str = ""
    """What was observed and what to check or change."""
    warning: str = ""
    """What is lost of what could have been learned, and what to change; empty otherwise."""


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
    single_updates: int = 0
    """Steps of one update."""
    clipped_share: float = 0.0
    """Mean share of clipped tokens in these."""

    def with_step(self, groups: Sequence[Group], result: StepResult) -> LearningCounts:
        """The counts with one more step."""
        calls = sum(len(episode.tool_calls) for group in groups for episode in group.episodes)
        clipped, single = self.clipped_share, self.single_updates
        share = result.diagnostics.get("clip_fraction")  # an algorithm of a user's has none
        if share is not None and result.diagnostics["updates"] == 1:
            single += 1
            clipped += (share - clipped) / single
        return LearningCounts(
            first=self.first,
            steps=self.steps + 1,
            groups=self.groups + len(groups),
            idle_groups=self.idle_groups + result.zero_advantage_groups,
            tool_calls=self.tool_calls + calls,
            largest_gradient=max(self.largest_gradient, result.grad_norm),
            single_updates=single,
            clipped_share=clipped,
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
        return Learning(learned=True, warning=_clipping(counts))
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


def _clipping(counts: LearningCounts) -> str:
    if counts.clipped_share <= CLIPPED_SHARE:
        return ""
    return (
        f"{counts.clipped_share:.0%} of the tokens had a ratio beyond the clip range before anything was learned from "
        "them, and gave no gradient: engine and learner differ by more than algorithm.clip; set "
        "algorithm.correction.mode to decoupled, or widen algorithm.clip"
    )
