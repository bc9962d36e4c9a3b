"""Dynamic sampling: groups that the algorithm rejects are replaced by groups of other scenarios, up to a bound."""

from __future__ import annotations

import logging

from kestrl.algorithms import Algorithm
from kestrl.episode import Group
from kestrl.errors import Boundary, KestrlError

log = logging.getLogger(__name__)


class NothingToCompare(KestrlError):
    """Too many groups were rejected in a row: data or reward give the algorithm nothing to learn from."""

    boundary = Boundary.USER_CODE
    code = "nothing_to_compare"


class DynamicSampling:
    """Lets the algorithm accept or reject finished groups and counts rejected ones since the last step.

    Args:
        algorithm: Decides by the rewards of a group.
        at_most: Number of rejected groups that ends the run.
    """

    def __init__(self, algorithm: Algorithm, *, at_most: int) -> None:
        self._algorithm, self._at_most = algorithm, at_most
        self._rejected = 0

    def reset(self) -> None:
        """Starts counting for the next step."""
        self._rejected = 0

    def accepts(self, group: Group) -> bool:
        """Whether the algorithm trains on a group.

        Raises:
            NothingToCompare: The number of groups rejected since the last step reached the job's bound.
        """
        rewards = [episode.reward for episode in group.episodes if episode.reward is not None]
        if self._algorithm.accept(rewards):
            return True
        self._rejected += 1
        log.debug("group %s is rejected by the algorithm: rewards %s", group.id, rewards)
        if self._rejected >= self._at_most:
            raise NothingToCompare(
                f"the algorithm rejected {self._rejected} groups since the last "
                f"step, the last with rewards {rewards[:8]}; "
                "use easier or harder data or a finer-grained reward, or raise spec.algorithm.maxSampledBatches"
            )
        return False
