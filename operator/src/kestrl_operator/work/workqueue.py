"""A rate-limited work queue: each key once, when it is due, on one worker at a time, with back-off while it keeps
failing.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from kestrl._shared.backoff import Backoff

Key = TypeVar("Key", bound=Hashable)
BACKOFF = Backoff(0.5, 120.0)
"""Pauses before a key that keeps failing is processed again."""


class Queue(Generic[Key]):
    """Keys that wait for a worker. A key added while it is being processed is queued again when that processing
    ends.
    """

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._order: list[tuple[float, int, Key]] = []
        self._taken: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._patience: dict[Key, float] = {}
        """The time before which a failed key is not processed again."""
        self._forgiven: set[Key] = set()
        """Keys whose failures were reset while they were being processed: the result of that processing does not apply
        to their new state."""
        self._count = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due) + len(self._taken)

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Queues a key to be due after `delay` seconds; an earlier due time is kept. A failed key is not due before its
        back-off ends.
        """
        due_time = max(asyncio.get_running_loop().time() + delay, self._patience.get(key, 0.0))
        if key in self._taken:
            self._again[key] = min(due_time, self._again.get(key, due_time))
        elif due_time < self._due.get(key, float("inf")):
            self._due[key] = due_time
            self._count += 1
            heapq.heappush(self._order, (due_time, self._count, key))
            self._changed.set()

    async def take(self) -> Key:
        """The next key that is due; the caller returns it with `done` or `failed`."""
        while True:
            self._changed.clear()
            wait = self._until_next()
            if wait is not None and wait <= 0:
                due_time, _, key = heapq.heappop(self._order)
                if self._due.get(key) == due_time and key not in self._taken:
                    del self._due[key]
                    self._taken.add(key)
                    return key
                continue
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _until_next(self) -> float | None:
        return None if not self._order else self._order[0][0] - asyncio.get_running_loop().time()

    def done(self, key: Key, requeue_after: float | None = None) -> None:
        """Returns a key that was processed without an error."""
        self.forgive(key)
        self._forgiven.discard(key)
        self._give_back(key, requeue_after)

    def forgive(self, key: Key) -> None:
        """Resets the failures of a key, after a change that may have fixed it."""
        self._failures.pop(key, None)
        self._patience.pop(key, None)
        if key in self._taken:
            self._forgiven.add(key)

    def failures(self, key: Key) -> int:
        """Consecutive failures of a key since its last success or reset."""
        return self._failures.get(key, 0)

    def failed(self, key: Key) -> float:
        """Returns a key whose processing failed; returns the seconds until it is due again."""
        if key in self._forgiven:
            self._forgiven.discard(key)
            self._give_back(key, 0.0)
            return 0.0
        self._failures[key] = self.failures(key) + 1
        wait = BACKOFF.pause(self._failures[key])
        self._patience[key] = asyncio.get_running_loop().time() + wait
        self._give_back(key, wait)
        return wait

    def _give_back(self, key: Key, delay: float | None) -> None:
        self._taken.discard(key)
        next_time = self._again.pop(key, None)
        if next_time is not None:
            self.add(key, max(0.0, next_time - asyncio.get_running_loop().time()))
        if delay is not None:
            self.add(key, delay)
