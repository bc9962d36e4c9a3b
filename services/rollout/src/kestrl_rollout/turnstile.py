"""Lets the episodes whose engine has answered go on a few at a time, so that the worker's core does not stand still.

Engines answer in crowds: what was asked together is answered together. Worked on in one round of the loop, a crowd's tool calls go out
together too, in one message after the last answer is read, and nothing can be done until that comes back. So crowds stay crowds, and with 64
or 128 episodes the core idles. A few a round, the first calls are under way while the next answers are read, and a crowd dissolves.
It costs more messages, and so CPU, which is free only while the core has time to spare: with many episodes all go on at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

FEW = 8
"""That go on in one round, at the least; of a crowd a quarter."""
BUSY = 256
"""With more episodes than this a core has no time to spare (docs/performance.md)."""


class Turnstile:
    """One for all episodes of a worker."""

    def __init__(self, episodes: Callable[[], int]) -> None:
        """`episodes` says how many are running."""
        self._episodes = episodes
        self._share, self._entered = FEW, 0
        """How many may go on in this round, and how many have."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        """Waits for its turn, in the order of coming: few rounds of the loop at most."""
        if self._episodes() > BUSY:
            return
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        if self._entered < self._share:
            self._entered += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new round; the last was one in which nobody came."""
        self._turning = self._entered > 0
        self._share, self._entered = max(FEW, len(self._waiting) // 4), 0
        while self._waiting and self._entered < self._share:
            turn = self._waiting.popleft()
            if not turn.done():  # else its episode was cancelled
                turn.set_result(None)
                self._entered += 1
        if self._turning:
            loop.call_soon(self._turn, loop)
