"""Stored groups: their episodes, what became of them, and what training computed on their tokens."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from kestrl.episode import Episode, Group, Purpose
from kestrl.errors import Failure


class GroupOutcome(StrEnum):
    """What became of a group that ended."""

    TRAINED = "trained"
    SHRUNK = "shrunk"
    """Trained on without its failed episodes."""
    RETRIED = "retried"
    """Failed; its scenario is attempted again."""
    DROPPED = "dropped"
    """Failed or rejected; its scenario is not attempted again."""
    MASKED = "masked"
    """Not trained on, because no judge model scored it."""
    SKIPPED = "skipped"
    """Not trained on, because the prompt leaves no room in the context."""
    STALE = "stale"
    """Too old to be trained on; its scenario is attempted again."""
    EVALUATED = "evaluated"


TRAINED_OUTCOMES = frozenset({GroupOutcome.TRAINED, GroupOutcome.SHRUNK})
"""Outcomes of groups that an optimiser step consumed."""
SCORED_OUTCOMES = TRAINED_OUTCOMES | {GroupOutcome.MASKED}
"""Outcomes of groups whose episodes can be scored again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """What a step computed on the sampled tokens of an episode, in the order of its rows."""

    advantages: array[float]
    learner_logprobs: array[float]
    """Log-probabilities under the weights that the step began with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A group that ended, and its outcome."""

    group: Group
    """All its episodes; none if the group failed as a whole."""
    outcome: GroupOutcome
    attempt: int = 0
    """Number of the attempt at the scenario, from 0."""
    reason: str = ""
    """Why it was not trained on; empty if it was."""
    failure: Failure | None = None
    """Failure of the group as a whole."""
    tokens: Mapping[str, TrainedTokens] = field(default_factory=dict[str, TrainedTokens])
    """By id of the episode; only of those that were trained on."""

    @property
    def trained(self) -> Group:
        """The group as training took it: a shrunk one without its failed episodes."""
        if not self.tokens:
            return self.group
        return replace(self.group, episodes=[episode for episode in self.group.episodes if episode.id in self.tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBatch:
    """The groups that one step consumed, with those that ended since the step before, or those of one evaluation."""

    purpose: Purpose
    step: int
    """Number of the optimiser step, from 1; of an evaluation, the steps that had been done."""
    stored: Sequence[StoredGroup]

    @property
    def groups(self) -> Sequence[Group]:
        return [stored_group.group for stored_group in self.stored]

    @staticmethod
    def evaluation(step: int, groups: Sequence[Group]) -> EpisodeBatch:
        """The batch of an evaluation after `step` steps."""
        stored = [StoredGroup(group=group, outcome=GroupOutcome.EVALUATED) for group in groups]
        return EpisodeBatch(purpose=Purpose.EVALUATION, step=step, stored=stored)


class StoredEpisode(NamedTuple):
    """An episode and where it is stored."""

    purpose: Purpose
    step: int
    stored: StoredGroup
    episode: Episode

    @property
    def group(self) -> Group:
        return self.stored.group


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Selection of episodes; None in a field selects all."""

    purpose: Purpose | None = None
    step: int | None = None
    id: str | None = None
    """Id of one episode."""
    scenario: str | None = None
    """Id of the scenario."""
    failed: bool | None = None
    """Whether something other than the model failed."""
    outcomes: Collection[GroupOutcome] | None = None
    """Outcomes of the group."""

    def matches(self, stored: StoredGroup, episode: Episode) -> bool:
        """Whether an episode of a group has the selected id, scenario and outcome."""
        return (
            self.id in {None, episode.id}
            and self.scenario in {None, episode.scenario_id}
            and self.failed in {None, episode.failure is not None}
            and (self.outcomes is None or stored.outcome in self.outcomes)
        )
