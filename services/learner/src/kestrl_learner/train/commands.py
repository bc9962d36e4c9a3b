"""Commands that rank 0 gives to all ranks: the name of an operation of `RankWork` and its arguments.

A command is announced in the ranks' store, where the others wait without a time limit, since hours may pass between two
steps; then it is broadcast. After each one the ranks compare how it ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import Any

from kestrl.errors import KestrlError
from kestrl_learner.ranks.group import FOREVER, RankGroup, RankLost, lost_ranks
from kestrl_learner.train.compute import RankWork

log = logging.getLogger(__name__)
DONE = ""
"""Outcome of a command that ended well; else it is the code of its error."""


def announcement(number: int) -> str:
    """The store's key of a command."""
    return f"command/{number}"


class RankCommands:
    """Rank 0's side.

    Args:
        group: The ranks.
        work: Rank 0's own.
        settle: Called after a failed collective, before it is reported: ends the process if a rank was killed.
        busy: Held during each command: a checkpoint after a cancelled step waits until the step has ended.
    """

    def __init__(self, group: RankGroup, work: RankWork, settle: Callable[[], None], busy: threading.Lock) -> None:
        self._group, self._work, self._settle, self._busy = group, work, settle, busy
        self._numbers = count()
        self._ended = False

    def order(self, name: str, *arguments: Any) -> Any:
        """Performs an operation on every rank; returns rank 0's result.

        Raises:
            KestrlError: What the operation raised on this rank.
            RankLost: A rank ended, did not answer in time, or failed where this one did not.
        """
        with self._busy:
            if self._ended:
                raise RankLost(f"{name}: the ranks have ended")
            try:
                with lost_ranks(name):
                    self._announce((name, arguments))
                    result, error = performed(self._work, name, arguments)
                    outcomes = self._group.gather(DONE if error is None else error.code)
            except RankLost:
                self._ended = True
                self._settle()
                raise
        if error is not None:
            raise error
        failed = [f"rank {rank}: {code}" for rank, code in enumerate(outcomes) if code != DONE]
        if failed:
            self.end()
            raise RankLost(f"{name}: {', '.join(failed)}; the log has the message", retryable=False)
        return result

    def end(self) -> None:
        """Lets the other ranks end. No effect if they have."""
        with self._busy:
            if not self._ended:
                self._ended = True
                with lost_ranks("ending"):
                    self._announce(None)

    def _announce(self, command: tuple[str, tuple[Any, ...]] | None) -> None:
        number = next(self._numbers)
        self._group.store.set(announcement(number), "")
        self._group.broadcast(command)
        self._group.store.delete_key(announcement(number))


def performed(work: RankWork, name: str, arguments: tuple[Any, ...]) -> tuple[Any, KestrlError | None]:
    """Result and error of an operation. Errors of other types, which other ranks cannot know of, are raised."""
    try:
        return getattr(work, name)(*arguments), None
    except RankLost:
        raise
    except KestrlError as error:
        return None, error


def follow(group: RankGroup, work: RankWork) -> None:
    """Performs rank 0's commands until it lets this rank end.

    Raises:
        RankLost: Rank 0 or another rank ended or did not answer in time.
    """
    for number in count():
        with lost_ranks("waiting for a command"):
            group.store.wait([announcement(number)], FOREVER)
            command: tuple[str, tuple[Any, ...]] | None = group.broadcast(None)
        if command is None:
            return
        name, arguments = command
        with lost_ranks(name):
            _, error = performed(work, name, arguments)
            if error is not None:
                log.error("%s: %s", name, error.failure())
            group.gather(DONE if error is None else error.code)
