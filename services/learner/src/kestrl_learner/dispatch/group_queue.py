"""Complete groups on their way from a source to the training steps: a bounded queue that wakes the step in wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kestrl.episode import Group, PolicyVersion
from kestrl.storage.episodes import GroupOutcome, StoredGroup, TrainedTokens
from kestrl_learner.concurrency import Signal
from kestrl_learner.dispatch.token_versions import token_versions, without_tokens
from kestrl_learner.ledger import Lease


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group waiting for a training step."""

    lease: Lease
    group: Group
    policy: PolicyVersion
    """The version that it began with."""
    steps: Mapping[str, int]
    """Step of each version that sampled its turns, by name."""
    whole: Group | None = None
    """With the failed episodes that `group` is without; None if it has none."""

    def stored(self, tokens: Mapping[int, TrainedTokens]) -> StoredGroup:
        """The group as one that a step consumed.

        Args:
            tokens: What the step computed, by position of the episode in the group.
        """
        return StoredGroup(
            group=self.whole or self.group,
            outcome=GroupOutcome.SHRUNK if self.whole else GroupOutcome.TRAINED,
            attempt=self.lease.attempt,
            tokens={self.group.episodes[position].id: episode_tokens for position, episode_tokens in tokens.items()},
        )

    @property
    def newest(self) -> int:
        """Step of the newest version that sampled a token of it; without tokens, of the one that it began with."""
        return max(token_versions(self.group, self.steps), default=self.policy.step)

    def ages(self, step: int) -> Mapping[int, int]:
        """Number of its tokens by their age in steps, where `step` is that of the newest version."""
        return {step - version: tokens for version, tokens in token_versions(self.group, self.steps).items()}

    def without_older(self, first_step: int) -> tuple[ReadyGroup, int]:
        """The group with the tokens of versions before the step `first_step` as context; and the number of these
        tokens.
        """
        older_tokens = sum(count for step, count in token_versions(self.group, self.steps).items() if step < first_step)
        if not older_tokens:
            return self, 0
        names = {name for name, step in self.steps.items() if step < first_step}
        whole_group = None if self.whole is None else without_tokens(self.whole, names)
        return replace(self, group=without_tokens(self.group, names), whole=whole_group), older_tokens


class GroupQueue:
    """Groups that wait for a step.

    Args:
        at_most: Largest number of waiting groups. The staleness bound starts no more, so that a further one is a bug.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._groups: list[ReadyGroup] = []
        self._changed = Signal()

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, ready: ReadyGroup) -> None:
        """Adds a group."""
        assert len(self._groups) < self._at_most, f"more than {self._at_most} groups wait for a step"
        self._groups.append(ready)
        self._changed.notify()

    def take(self, count: int) -> list[ReadyGroup]:
        """Removes the first groups by the version they began with, then by position; fewer than `count` if there are
        fewer.
        """
        self._groups.sort(key=lambda ready: (ready.policy.step, ready.lease.position))
        groups, self._groups = self._groups[:count], self._groups[count:]
        return groups

    def take_older(self, first_step: int) -> list[ReadyGroup]:
        """Removes the groups whose tokens are all of versions before the step `first_step`."""
        older = [ready for ready in self._groups if ready.newest < first_step]
        self._groups = [ready for ready in self._groups if ready.newest >= first_step]
        return older

    def versions(self) -> list[int]:
        """Step of the version that each group began with."""
        return [ready.policy.step for ready in self._groups]

    def notify(self) -> None:
        """Wakes the step in wait: something that its condition depends on has changed at the source."""
        self._changed.notify()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, evaluated now and after every change."""
        await self._changed.wait_for(condition)
