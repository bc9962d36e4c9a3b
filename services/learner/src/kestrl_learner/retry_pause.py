"""A pause after a failure that may be over soon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 30.0


class RetryPause:
    """Exponential back-off shared by everything that fails at once: a component that is being started again must not use up
    the attempts of every scenario meanwhile.
    """

    def __init__(self) -> None:
        self._failures = 0
        self.active = False

    def start(self, resume: Callable[[], None]) -> None:
        """Starts a pause twice as long as the one before, and calls `resume` at its end; a failure during a pause is part of it."""
        if self.active:
            return
        seconds = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0**self._failures)
        self._failures += 1
        self.active = True
        asyncio.get_running_loop().call_later(seconds, self._end, resume)

    def _end(self, resume: Callable[[], None]) -> None:
        self.active = False
        resume()

    def reset(self) -> None:
        """Something succeeded: the next pause is a short one."""
        self._failures = 0
