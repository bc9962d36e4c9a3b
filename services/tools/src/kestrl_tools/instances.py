"""A tool as one session holds it: in its own thread or on the event loop, one call at a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from kestrl.compat.verl.tools import VerlTool
from kestrl.errors import KestrlError
from kestrl.tools import ToolError
from kestrl_tools.execution import guarded
from kestrl_tools.lanes import Lane, Lanes


class Instance(Protocol):
    """What a session calls. All raise whatever the tool raises."""

    async def call(self, method: str | None, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        """Calls the tool.

        Args:
            method: Of an environment; None calls the instance.
            arguments: From the model, checked.
            filled: From the scenario.
        """
        ...

    async def state(self) -> object:
        """What the reward may know of it at the end."""
        ...

    async def close(self) -> None:
        """Ends it. Called once."""
        ...


def is_async(obj: Any) -> bool:
    """Whether calling it (or, for a class, its instance) gives something to await."""
    called = getattr(obj, "__call__", None)  # noqa: B004 - the method itself is looked at, not whether there is one
    return inspect.iscoroutinefunction(obj) or inspect.iscoroutinefunction(called)


class PlainInstance:
    """A function, or an object made from a class."""

    def __init__(self, name: str, lanes: Lanes, *, sync: bool) -> None:
        self._name = name
        self._lanes = lanes
        self._lane = Lane(f"tool-{name}") if sync else None
        self._turn = asyncio.Lock()
        self._target: Callable[..., Any] | None = None
        self._owned = False

    async def make(self, factory: Callable[[], Any]) -> None:
        """Makes the object of a class where it will be called."""

        def made() -> None:
            # Kept by the thread itself: an object that is made when nobody waits for it any more has to be closed too.
            self._target = factory()

        self._owned = True
        await self._do(made)

    def use(self, function: Callable[..., Any]) -> None:
        """Takes a function."""
        self._target = function

    async def call(self, method: str | None, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        return await self.invoke(method, {**arguments, **filled})

    async def invoke(self, method: str | None, arguments: Mapping[str, Any]) -> object:
        """Calls the object or a method of it."""
        target = self._target
        assert target is not None
        async with self._turn:
            return await self._do(lambda: (target if method is None else getattr(target, method))(**arguments))

    async def state(self) -> object:
        return await self.invoke("state", {})

    async def close(self) -> None:
        lane = self._lane
        try:
            if self._owned and lane is not None and lane.busy:
                self._lanes.later(self._name, self._close_later(lane.run(self._closed)))
            elif self._owned:
                async with self._turn:
                    await self._do(self._closed)
        finally:
            if lane is not None:
                self._lanes.end(lane, self._name)

    def _closed(self) -> Any:
        """Closes the object, if there is one and it has a way to be closed."""
        close = getattr(self._target, "close", None)
        return None if close is None else close()

    async def _close_later(self, closing: Awaitable[Any]) -> None:
        with suppress(KestrlError, ToolError):  # `guarded` has logged it, and there is nobody else to tell
            await guarded(self._name, _all_of(closing))

    async def _do(self, work: Callable[[], Any]) -> Any:
        if self._lane is not None:
            return await _all_of(self._lane.run(work))
        result = work()
        return await result if inspect.isawaitable(result) else result


async def _all_of(work: Awaitable[Any]) -> Any:
    """A function that is not `async` itself may still hand back something to await (a decorator, a partial)."""
    result = await work
    return await result if inspect.isawaitable(result) else result


class VerlInstance:
    """An instance of a class written for verl."""

    def __init__(self, tool: VerlTool, instance_id: str) -> None:
        self._tool = tool
        self._id = instance_id
        self._turn = asyncio.Lock()

    async def call(self, method: str | None, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        del method  # a tool of its own
        async with self._turn:
            return await self._tool.execute(self._id, arguments, filled)

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        async with self._turn:
            await self._tool.release(self._id)
