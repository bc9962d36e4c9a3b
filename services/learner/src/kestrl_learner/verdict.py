"""What becomes of a finished group. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kestrl.episode import LARGEST_REWARD, PROMPT_TOO_LONG, Episode, Group, PolicyVersion, Scenario
from kestrl.errors import Boundary, Failure
from kestrl.plan.settings import AlgorithmSettings

MAX_ATTEMPTS = 5
"""Failed attempts after which a scenario is dropped."""


class Fate(StrEnum):
    """What to do with a group."""

    TRAIN = "train"
    RETRY = "retry"
    DROP = "drop"
    SKIP = "skip"
    """Its prompt leaves no room in the context: dropped, and no failure of the run."""


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


def malformed(group: Group, *, scenario: Scenario, size: int, vocabulary: int) -> Failure | None:
    """Whether a group is another than was asked for, incomplete, or holds numbers that cannot be."""
    message = ""
    if group.scenario.ordinal != scenario.ordinal or group.scenario.id != scenario.id:
        message = f"group {group.id} is of scenario {group.scenario.id}, asked was {scenario.id}"
    elif [episode.index for episode in group.episodes] != list(range(size)):
        message = f"group {group.id} has {len(group.episodes)} episodes, not {size}, or they are out of order"
    else:
        message = next((why for episode in group.episodes if (why := _impossible(episode, vocabulary))), "")
    if not message:
        return None
    return Failure(boundary=Boundary.INFRASTRUCTURE, code="malformed_group", message=message, component="rollout")


def _impossible(episode: Episode, vocabulary: int) -> str:
    if episode.reward is not None and not abs(episode.reward) <= LARGEST_REWARD:
        return f"{episode.id} has reward {episode.reward}"
    for number, row in enumerate(episode.rows):
        if max(row.mask, default=0) > 1:
            return f"{episode.id} has a mask byte of {max(row.mask)}; it is 0 or 1"
        if why := _unattested(episode, number):
            return why
        if not row.token_ids or row.mask[0]:
            return f"{episode.id} has a row that is empty or begins with a sampled token"
        if min(row.token_ids) < 0 or max(row.token_ids) >= vocabulary:
            return f"{episode.id} holds token ids outside the vocabulary of {vocabulary}"
        for on, value in zip(row.mask, row.logprobs, strict=True):
            # Above 0 by more than rounding, or not finite: no log-probability.
            if on and not (math.isfinite(value) and value < 1e-3):
                return f"{episode.id} has behaviour log-prob {value} on a sampled token"
    return ""


def _unattested(episode: Episode, number: int) -> str:
    """Why the sampled tokens of a row cannot be attributed to turns, and so to policy versions, if so."""
    mask = episode.rows[number].mask
    named = bytearray(len(mask))
    for turn in episode.turns:
        if turn.row != number:
            continue
        if not 0 <= turn.start <= turn.end <= len(mask):
            return f"{episode.id} has a turn at {turn.start}-{turn.end} of a row of {len(mask)} tokens"
        named[turn.start : turn.end] = b"\1" * (turn.end - turn.start)
    orphans = sum(1 for sampled, known in zip(mask, named, strict=True) if sampled and not known)
    return f"{episode.id} has {orphans} sampled tokens that no turn names" if orphans else ""


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
    group: Group,
    *,
    scenario: Scenario,
    policy: PolicyVersion,
    engines: Sequence[str],
    algorithm: AlgorithmSettings,
    vocabulary: int,
    failures_before: int,
) -> Verdict:
    """The fate of a group that ran to its end.

    Args:
        group: As the worker gave it.
        scenario: What was asked for.
        policy: The version asked for.
        engines: Names of those that had proved it.
        algorithm: The job's group policy.
        vocabulary: Tokens the model knows.
        failures_before: Attempts at this scenario that failed before.
    """
    wrong = attest(group, policy, engines)
    wrong = wrong or malformed(group, scenario=scenario, size=algorithm.group_size, vocabulary=vocabulary)
    if wrong is not None:
        return _again(group, [wrong], failures_before, retryable=True)
    failures = [failure for episode in group.episodes if (failure := unscored(episode)) is not None]
    if not failures:
        return Verdict(fate=Fate.TRAIN, group=group)
    if any(failure.code == PROMPT_TOO_LONG for failure in failures):
        return Verdict(fate=Fate.SKIP, group=group, reason=failures[0].message[:500])
    whole = [episode for episode in group.episodes if unscored(episode) is None]
    if algorithm.on_failed_episode == "shrink" and len(whole) >= algorithm.min_group_size:
        return Verdict(fate=Fate.TRAIN, group=replace(group, episodes=whole), failures=failures)
    # A lasting failure would come again: the scenario is worth another attempt only if no episode has one.
    lasting = [failure for failure in failures if not failure.retryable]
    verdict = _again(group, lasting or failures, failures_before, retryable=not lasting)
    return replace(verdict, failures=failures)


def _again(group: Group, failures: Sequence[Failure], failures_before: int, *, retryable: bool) -> Verdict:
    fate = Fate.RETRY if retryable and failures_before + 1 < MAX_ATTEMPTS else Fate.DROP
    reason = f"{failures[0].boundary}/{failures[0].code}: {failures[0].message}"
    return Verdict(fate=fate, group=group, reason=reason[:500], failures=failures)
