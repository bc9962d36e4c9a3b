"""Dynamic sampling: groups that the algorithm refuses are replaced by other scenarios' groups, up to a bound."""

from __future__ import annotations

import logging

from kestrl.algorithms import Algorithm
from kestrl.episode import Group
from kestrl.errors import Boundary, KestrlError

log = logging.getLogger(__name__)


class NothingToCompare(KestrlError):
    """Too many groups were refused in a row: the data or the reward gives the algorithm nothing to learn from."""

    boundary = Boundary.USER_CODE
    code = "nothing_to_compare"


class DynamicSampling:
    """Asks the algorithm about finished groups and counts the refused ones since the last step.

    Args:
        algorithm: Decides by the rewards of a group.
        at_most: Refused groups that end the run.
    """

    def __init__(self, algorithm: Algorithm, *, at_most: int) -> None:
        self._algorithm, self._at_most = algorithm, at_most
        self._refused = 0

    def reset(self) -> None:
        """A step has its groups."""
        self._refused = 0

    def accepts(self, group: Group) -> bool:
        """Whether the algorithm trains on a group.

        Raises:
            NothingToCompare: As many groups were refused since the last step as the job allows.
        """
        rewards = [episode.reward for episode in group.episodes if episode.reward is not None]
        if self._algorithm.accept(rewards):
            return True
        self._refused += 1
        log.debug("group %s is refused by the algorithm: rewards %s", group.id, rewards)
        if self._refused >= self._at_most:
            raise NothingToCompare(
                f"the algorithm refused {self._refused} groups since the last step, the last with rewards {rewards[:8]}; "
                "take easier or harder data, a reward with more steps, or raise spec.algorithm.maxSampledBatches"
            )
        return False
