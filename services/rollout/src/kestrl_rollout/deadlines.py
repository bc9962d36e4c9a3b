"""Deadlines that say which of them passed and what was being waited for.

They nest: tool < turn < episode < group. Each is an absolute time of the loop's clock, so that an inner one can be entered
again and again without ever outliving its outer one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum

from kestrl.errors import Boundary, DeadlineExceeded


class Scope(StrEnum):
    """Whose deadline; the failure's code."""

    TOOL = "tool_deadline"
    TURN = "turn_deadline"
    EPISODE = "episode_deadline"
    GROUP = "group_deadline"


class Waiting:
    """What an episode waits for right now: the boundary of a deadline that passes meanwhile."""

    def __init__(self) -> None:
        self.boundary = Boundary.INFRASTRUCTURE

    @contextmanager
    def on(self, boundary: Boundary) -> Generator[None]:
        """Waits for `boundary`. A cancellation leaves the mark in place for the deadline that caused it to read."""
        before, self.boundary = self.boundary, boundary
        try:
            yield
        except asyncio.CancelledError:
            raise
        except BaseException:
            self.boundary = before
            raise
        self.boundary = before


def now() -> float:
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def deadline(scope: Scope, at: float, waiting: Waiting) -> AsyncGenerator[None]:
    """Ends what runs inside at the loop time `at`.

    Raises:
        DeadlineExceeded: It passed; the code is the scope, the boundary what was waited for.
    """
    timer = asyncio.timeout_at(at)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired():
            raise  # a TimeoutError of the code inside, not ours
        name = scope.removesuffix("_deadline")
        raise DeadlineExceeded(
            f"the {name}'s deadline passed while waiting for: {waiting.boundary}", code=scope, boundary=waiting.boundary
        ) from error
