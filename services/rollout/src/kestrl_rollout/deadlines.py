"""Deadlines that say which of them passed and what was being waited for.

They nest: tool < turn < episode < group. Each is an absolute time of the loop's clock, so that an inner one can be entered
again and again without ever outliving its outer one. The group's counts from the beginning of its last episode (`GroupClock`).
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from types import TracebackType

from kestrl.alarms import Alarms
from kestrl.errors import Boundary, DeadlineExceeded


class Scope(StrEnum):
    """Whose deadline; the failure's code."""

    TOOL = "tool_deadline"
    TURN = "turn_deadline"
    EPISODE = "episode_deadline"
    GROUP = "group_deadline"


class Waiting:
    """What an episode waits for right now: the boundary of a deadline that passes meanwhile."""

    def __init__(self, alarms: Alarms) -> None:
        self.alarms = alarms
        """The worker's."""
        self.boundary = Boundary.INFRASTRUCTURE

    def on(self, boundary: Boundary) -> _On:
        """Waits for `boundary`. A cancellation leaves the mark in place for the deadline that caused it to read."""
        return _On(self, boundary)


class _On:
    __slots__ = ("_before", "_boundary", "_waiting")

    def __init__(self, waiting: Waiting, boundary: Boundary) -> None:
        self._waiting, self._boundary, self._before = waiting, boundary, waiting.boundary

    def __enter__(self) -> None:
        self._before, self._waiting.boundary = self._waiting.boundary, self._boundary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            self._waiting.boundary = self._before


def now() -> float:
    return asyncio.get_running_loop().time()


class GroupClock:
    """A group's deadline. Its episodes begin one by one, as slots come free, each within so many seconds or not at all."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin_by = self.ends = now() + seconds
        """When the last episode must have begun, and when all must be scored. The second moves with every episode that begins."""

    def begun(self) -> None:
        """An episode has a slot."""
        self.ends = now() + self._seconds


class deadline:  # noqa: N801 - used as a verb: `async with deadline(...)`
    """Ends what runs inside at a loop time, as `asyncio.timeout_at` would. A class and no generator: an episode enters a dozen of them.

    Raises:
        DeadlineExceeded: It passed; the code is the scope, the boundary what was waited for.
    """

    __slots__ = ("_cancelling", "_rang", "_scope", "_task", "_waiting", "at")

    def __init__(self, scope: Scope, at: float, waiting: Waiting) -> None:
        self._scope, self._waiting = scope, waiting
        self._rang = False
        self.at = at

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._waiting.alarms.add(self)

    def ring(self) -> None:
        self._rang = True
        self._task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._rang:
            self._waiting.alarms.discard(self)
        elif self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            # Only where nobody else cancelled it too, and it was not swallowed inside.
            name, waited = self._scope.removesuffix("_deadline"), self._waiting.boundary
            raise DeadlineExceeded(
                f"the {name}'s deadline passed while waiting for: {waited}", code=self._scope, boundary=waited
            ) from error
