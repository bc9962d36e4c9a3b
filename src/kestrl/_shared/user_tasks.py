"""Containment of tasks started by user code. In asyncio, KeyboardInterrupt and SystemExit of a task end the event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar
from typing import Any, TypeVar, cast

from kestrl.errors import UserCodeError, described

T = TypeVar("T")
_in_user_code: ContextVar[bool] = ContextVar("kestrl_in_user_code", default=False)


def enter_user_code() -> None:
    """Marks the current context: tasks started from it belong to user code."""
    _in_user_code.set(True)


def contain_user_tasks() -> None:
    """Makes the running event loop convert KeyboardInterrupt and SystemExit of user tasks to `UserCodeError`."""
    asyncio.get_running_loop().set_task_factory(_task)


def _task(
    loop: asyncio.AbstractEventLoop,
    work: Coroutine[Any, Any, T] | Generator[Any, None, T],
    context: Context | None = None,
    **options: Any,  # name and eager_start, which newer versions of Python hand on
) -> asyncio.Task[T]:
    if not _in_user_code.get():
        return asyncio.Task(work, loop=loop, context=context, **options)
    task = asyncio.Task(_contained(work), loop=loop, context=context, **options)
    task.add_done_callback(lambda _: work.close())  # has an effect only on tasks cancelled before they started
    return task


async def _contained(work: Coroutine[Any, Any, T] | Generator[Any, None, T]) -> T:
    try:
        return await cast(Coroutine[Any, Any, T], work)
    except (KeyboardInterrupt, SystemExit) as error:
        raise UserCodeError(described(error)) from error
