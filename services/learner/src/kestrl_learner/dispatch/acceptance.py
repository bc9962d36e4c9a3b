"""Acceptance of finished groups: whether to train on one, retry it or drop it. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl.episode import (
    LARGEST_REWARD,
    PROMPT_TOO_LONG,
    UNSCORED,
    Episode,
    Group,
    PolicyVersion,
    Scenario,
)
from kestrl.errors import Boundary, Failure
from kestrl_learner.dispatch.repetition import repeated

MAX_ATTEMPTS = 5
"""Failed attempts after which a scenario is dropped."""


REFUSED = frozenset(
    {
        (Boundary.TOOL, "tool_unauthorized"),
        (Boundary.SANDBOX, "sandbox_unauthorized"),
        (Boundary.JUDGE, "judge_unauthorized"),
    }
)
"""Failures by a credential that was accepted before and is refused: only somebody outside of the run can replace it."""


class GroupAction(StrEnum):
    """What to do with a finished group."""

    TRAIN = "train"
    RETRY = "retry"
    DROP = "drop"
    MASK = "mask"
    """Dropped because no judge model scored it: not trained on, and not counted as a failure of the run."""
    SKIP = "skip"
    """Dropped because the prompt leaves no room in the context; not counted as a failure of the run."""


LEFT_OUT = {GroupAction.SKIP: "skipped", GroupAction.MASK: "masked"}
"""Words for groups that are dropped for a reason of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What to do with a group, and why."""

    action: GroupAction
    group: Group
    """The group to train on: with `shrink`, without its failed episodes."""
    reason: str = ""
    failures: Sequence[Failure] = ()
    """The failures of all failed episodes."""

    @property
    def refused(self) -> Failure | None:
        """The failure by a refused credential for which the scenario waits; None if there is none."""
        return refused_credential(self.failures) if self.action in {GroupAction.RETRY, GroupAction.DROP} else None


def refused_credential(failures: Iterable[Failure]) -> Failure | None:
    """The first failure by a refused credential; None if there is none."""
    return next((failure for failure in failures if (failure.boundary, failure.code) in REFUSED), None)


def policy_mismatch(
    group: Group, policy: PolicyVersion, proved: Mapping[PolicyVersion, Collection[str]]
) -> Failure | None:
    """The failure of a group with a completion of another policy version than it may have, or of an engine that had not
    verified it; else None.

    Args:
        group: The group.
        policy: The requested version.
        proved: Engines that had verified a version while the group ran, by each version that may have sampled a turn.
    """
    engines = {version.name: names for version, names in proved.items()}
    for episode in group.episodes:
        for turn in episode.turns:
            if turn.policy not in engines:
                requested = policy.name if len(proved) == 1 else f"{policy.name} or a newer one"
                message = f"{episode.id}: {turn.engine} answered with {turn.policy}, requested was {requested}"
                return Failure(boundary=Boundary.ENGINE, code="wrong_policy", message=message, component=turn.engine)
            if turn.engine not in engines[turn.policy]:
                message = f"{episode.id}: {turn.engine} was not among the engines that proved {turn.policy}"
                return Failure(boundary=Boundary.ENGINE, code="unproved_engine", message=message, component=turn.engine)
    return None


def malformed(group: Group, *, scenario: Scenario, size: int, vocabulary: int) -> Failure | None:
    """The failure of a group that is not the requested one, is incomplete, or holds impossible values; else None."""
    message = ""
    if group.scenario.ordinal != scenario.ordinal or group.scenario.id != scenario.id:
        message = f"group {group.id} belongs to scenario {group.scenario.id}, requested was {scenario.id}"
    elif [episode.index for episode in group.episodes] != list(range(size)):
        message = f"group {group.id} has {len(group.episodes)} episodes, not {size}, or they are out of order"
    else:
        message = next((problem for episode in group.episodes if (problem := _impossible(episode, vocabulary))), "")
    if not message:
        return None
    return Failure(boundary=Boundary.INFRASTRUCTURE, code="malformed_group", message=message, component="rollout")


def _impossible(episode: Episode, vocabulary: int) -> str:
    if episode.reward is not None and not abs(episode.reward) <= LARGEST_REWARD:
        return f"{episode.id} has reward {episode.reward}"
    if episode.main_row is not None and not 0 <= episode.main_row < len(episode.rows):
        return f"{episode.id} has the main row {episode.main_row} of {len(episode.rows)}"
    if episode.turn_rewards and len(episode.turn_rewards) != len(episode.turns):
        return f"{episode.id} has {len(episode.turn_rewards)} turn rewards for {len(episode.turns)} turns"
    if not all(abs(reward) <= LARGEST_REWARD for reward in episode.turn_rewards):
        return f"{episode.id} has turn rewards {list(episode.turn_rewards)[:8]}"
    if problem := repeated(episode):
        return problem
    for number, row in enumerate(episode.rows):
        if max(row.mask, default=0) > 1:
            return f"{episode.id} has a mask byte of {max(row.mask)}; it is 0 or 1"
        if problem := _unattributed(episode, number):
            return problem
        if not row.token_ids or row.mask[0]:
            return f"{episode.id} has a row that is empty or begins with a sampled token"
        if min(row.token_ids) < 0 or max(row.token_ids) >= vocabulary:
            return f"{episode.id} holds token ids outside the vocabulary of {vocabulary}"
        for on, value in zip(row.mask, row.logprobs, strict=True):
            # A value above 0 by more than rounding, or one that is not finite, cannot be a log-probability.
            if on and not (math.isfinite(value) and value < 1e-3):
                return f"{episode.id} has behaviour log-prob {value} on a sampled token"
    return ""


def _unattributed(episode: Episode, number: int) -> str:
    """Why the sampled tokens of a row cannot be attributed to turns and so to policy versions; empty if they can."""
    mask = episode.rows[number].mask
    turn_mask = bytearray(len(mask))
    for turn in episode.turns:
        if turn.row != number:
            continue
        if not 0 <= turn.start <= turn.end <= len(mask):
            return f"{episode.id} has a turn at {turn.start}-{turn.end} of a row of {len(mask)} tokens"
        turn_mask[turn.start : turn.end] = b"\1" * (turn.end - turn.start)
    orphans = sum(1 for sampled, in_turn in zip(mask, turn_mask, strict=True) if sampled and not in_turn)
    return f"{episode.id} has {orphans} sampled tokens that belong to no turn" if orphans else ""


def not_trainable(episode: Episode) -> Failure | None:
    """The failure that keeps an episode from being trained on, or None."""
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
    proved: Mapping[PolicyVersion, Collection[str]],
    algorithm: AlgorithmSettings,
    vocabulary: int,
    failures_before: int,
) -> GroupDecision:
    """The decision on a group that ran to its end.

    Args:
        group: The group as the worker returned it.
        scenario: The requested scenario.
        policy: The requested policy version.
        proved: Names of the engines that had verified a version while the group ran, by version; that one, and newer
            ones if the group continues over updates.
        algorithm: The job's settings for groups.
        vocabulary: Size of the model's vocabulary.
        failures_before: Failed attempts at this scenario so far.
    """
    wrong = policy_mismatch(group, policy, proved)
    wrong = wrong or malformed(group, scenario=scenario, size=algorithm.group_size, vocabulary=vocabulary)
    if wrong is not None:
        return _retry_or_drop(group, [wrong], failures_before, retryable=True)
    failures = [failure for episode in group.episodes if (failure := not_trainable(episode)) is not None]
    if not failures:
        return GroupDecision(action=GroupAction.TRAIN, group=group)
    if any(failure.code == PROMPT_TOO_LONG for failure in failures):
        return GroupDecision(action=GroupAction.SKIP, group=group, reason=failures[0].message[:500])
    masked = [failure for failure in failures if failure.code == UNSCORED]
    if masked:
        # Also with `shrink`: the scores of what remains would no longer be relative to the whole group.
        return GroupDecision(action=GroupAction.MASK, group=group, reason=masked[0].message[:500], failures=failures)
    trainable = [episode for episode in group.episodes if not_trainable(episode) is None]
    if algorithm.on_failed_episode == "shrink" and len(trainable) >= algorithm.min_group_size:
        return GroupDecision(action=GroupAction.TRAIN, group=replace(group, episodes=trainable), failures=failures)
    # A retry cannot help while any episode fails with an error that is not retryable.
    permanent = [failure for failure in failures if not failure.retryable]
    decision = _retry_or_drop(group, permanent or failures, failures_before, retryable=not permanent)
    return replace(decision, failures=failures)


def _retry_or_drop(
    group: Group, failures: Sequence[Failure], failures_before: int, *, retryable: bool
) -> GroupDecision:
    action = GroupAction.RETRY if retryable and failures_before + 1 < MAX_ATTEMPTS else GroupAction.DROP
    reason = f"{failures[0].boundary}/{failures[0].code}: {failures[0].message}"
    return GroupDecision(action=action, group=group, reason=reason[:500], failures=failures)
