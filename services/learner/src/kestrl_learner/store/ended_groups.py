"""Groups that ended between two steps, on their way to the next step's file of episodes."""

from __future__ import annotations

import logging
from collections import deque

from kestrl.storage.episodes import StoredGroup

log = logging.getLogger(__name__)


class EndedGroups:
    """Groups that no step consumed, until the next step's file takes them.

    Args:
        at_most: Number of groups that are kept; of more, the newest are kept, and the others are logged.
    """

    def __init__(self, at_most: int) -> None:
        self._groups: deque[StoredGroup] = deque(maxlen=at_most)
        self._left_out = 0

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, stored: StoredGroup) -> None:
        """Adds a group that ended."""
        self._left_out += len(self._groups) == self._groups.maxlen
        self._groups.append(stored)

    def take(self) -> list[StoredGroup]:
        """Removes and returns all groups."""
        if self._left_out:
            log.warning(
                "%d of the groups that ended since the last step are not stored: more than %d did",
                self._left_out,
                self._groups.maxlen,
            )
        ended_groups, self._left_out = list(self._groups), 0
        self._groups.clear()
        return ended_groups
