"""Pacing of episodes: after an engine's answer, only a few episodes resume per event-loop pass.

Engines answer batches of requests together. If all episodes of a batch resume in one pass, their tool calls are sent
together in one message after the last answer is read, and the worker's core is idle until that message returns. With a
few per pass, the first calls are on their way while further answers are read, and batches spread out. This takes more
messages and so more CPU time; with many episodes, where the core is never idle, all resume at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MIN_RESUMED = 8
"""Smallest number of episodes resumed per pass; of a larger batch, a quarter."""
MAX_PACED_EPISODES = 256
"""Number of episodes above which the core is busy and all resume at once (docs/performance.md)."""


class ResumePacer:
    """Limits how many episodes of a worker resume per event-loop pass."""

    def __init__(self, episodes: Callable[[], int]) -> None:
        """`episodes` returns the number of running episodes."""
        self._episodes = episodes
        self._allowed, self._resumed = MIN_RESUMED, 0
        """Episodes that may resume in this pass, and those that have."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def enter(self) -> None:
        """Waits until the caller may resume, in order of arrival: a few passes at most."""
        if self._episodes() > MAX_PACED_EPISODES:
            return
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_pass, loop)
        if self._resumed < self._allowed:
            self._resumed += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begins a pass; stops after a pass without arrivals."""
        self._scheduled = self._resumed > 0
        self._allowed, self._resumed = max(MIN_RESUMED, len(self._waiting) // 4), 0
        while self._waiting and self._resumed < self._allowed:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise its episode was cancelled
                turn.set_result(None)
                self._resumed += 1
        if self._scheduled:
            loop.call_soon(self._next_pass, loop)
