"""The bound on the share of episodes that fail for reasons other than the policy."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl.errors import Failure, KestrlError


class TooManyFailures(KestrlError):
    """The share of episodes that failed for reasons other than the policy exceeds the job's bound."""

    code = "too_many_failures"


class FailureShare:
    """Counts finished episodes since the last step.

    Args:
        largest: Largest share of failed episodes.
        at_least: Number of episodes from which on the bound applies.
    """

    def __init__(self, largest: float, *, at_least: int) -> None:
        self._largest, self._at_least = largest, at_least
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
        self._episodes += episodes
        self._failed += len(failures)
        self._last = failures[-1] if failures else self._last
        if self._episodes >= self._at_least and self._failed > self._largest * self._episodes:
            raise TooManyFailures(
                f"{self._failed} of the last {self._episodes} episodes failed for reasons other than the policy "
                f"(allowed share {self._largest:g}); the last: {self._last}"
            )
