"""Concurrency of requests to one judge: bounded, halved by 429, regained slowly, and paused as the server asks."""

from __future__ import annotations

import asyncio
import email.utils
import math
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random

from kestrl._shared.backoff import Backoff

BACKOFF = Backoff(0.5, 30.0, jitter=0.5)
"""Pauses between attempts where the server does not ask for one."""
CHANCE = Random()  # noqa: S311 - jitter
LONGEST_RETRY_AFTER = 300.0
"""Seconds that a server may ask for."""


class Pacer:
    """Slots for requests. The limit falls by half with each refusal and rises by one with each round of answers."""

    def __init__(self, limit: int) -> None:
        self._most = limit
        self.limit = float(limit)
        self.running = 0
        self._resume_at = 0.0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """Waits for a slot, and until the server's pause is over."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.running < max(1, int(self.limit)))
            self.running += 1
        try:
            await self._paused()
            yield
        finally:
            self.running -= 1
            async with self._changed:
                self._changed.notify_all()

    async def _paused(self) -> None:
        loop = asyncio.get_running_loop()
        while (remaining := self._resume_at - loop.time()) > 0:  # noqa: ASYNC110 - the time may move meanwhile
            await asyncio.sleep(remaining)

    def answered(self) -> None:
        self.limit = min(float(self._most), self.limit + 1 / max(1.0, self.limit))

    def refused(self, seconds: float) -> None:
        """After a 429: no request starts for some seconds, and fewer run afterwards."""
        self.limit = max(1.0, self.limit / 2)
        self._resume_at = max(self._resume_at, asyncio.get_running_loop().time() + seconds)


def pause_before(attempt: int, server_pause: float | None) -> float:
    """Seconds before an attempt (the first retry is 1): what the server asked for, or that of the back-off."""
    if server_pause is not None:
        return server_pause
    return BACKOFF.jittered(attempt, CHANCE)


def retry_after(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Seconds of a `Retry-After` (or `retry-after-ms`) header; None without a usable one."""
    milliseconds, seconds = headers.get("retry-after-ms"), headers.get("retry-after")
    try:
        if milliseconds is not None:
            return _bounded(float(milliseconds) / 1000)
        if seconds is not None:
            return _bounded(float(seconds))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(seconds or "")
    except ValueError:
        return None
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return _bounded((date - (now or datetime.now(UTC))).total_seconds())


def _bounded(seconds: float) -> float:
    return BACKOFF.limit if math.isnan(seconds) else max(0.0, min(seconds, LONGEST_RETRY_AFTER))
