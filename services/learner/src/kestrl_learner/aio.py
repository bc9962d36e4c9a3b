"""Small tools for asynchronous code: a signal to all who wait, and work that an event may cut short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

from kestrl.stopping import ABANDONED

Result = TypeVar("Result")


class Interrupted(Exception):
    """An event came before the work's end."""


class Signal:
    """Says that something changed; whoever waits looks again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes everyone who waits now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait_for(self, predicate: Callable[[], Result]) -> Result:
        """The predicate's first true answer, asked now and after every change."""
        # No await lies between the question and taking the event, so no change can slip through.
        while not (answer := predicate()):
            await self._event.wait()
        return answer


async def abandonable(work: Callable[[], Result], *, name: str) -> Result:
    """The result of blocking work, in a thread that a process which ends does not wait for (see `kestrl.stopping.leave`)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    context = copy_context()

    def settle(take: Callable[[Any], None], outcome: Any) -> None:
        def unless_cancelled() -> None:
            if not future.done():
                take(outcome)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
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


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result.

    Raises:
        Interrupted: The event came first; the work was cancelled and has ended.
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
            task.exception()  # seen: an error on the way out of cancelled work is not news


async def guarded(work: Coroutine[Any, Any, None], *guards: asyncio.Task[None]) -> None:
    """Does the work; a guard that ends first ends the work, and its error is the error."""
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
