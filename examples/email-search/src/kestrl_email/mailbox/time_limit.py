"""A limit on the CPU time of a call that Python code is computing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

Value = TypeVar("Value")
REPEAT = 1.0
"""CPU seconds until a signal comes again: the first may fall where exceptions are dropped, as in a finalizer."""


class TimeLimitExceeded(BaseException):
    """The call took longer. No `Exception`, so that no handler of a library takes it for its own."""


def within(seconds: float, function: Callable[[], Value]) -> Value:
    """Result of a call that may take so much CPU time; only in the main thread of a process, and not nested.

    CPU time, so that the same call has the same outcome beside other load.

    Raises:
        TimeLimitExceeded: It took longer.
    """
    previous = signal.signal(signal.SIGVTALRM, _expired)
    try:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds, REPEAT)
            return function()
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:  # the signal may have come within the block above, before the timer was stopped
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def _expired(_signal: int, _frame: FrameType | None) -> None:
    raise TimeLimitExceeded
