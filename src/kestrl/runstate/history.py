"""What a run did, counted over all its processes. Pure.

Checkpoints hold it beside the weights that it describes, so that a resumed run goes on counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kestrl.runstate.part import Part
from kestrl.runstate.work import EngineWork, summed

Means = dict[str, float]
"""Means over the held-out data, by name."""
SECONDS_DIGITS = 3


class Mismatch(Part):
    """Log-prob differences, learner minus engine, in nats per sampled token."""

    mean: float = 0.0
    """Mean absolute difference; `p99` and `max` are of absolute differences too."""
    p99: float = 0.0
    max: float = 0.0
    ess: float = 1.0
    """Effective sample size of the importance weights as a share of the tokens; 1 if all log-probs agree."""
    tokens: int = 0

    def merged(self, step: Mismatch) -> Mismatch:
        """The mismatch with one more step: the mean over all tokens, and the worst value of each other statistic."""
        tokens = self.tokens + step.tokens
        return Mismatch(
            tokens=tokens,
            mean=(self.mean * self.tokens + step.mean * step.tokens) / max(1, tokens),
            p99=max(self.p99, step.p99),
            max=max(self.max, step.max),
            ess=min(self.ess, step.ess),
        )


class StepCounts(Part):
    """Counts of one optimiser step from which follows whether anything is learned."""

    groups: int
    idle_groups: int
    """Groups whose rewards gave no advantage."""
    tool_calls: int
    gradient: float
    """Norm of the gradient."""
    clipped_share: float | None = None
    """Share of clipped tokens of the step's only update; None with several updates, or without clipping."""


class IdleTime(Part):
    """How long the learner and the engines stood idle in steps, and why; docs/operations.md has the definitions."""

    seconds: float = 0.0
    """Length of the steps, each from the end of the one before."""
    learner: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds by what the learner waited for: `groups`, `policy` or `evaluation`."""
    engine_seconds: float = 0.0
    """Seconds of all engines for which they have said whether they were idle."""
    engines: dict[str, float] = Field(default_factory=dict[str, float])
    """Seconds of these without a request by the reason: `update`, `work` or `tools`."""

    @property
    def learner_share(self) -> float | None:
        """Share of the time in which the learner waited; None before the first step."""
        return sum(self.learner.values()) / self.seconds if self.seconds else None

    @property
    def engine_share(self) -> float | None:
        """Share of the engines' time without a request; None if no engine has said so."""
        return sum(self.engines.values()) / self.engine_seconds if self.engine_seconds else None

    def plus(self, other: IdleTime) -> IdleTime:
        """The sums of both."""
        return IdleTime(
            seconds=self.seconds + other.seconds,
            learner=_sums(self.learner, other.learner),
            engine_seconds=self.engine_seconds + other.engine_seconds,
            engines=_sums(self.engines, other.engines),
        )

    def shares(self) -> str:
        """Learner and engines as in `41%/55%`, with a `-` for what is not known; empty before the first step."""
        if self.learner_share is None:
            return ""
        return f"{self.learner_share:.0%}/{'-' if self.engine_share is None else f'{self.engine_share:.0%}'}"

    def facts(self) -> dict[str, Any]:
        """The seconds as in the record of a step."""
        return {
            "seconds": round(self.seconds, SECONDS_DIGITS),
            "learner": {name: round(seconds, SECONDS_DIGITS) for name, seconds in sorted(self.learner.items())},
            "engine_seconds": round(self.engine_seconds, SECONDS_DIGITS),
            "engines": {name: round(seconds, SECONDS_DIGITS) for name, seconds in sorted(self.engines.items())},
        }


def _sums(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {name: first.get(name, 0.0) + second.get(name, 0.0) for name in sorted({*first, *second})}


class LastStep(Part):
    """What the last step took and gave."""

    tokens_per_second: float = 0.0
    episodes_per_second: float = 0.0
    eta_seconds: float = 0.0
    """Estimated time to the end of the run; 0 if unknown."""
    idle: IdleTime = IdleTime()


class LearningCounts(Part):
    """Counts over the steps of a run."""

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

    def with_step(self, step: StepCounts) -> LearningCounts:
        """The counts with one more step."""
        clipped, updates = self.clipped_share, self.single_updates
        if step.clipped_share is not None:
            updates += 1
            clipped += (step.clipped_share - clipped) / updates
        return LearningCounts(
            first=self.first,
            steps=self.steps + 1,
            groups=self.groups + step.groups,
            idle_groups=self.idle_groups + step.idle_groups,
            tool_calls=self.tool_calls + step.tool_calls,
            largest_gradient=max(self.largest_gradient, step.gradient),
            single_updates=updates,
            clipped_share=clipped,
        )


class Stale(Part):
    """Groups that were released as too old to be trained on, and tokens that were too old in groups that were not. The
    scenarios of these groups are retried, so that only time is lost.
    """

    by_age: dict[int, int] = Field(default_factory=dict[int, int])
    """Groups by their age in steps at release."""
    seconds: float = 0.0
    """Total running time of the groups."""
    tokens: int = 0
    """Sampled tokens of groups that had ended; those of running groups are not known."""
    masked: int = 0
    """Tokens of trained groups that were older than the bound and are not trained on."""

    def plus(self, other: Stale) -> Stale:
        """The sums of both."""
        ages = self.by_age.keys() | other.by_age.keys()
        return Stale(
            by_age={age: self.by_age.get(age, 0) + other.by_age.get(age, 0) for age in sorted(ages)},
            seconds=self.seconds + other.seconds,
            tokens=self.tokens + other.tokens,
            masked=self.masked + other.masked,
        )

    def facts(self) -> dict[str, Any]:
        """The counts as in `summary.json` and in the record of a step."""
        return {
            "groups": sum(self.by_age.values()),
            "by_age": {str(age): count for age, count in sorted(self.by_age.items())},
            "seconds": round(self.seconds, SECONDS_DIGITS),
            "tokens": self.tokens,
            "masked": self.masked,
        }


class ToolCounts(Part):
    """Tool calls of scored training episodes that were offered tools."""

    episodes: int = 0
    outcomes: dict[str, int] = Field(default_factory=dict[str, int])
    """Attempted calls by `CallOutcome`."""
    unread: dict[str, int] = Field(default_factory=dict[str, int])
    """Episodes without a call whose text has a marker of one, by marker."""

    @property
    def calls(self) -> int:
        """Attempted calls, those that could not be parsed included."""
        return sum(self.outcomes.values())

    @property
    def calls_per_episode(self) -> float:
        return self.calls / self.episodes if self.episodes else 0.0

    def plus(self, other: ToolCounts) -> ToolCounts:
        """The sums of both."""
        return ToolCounts(
            episodes=self.episodes + other.episodes,
            outcomes=dict(Counter(self.outcomes) + Counter(other.outcomes)),
            unread=dict(Counter(self.unread) + Counter(other.unread)),
        )

    def facts(self) -> dict[str, Any]:
        """The counts as in `summary.json`."""
        return {
            "episodes": self.episodes,
            "calls": self.calls,
            "calls_per_episode": self.calls_per_episode,
            "outcomes": dict(sorted(self.outcomes.items())),
        }


class History(Part):
    """What a run did up to a step."""

    before: Means | None = None
    """Means of the evaluation before training."""
    after: Means | None = None
    evaluations: dict[int, Means] = Field(default_factory=dict[int, Means])
    """Means by step."""
    gap: Mismatch | None = None
    """Log-prob mismatch to the policies that sampled the tokens."""
    learning: LearningCounts = LearningCounts()
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """Failures by `boundary/code`."""
    skipped_rows: int = 0
    """Rows whose prompts leave no room in the context."""
    stale: Stale = Stale()
    tools: ToolCounts = ToolCounts()
    idle: IdleTime = IdleTime()
    work: dict[str, EngineWork] = Field(default_factory=dict[str, EngineWork])
    """Work of each engine by its name; of more than `WORKING` engines, that of the later ones is under `OTHERS`."""

    def with_work(self, work: Mapping[str, EngineWork]) -> History:
        """The history with more work of engines."""
        return self.but(work=summed(self.work, work))

    def with_step(self, counts: StepCounts, took: LastStep) -> History:
        """The history with one more step."""
        return self.but(learning=self.learning.with_step(counts), idle=self.idle.plus(took.idle))
