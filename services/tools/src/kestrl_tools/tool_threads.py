"""Threads for tools that are not async: one per instance, so that a hanging tool blocks only itself.

A shared pool would be exhausted by a few calls that never return. One thread per instance also means that resources of
the tool (an SQLite connection) are used in the thread that opened them. The threads are daemons, so a hanging one does
not keep the service from exiting.
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
        except BaseException as error:  # noqa: BLE001 - passed to the caller, including SystemExit of a tool
            outcome = (None, error)
        self.ended.set()  # set before the result, so that the caller does not see a thread that seems to hang
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: tuple[Any, BaseException | None]) -> None:
        if not self.done.done():
            self.done.set_result(outcome)


class ToolThread:
    """A thread, started on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether an abandoned call is still running."""
        return self._last is not None and self._last.done.cancelled() and not self._last.ended.is_set()

    @property
    def occupied(self) -> bool:
        """Whether a call is running. (The thread itself may be alive for a moment after its last call.)"""
        return self._last is not None and not self._last.ended.is_set()

    def run(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Runs a function in the thread, after earlier ones, with the caller's context (so that spans are nested).

        Returns:
            Awaitable of the result. The function is queued before it is awaited.
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
        """Stops the thread after its queued calls."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


async def _outcome(job: _Job) -> Any:
    result, error = await job.done
    if error is not None:
        raise error
    return result


class ToolThreads:
    """Tracks stopped threads with a call that has not returned, and the cleanup after such calls."""

    def __init__(self) -> None:
        self._ended: dict[ToolThread, str] = {}
        self._later: set[asyncio.Task[object]] = set()

    def later(self, tool: str, closing: Coroutine[Any, Any, object]) -> None:
        """Closes the object of a thread in the background once its running call returns."""
        task = asyncio.create_task(closing, name=f"close-{tool}-later")
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def end(self, thread: ToolThread, tool: str) -> None:
        thread.end()
        self._ended = {thread: tool for thread, tool in self._ended.items() if thread.occupied}
        if thread.occupied:
            self._ended[thread] = tool

    def hanging(self) -> list[str]:
        """Tools of calls that have not returned. Thread-safe."""
        return [tool for thread, tool in list(self._ended.items()) if thread.occupied]
