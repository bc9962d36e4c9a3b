"""A tool as one session holds it: in its own thread or on the event loop, one call at a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kestrl.tools.verl import VerlTool
from kestrl_tools.lanes import Lane, Lanes


class Instance(Protocol):
    """What a session calls. Both raise whatever the tool raises."""

    async def call(self, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        """Calls the tool.

        Args:
            arguments: From the model, checked.
            filled: From the scenario.
        """
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
        self._target = await self._do(factory)
        self._owned = True

    def use(self, function: Callable[..., Any]) -> None:
        """Takes a function."""
        self._target = function

    async def call(self, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        target = self._target
        assert target is not None
        async with self._turn:
            return await self._do(lambda: target(**{**arguments, **filled}))

    async def close(self) -> None:
        try:
            close = getattr(self._target, "close", None) if self._owned else None
            if close is not None and self._lane is not None and self._lane.busy:
                self._lane.post(close)
            elif close is not None:
                async with self._turn:
                    await self._do(close)
        finally:
            if self._lane is not None:
                self._lanes.end(self._lane, self._name)

    async def _do(self, work: Callable[[], Any]) -> Any:
        result = work() if self._lane is None else await self._lane.run(work)
        # A function that is not `async` itself may still hand back something to await (a decorator, a partial).
        return await result if inspect.isawaitable(result) else result


class VerlInstance:
    """An instance of a class written for verl."""

    def __init__(self, tool: VerlTool, instance_id: str) -> None:
        self._tool = tool
        self._id = instance_id
        self._turn = asyncio.Lock()

    async def call(self, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        async with self._turn:
            return await self._tool.execute(self._id, arguments, filled)

    async def close(self) -> None:
        async with self._turn:
            await self._tool.release(self._id)
