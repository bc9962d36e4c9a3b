"""Helpers for asyncio: a change signal, listeners, blocking work in a daemon thread, and work that an event or a
failing task ends.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from kestrl._shared.processes.stopping import ABANDONED

Result = TypeVar("Result")


class Interrupted(Exception):
    """An event was set before the work ended."""


class Signal:
    """A change notification: waiting tasks check their predicate again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiting tasks."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], Result]) -> Result:
        """The predicate's first true value, evaluated now and after every notification."""
        # There is no await between evaluating the predicate and taking the event, so that no change is missed.
        while not (answer := predicate()):
            await self._event.wait()
        return answer


class Listeners:
    """What is called when something has happened: each function once, in the order in which they were added."""

    def __init__(self) -> None:
        self._functions: dict[Callable[[], None], None] = {}

    def add(self, listener: Callable[[], None]) -> None:
        """Calls a function from now on; it returns at once and raises nothing. No effect if it is called already."""
        self._functions[listener] = None

    def notify(self) -> None:
        """Calls every function."""
        for listener in list(self._functions):
            listener()


async def abandonable(work: Callable[[], Result], *, name: str) -> Result:
    """Runs blocking work in a daemon thread that does not delay the end of the process (see
    `kestrl._shared.processes.stopping.leave`).
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = copy_context()

    def settle(take: Callable[[Any], None], outcome: Any) -> None:
        def unless_cancelled() -> None:
            if not future.done():
                take(outcome)

        with suppress(RuntimeError):  # the loop is closed, nothing awaits the result
            loop.call_soon_threadsafe(unless_cancelled)

    def run() -> None:
        try:
            result = context.run(work)
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            settle(future.set_exception, error)
        else:
            settle(future.set_result, result)

    threading.Thread(target=run, name=f"{ABANDONED}{name}", daemon=True).start()
    return await future


async def finished(work: Callable[..., Result], *arguments: Any) -> Result:
    """Runs blocking work in a thread. A cancellation is raised when the work has ended, for work that uses what others
    get next.
    """
    task = asyncio.create_task(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs work unless an event is set before it ends; returns its result.

    Raises:
        Interrupted: The event was set first; the work was cancelled and has ended.
    """
    task = asyncio.create_task(work)
    stop = asyncio.create_task(event.wait())
    try:
        await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Interrupted
    finally:
        stop.cancel()
        task.cancel()
        await asyncio.wait((task, stop))
        if not task.cancelled():
            task.exception()  # retrieved: an error raised during the cancellation is dropped


async def guarded(work: Coroutine[Any, Any, None], *guards: asyncio.Task[None]) -> None:
    """Runs work beside guard tasks; a guard that ends first cancels the work, and its error is raised."""
    main = asyncio.create_task(work)
    try:
        await asyncio.wait([main, *guards], return_when=asyncio.FIRST_COMPLETED)
        for guard in guards:
            if guard.done():
                guard.result()
        await main
    finally:
        main.cancel()
        await asyncio.wait([main])
