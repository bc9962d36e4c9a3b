"""Whether a run has learned anything, and if not, why not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl.episode import Group
from kestrl.runstate.history import LearningCounts, StepCounts
from kestrl.runstate.state import Learning, RunState

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


def step_counts(groups: Sequence[Group], result: StepResult) -> StepCounts:
    """The counts of one step."""
    share = result.diagnostics.get("clip_fraction")  # an algorithm of a user's has none
    return StepCounts(
        groups=len(groups),
        idle_groups=result.zero_advantage_groups,
        tool_calls=sum(len(episode.tool_calls) for group in groups for episode in group.episodes),
        gradient=result.grad_norm,
        clipped_share=share if share is not None and result.diagnostics["updates"] == 1 else None,
    )


def learning(counts: LearningCounts, digest: str, *, tools: bool, learning_rate: float) -> Learning:
    """Whether a run has learned anything; unknown before its first step.

    Args:
        counts: The run's counts.
        digest: Digest of the newest version.
        tools: Whether the job offers tools.
        learning_rate: The job's, for the message.
    """
    if not counts.steps:
        return Learning()
    if (digest != counts.first) if counts.first else counts.largest_gradient > 0:
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


def learning_in(state: RunState, settings: LearnerSettings) -> Learning:
    """Whether a run has learned anything; unknown before its first step, and in one that only evaluates."""
    if state.verified.version is None or settings.evaluate is not None:
        return Learning()
    return learning(
        state.history.learning,
        state.verified.version.sha256,
        tools=settings.tools,
        learning_rate=settings.algorithm.learning_rate,
    )


def _clipping(counts: LearningCounts) -> str:
    if counts.clipped_share <= CLIPPED_SHARE:
        return ""
    return (
        f"{counts.clipped_share:.0%} of the tokens had a ratio beyond the clip range before anything was learned from "
        "them, and gave no gradient: engine and learner differ by more than algorithm.clip; set "
        "algorithm.correction.mode to decoupled, or widen algorithm.clip"
    )
