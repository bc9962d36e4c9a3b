"""The share of episodes that fail for reasons other than the policy, and the end of a run where it is too large."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl.errors import Failure, KestrlError


class TooManyFailures(KestrlError):
    """More episodes fail for reasons other than the policy than the job allows."""

    code = "too_many_failures"


class FailureShare:
    """Counts settled episodes since the last step.

    Args:
        largest: Share of failed episodes that a job allows.
        at_least: Episodes before a share is judged.
    """

    def __init__(self, largest: float, *, at_least: int) -> None:
        self._largest, self._at_least = largest, at_least
        self._episodes = self._failed = 0
        self._last: Failure | None = None

    def reset(self) -> None:
        """A step has its groups."""
        self._episodes = self._failed = 0

    def add(self, episodes: int, failures: Sequence[Failure]) -> None:
        """Adds settled episodes.

        An episode that will be attempted again is not settled: a worker that was killed, or an engine that comes back, ends
        no run.

        Raises:
            TooManyFailures: The share is above the job's.
        """
        self._episodes += episodes
        self._failed += len(failures)
        self._last = failures[-1] if failures else self._last
        if self._episodes >= self._at_least and self._failed > self._largest * self._episodes:
            raise TooManyFailures(
                f"{self._failed} of the last {self._episodes} episodes failed for reasons other than the policy "
                f"(allowed share {self._largest:g}); the last: {self._last}"
            )
