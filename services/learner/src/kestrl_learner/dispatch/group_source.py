"""The seam between training and where its groups come from: rollouts today, by the `Dispatcher`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kestrl.algorithms import Algorithm
from kestrl.episode import PolicyVersion
from kestrl.storage.episodes import StoredGroup
from kestrl_learner.dispatch.group_queue import ReadyGroup
from kestrl_learner.ledger import Ledger


class GroupSource(Protocol):
    """Gives training the groups of its steps. Every method is called in one event loop.

    A group that `take` returns has a lease in the state `finished`: training records it as trained, or a resume makes
    its scenario pending again. Whatever else becomes of a lease, the source records.
    """

    def begin(self, policy: PolicyVersion, step: int) -> None:
        """Starts with a published version after `step` optimiser steps; called once, before `run`."""
        ...

    async def run(self) -> None:
        """Makes groups until cancelled.

        Raises:
            KestrlError: There is no hope of further groups; ends the run.
        """
        ...

    async def take(self, step: int) -> list[ReadyGroup]:
        """The groups of the step after `step` steps; fewer than a step's worth if no more will come, and none at the
        end of the scenarios or while draining.

        Raises:
            KestrlError: They did not come in time.
        """
        ...

    def take_ended(self) -> list[StoredGroup]:
        """The groups that ended since the last call and that no step will get, to be stored."""
        ...

    def advance(self, policy: PolicyVersion) -> None:
        """Uses a newer published version for new groups."""
        ...

    def versions_in_use(self) -> set[str]:
        """Names of the versions that engines must still serve."""
        ...

    def accepted_from(self) -> int:
        """Step of the oldest version that the completions of running groups may name."""
        ...

    def drain(self) -> None:
        """Starts no further group, and lets a waiting `take` return."""
        ...


MakeSource = Callable[[Ledger, Algorithm], GroupSource]
"""Makes the source of a run from its ledger and algorithm, in the event loop that uses it."""
