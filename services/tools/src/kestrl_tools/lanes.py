"""Threads for tools that are not async: one for each instance, so that a tool that hangs holds up nobody but itself.

A shared pool would be used up by a few calls that never come back. One thread for an instance also means that what the tool
opened (an SQLite connection) is used where it was opened. The threads are daemons: a hanging one does not keep the service from
ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    context: contextvars.Context
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[tuple[Any, BaseException | None]]
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        if self.done.cancelled():
            self.ended.set()
            return
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (self.context.run(self.work), None)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits, SystemExit of a tool included
            outcome = (None, error)
        self.ended.set()  # before it is told: who has the outcome must not find a thread that seems to hang
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self.done.done():
            self.done.set_result(outcome)


class Lane:
    """One thread, started when first used."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a call that nobody waits for any more is still in it."""
        return self._last is not None and self._last.done.cancelled() and not self._last.ended.is_set()

    @property
    def occupied(self) -> bool:
        """Whether a call is in it. Its thread is no measure: one that has nothing left to do takes a moment to end."""
        return self._last is not None and not self._last.ended.is_set()

    def run(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Has it run in the thread, after what was asked before, with the caller's context (so that spans nest).

        Returns:
            What waits for it. It has its place in the row before that is awaited.
        """
        loop = asyncio.get_running_loop()
        job = _Job(work, contextvars.copy_context(), loop, loop.create_future())
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._last = job
        self._jobs.put(job)
        return _outcome(job)

    def end(self) -> None:
        """Lets the thread end when it is done."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


async def _outcome(job: _Job) -> Any:
    result, error = await job.done
    if error is not None:
        raise error
    return result


class Lanes:
    """Knows how many lanes that ended still have a call in them that never came back, and what such threads have yet to do."""

    def __init__(self) -> None:
        self._ended: dict[Lane, str] = {}
        self._later: set[asyncio.Task[object]] = set()

    def later(self, tool: str, closing: Coroutine[Any, Any, object]) -> None:
        """Closes what a thread holds that is still in a call, should it ever come back; nobody waits for it."""
        task = asyncio.create_task(closing, name=f"close-{tool}-later")
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def end(self, lane: Lane, tool: str) -> None:
        lane.end()
        self._ended = {lane: tool for lane, tool in self._ended.items() if lane.occupied}
        if lane.occupied:
            self._ended[lane] = tool

    def hanging(self) -> list[str]:
        """The tool of each such call. May be asked from any thread."""
        return [tool for lane, tool in list(self._ended.items()) if lane.occupied]
