"""The bound on the share of episodes that fail for reasons other than the policy."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl.errors import Boundary, Failure, KestrlError


class TooManyFailures(KestrlError):
    """The share of episodes that failed for reasons other than the policy exceeds the job's bound."""

    code = "too_many_failures"


class NoGroupScored(KestrlError):
    """The judge scored none of many groups in a row."""

    boundary = Boundary.JUDGE
    code = "no_group_scored"


FEWEST_UNSCORED = 5
"""Groups in a row without scores below which no run stops."""


class FailureShare:
    """Counts finished episodes since the last step, and unscored groups since the last scored one.

    Args:
        largest: Largest share of failed episodes, from one step's worth of episodes on.
        algorithm: Sizes of groups and steps. The run stops at two steps' worth of unscored groups in a row.
    """

    def __init__(self, bound: float, algorithm: AlgorithmSettings) -> None:
        self._largest, self._at_least = bound, algorithm.groups_per_step * algorithm.group_size
        self._most_unscored, self._unscored = max(FEWEST_UNSCORED, 2 * algorithm.groups_per_step), 0
        self._episodes = self._failed = 0
        self._last: Failure | None = None

    def reset(self) -> None:
        """Starts counting for the next step."""
        self._episodes = self._failed = 0

    def add(self, episodes: int, failures: Sequence[Failure]) -> None:
        """Adds finished episodes.

        Episodes of groups that will be retried are not added, so that a killed worker or a restarting engine does not
        end the run.

        Raises:
            TooManyFailures: The share exceeds the bound.
        """
        self._unscored = 0 if len(failures) < episodes else self._unscored
        self._episodes += episodes
        self._failed += len(failures)
        self._last = failures[-1] if failures else self._last
        if self._episodes >= self._at_least and self._failed > self._largest * self._episodes:
            raise TooManyFailures(
                f"{self._failed} of the last {self._episodes} episodes failed for reasons other than the policy "
                f"(allowed share {self._largest:g}); the last: {self._last}"
            )

    def add_unscored(self, reason: str) -> None:
        """Adds a group that no judge scored, which counts as no failed episode.

        Raises:
            NoGroupScored: There are too many in a row.
        """
        self._unscored += 1
        if self._unscored >= self._most_unscored:
            raise NoGroupScored(
                f"the last {self._unscored} groups were not scored, so nothing can be learned; the last: {reason}"
            )
