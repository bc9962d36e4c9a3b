"""A pause of dispatching after retryable failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kestrl._shared.backoff import Backoff

BACKOFF = Backoff(0.5, 30.0)
"""Pauses of dispatching after consecutive failures."""


class RetryPause:
    """Exponential backoff shared by concurrent failures, so that a restarting component does not use up every
    scenario's attempts.
    """

    def __init__(self) -> None:
        self._failures = 0
        self.active = False

    def start(self, resume: Callable[[], None]) -> None:
        """Starts a pause twice as long as the last and calls `resume` at its end; no effect during a pause."""
        if self.active:
            return
        self._failures += 1
        self.active = True
        asyncio.get_running_loop().call_later(BACKOFF.pause(self._failures), self._end, resume)

    def _end(self, resume: Callable[[], None]) -> None:
        self.active = False
        resume()

    def reset(self) -> None:
        """Makes the next pause the shortest, after a success."""
        self._failures = 0
