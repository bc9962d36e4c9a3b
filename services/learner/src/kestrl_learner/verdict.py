"""What becomes of a finished group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kestrl.episode import Episode, Group, PolicyVersion
from kestrl.errors import Boundary, Failure
from kestrl.plan.settings import AlgorithmSettings

MAX_ATTEMPTS = 3
"""Times a scenario is attempted before it is dropped."""


class Fate(StrEnum):
    """What to do with a group."""

    TRAIN = "train"
    RETRY = "retry"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision."""

    fate: Fate
    group: Group
    """With `shrink`, without its failed episodes."""
    reason: str = ""
    failures: Sequence[Failure] = ()
    """Every failed episode's."""


def attest(group: Group, policy: PolicyVersion, engines: Sequence[str]) -> Failure | None:
    """Whether every completion came from the version that was asked for, on an engine that had proved it."""
    for episode in group.episodes:
        for turn in episode.turns:
            if turn.policy != policy.name:
                message = f"{episode.id}: {turn.engine} answered with {turn.policy}, asked was {policy.name}"
                return Failure(boundary=Boundary.ENGINE, code="wrong_policy", message=message, component=turn.engine)
            if turn.engine not in engines:
                message = f"{episode.id}: {turn.engine} was not among the engines that proved {policy.name}"
                return Failure(boundary=Boundary.ENGINE, code="unproved_engine", message=message, component=turn.engine)
    return None


def unscored(episode: Episode) -> Failure | None:
    """Why an episode cannot be trained on, if so."""
    if episode.failure is not None:
        return episode.failure
    if episode.reward is None:
        return Failure(
            boundary=Boundary.JUDGE, code="no_reward", message=f"{episode.id} has no reward", component="judge"
        )
    if not any(sum(row.mask) for row in episode.rows):
        return Failure(boundary=Boundary.ENGINE, code="no_tokens", message=f"{episode.id} has no sampled token")
    return None


def decide(
    group: Group, *, policy: PolicyVersion, engines: Sequence[str], algorithm: AlgorithmSettings, attempt: int
) -> Verdict:
    """The fate of a group that ran to its end."""
    wrong = attest(group, policy, engines)
    if wrong is not None:
        return _again(group, [wrong], attempt, retryable=True)
    failures = [failure for episode in group.episodes if (failure := unscored(episode)) is not None]
    if not failures:
        return Verdict(fate=Fate.TRAIN, group=group)
    whole = [episode for episode in group.episodes if unscored(episode) is None]
    if algorithm.on_failed_episode == "shrink" and len(whole) >= algorithm.min_group_size:
        return Verdict(fate=Fate.TRAIN, group=replace(group, episodes=whole), failures=failures)
    return _again(group, failures, attempt, retryable=any(failure.retryable for failure in failures))


def _again(group: Group, failures: Sequence[Failure], attempt: int, *, retryable: bool) -> Verdict:
    fate = Fate.RETRY if retryable and attempt + 1 < MAX_ATTEMPTS else Fate.DROP
    reason = f"{failures[0].boundary}/{failures[0].code}: {failures[0].message}"
    return Verdict(fate=fate, group=group, reason=reason[:500], failures=failures)
