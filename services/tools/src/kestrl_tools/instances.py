"""Sessions of Python tools: in their own thread or on the event loop, one call at a time."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from kestrl.compat.verl.tools import VerlTool
from kestrl.episode import ENVIRONMENT_REWARD
from kestrl.errors import KestrlError, ToolFailure
from kestrl.tools import ToolError
from kestrl.tools.shapes import is_mapping
from kestrl_tools.execution import guarded
from kestrl_tools.tool_threads import ToolThread, ToolThreads


def is_async(obj: Any) -> bool:
    """Whether calling it (or its instance, for a class) returns an awaitable."""
    called = getattr(obj, "__call__", None)  # noqa: B004 - the method itself is looked at, not whether there is one
    return inspect.iscoroutinefunction(obj) or inspect.iscoroutinefunction(called)


class PlainInstance:
    """A function, or an instance of a class."""

    prompt = ""

    def __init__(self, name: str, threads: ToolThreads, *, sync: bool, methods: bool = False) -> None:
        """Prepares an instance without creating the object.

        Args:
            name: Name of the tool or environment.
            threads: Record of threads that outlive their session.
            sync: Whether calls run in a thread.
            methods: Whether the object's methods are the tools; else the object itself is called.
        """
        self._name = name
        self._methods = methods
        self._threads = threads
        self._thread = ToolThread(f"tool-{name}") if sync else None
        self._turn = asyncio.Lock()
        self._target: Callable[..., Any] | None = None
        self._owned = False

    async def make(self, factory: Callable[[], Any]) -> None:
        """Creates the instance of a class in the thread of its calls."""

        def made() -> None:
            # Stored by the thread itself: an object that is created after a cancellation has to be closed too.
            self._target = factory()

        self._owned = True
        await self._do(made)

    def use(self, function: Callable[..., Any]) -> None:
        """Uses a function as the instance."""
        self._target = function

    async def call(self, tool: str, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        return await self.invoke(tool if self._methods else None, {**arguments, **filled})

    async def invoke(self, method: str | None, arguments: Mapping[str, Any]) -> object:
        """Calls the object or one of its methods."""
        target = self._target
        assert target is not None
        async with self._turn:
            return await self._do(lambda: (target if method is None else getattr(target, method))(**arguments))

    async def state(self) -> object:
        return await self.invoke("state", {})

    async def close(self) -> None:
        thread = self._thread
        try:
            if self._owned and thread is not None and thread.busy:
                self._threads.later(self._name, self._close_later(thread.run(self._closed)))
            elif self._owned:
                async with self._turn:
                    await self._do(self._closed)
        finally:
            if thread is not None:
                self._threads.end(thread, self._name)

    def _closed(self) -> Any:
        """Closes the object, if it exists and has a `close` method."""
        close = getattr(self._target, "close", None)
        return None if close is None else close()

    async def _close_later(self, closing: Awaitable[Any]) -> None:
        with suppress(KestrlError, ToolError):  # already logged by `guarded`
            await guarded(self._name, _all_of(closing))

    async def _do(self, work: Callable[[], Any]) -> Any:
        if self._thread is not None:
            return await _all_of(self._thread.run(work))
        result = work()
        return await result if inspect.isawaitable(result) else result


async def _all_of(work: Awaitable[Any]) -> Any:
    """Awaits the result if a function that is not `async` itself returns an awaitable (a decorator, a partial)."""
    result = await work
    return await result if inspect.isawaitable(result) else result


class EnvironmentInstance(PlainInstance):
    """An instance of a class whose methods are tools, with its state, its own reward, or both."""

    def __init__(
        self,
        name: str,
        threads: ToolThreads,
        *,
        sync: bool,
        reads_state: bool,
        reads_reward: bool,
        reads_gold: bool = False,
    ) -> None:
        super().__init__(name, threads, sync=sync, methods=True)
        self._reads_gold = reads_gold
        self._reads_state, self._reads_reward = reads_state, reads_reward
        self.prompt = ""

    async def state(self) -> object:
        """What `state()` returns; the number of `get_reward()` is added to it under that name.

        Raises:
            ToolFailure: The reward is not a finite number, or the state has no room for it.
        """
        state: object = await self.invoke("state", {}) if self._reads_state else {}
        if not self._reads_reward:
            return state
        if not is_mapping(state) or ENVIRONMENT_REWARD in state:
            raise ToolFailure(
                f"{self._name}: state() must return a dict without the key {ENVIRONMENT_REWARD!r}, the reward's own",
                code="tool_result_invalid",
            )
        return {**state, ENVIRONMENT_REWARD: _rewards(self._name, await self.invoke(ENVIRONMENT_REWARD, {}))}

    async def gold(self) -> object:
        """What a perfect player does; None where the class does not say."""
        return await self.invoke("gold", {}) if self._reads_gold else None


def _rewards(environment: str, reward: Any) -> object:
    """The reward as a float, or each of its parts by name."""
    if not is_mapping(reward):
        return _finite(environment, reward)
    if not reward or not all(isinstance(name, str) for name in reward):
        raise _no_reward(environment, "a mapping without named parts")
    return {name: _finite(environment, part) for name, part in reward.items()}


def _finite(environment: str, reward: Any) -> float:
    """The reward as a float. Raises ToolFailure where it is no finite number."""
    try:
        value = float(reward)
    except Exception as error:  # objects of user code may raise anything here
        raise _no_reward(environment, f"a {type(reward).__name__}") from error
    if isinstance(reward, str | bytes) or not math.isfinite(value):
        raise _no_reward(environment, repr(reward)[:40])
    return value


def _no_reward(environment: str, returned: str) -> ToolFailure:
    return ToolFailure(
        f"{environment}: {ENVIRONMENT_REWARD}() returned {returned}: return a finite number, or one for each part by "
        "name",
        code="tool_result_invalid",
    )


class VerlInstance:
    """An instance of a class written for verl."""

    prompt = ""

    def __init__(self, tool: VerlTool, instance_id: str) -> None:
        self._tool = tool
        self._id = instance_id
        self._turn = asyncio.Lock()

    async def call(self, tool: str, arguments: Mapping[str, Any], filled: Mapping[str, Any]) -> object:
        del tool  # always a single one
        async with self._turn:
            return await self._tool.execute(self._id, arguments, filled)

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        async with self._turn:
            await self._tool.release(self._id)
