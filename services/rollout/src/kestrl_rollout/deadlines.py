"""Deadlines that report which of them passed and what the episode was waiting for.

They nest: tool < turn < episode < group. Each is an absolute time of the loop's clock, so that an inner one can be
entered repeatedly without outliving the outer one. The group's deadline counts from the start of its last episode
(`GroupClock`).
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from types import TracebackType

from kestrl.errors import Boundary, DeadlineExceeded


class Scope(StrEnum):
    """Scope of a deadline; the value is the failure's code."""

    TOOL = "tool_deadline"
    TURN = "turn_deadline"
    EPISODE = "episode_deadline"
    GROUP = "group_deadline"


class Waiting:
    """What an episode waits for now: the boundary of a deadline that passes meanwhile.

    Calls that are made at once have a wait of their own each, of which the newest that still waits counts.
    """

    def __init__(self) -> None:
        self._boundary = Boundary.INFRASTRUCTURE
        self._calls: list[Waiting] = []
        self._cancelled: Waiting | None = None
        """The call that a cancellation left last, so that the deadline behind it can read what it waited for."""

    @property
    def boundary(self) -> Boundary:
        inner = self._calls[-1] if self._calls else self._cancelled
        return self._boundary if inner is None else inner.boundary

    @boundary.setter
    def boundary(self, boundary: Boundary) -> None:
        self._boundary, self._cancelled = boundary, None

    def on(self, boundary: Boundary) -> _On:
        """Marks a wait for `boundary`. A cancellation leaves the mark in place, so that the deadline behind it can read
        it.
        """
        return _On(self, boundary)

    def call(self, boundary: Boundary) -> _Call:
        """The wait of a call for `boundary`, beside those of others."""
        return _Call(self, boundary)

    def begin(self, call: Waiting) -> None:
        self._calls.append(call)
        self._cancelled = None

    def end(self, call: Waiting, *, cancelled: bool) -> None:
        self._calls.remove(call)
        self._cancelled = call if cancelled else self._cancelled


class _Call:
    __slots__ = ("_call", "_waiting")

    def __init__(self, waiting: Waiting, boundary: Boundary) -> None:
        self._waiting, self._call = waiting, Waiting()
        self._call.boundary = boundary

    def __enter__(self) -> Waiting:
        self._waiting.begin(self._call)
        return self._call

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.end(self._call, cancelled=kind is not None and issubclass(kind, asyncio.CancelledError))


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
    """A group's deadline. Episodes start as slots become free, within `seconds` of the group's start."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin_by = self.ends = now() + seconds
        """Latest start of an episode, and latest time of the scores. The second moves with every episode that
        starts."""

    def begun(self) -> None:
        """Records that an episode got a slot."""
        self.ends = now() + self._seconds


class deadline:  # noqa: N801 - used as a verb: `async with deadline(...)`
    """`asyncio.timeout_at` that reports which deadline passed. A class, not a generator, so that a `TimeoutError` of
    the body is not taken for its own.

    Raises:
        DeadlineExceeded: The deadline passed; its code is the scope, its boundary what was waited for.
    """

    __slots__ = ("_scope", "_timeout", "_waiting")

    def __init__(self, scope: Scope, at: float, waiting: Waiting) -> None:
        self._scope, self._waiting, self._timeout = scope, waiting, asyncio.timeout_at(at)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            name, waited = self._scope.removesuffix("_deadline"), self._waiting.boundary
            raise DeadlineExceeded(
                f"the {name}'s deadline passed while waiting for: {waited}", code=self._scope, boundary=waited
            ) from error
