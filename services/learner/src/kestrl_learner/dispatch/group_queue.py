"""Complete groups on their way from a source to the training steps: a bounded queue that wakes the step in wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kestrl.episode import Group, PolicyVersion
from kestrl.storage.episodes import GroupOutcome, StoredGroup, TrainedTokens
from kestrl_learner.concurrency import Signal
from kestrl_learner.ledger import Lease


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group waiting for a training step."""

    lease: Lease
    group: Group
    policy: PolicyVersion
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
        """Removes the first groups by policy version, then by position; fewer than `count` if there are fewer."""
        self._groups.sort(key=lambda ready: (ready.policy.step, ready.lease.position))
        groups, self._groups = self._groups[:count], self._groups[count:]
        return groups

    def take_older(self, first_step: int) -> list[ReadyGroup]:
        """Removes the groups of policy versions before the step `first_step`."""
        older = [ready for ready in self._groups if ready.policy.step < first_step]
        self._groups = [ready for ready in self._groups if ready.policy.step >= first_step]
        return older

    def versions(self) -> list[int]:
        """Step of every group's policy version."""
        return [ready.policy.step for ready in self._groups]

    def notify(self) -> None:
        """Wakes the step in wait: something that its condition depends on has changed at the source."""
        self._changed.notify()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds, evaluated now and after every change."""
        await self._changed.wait_for(condition)
