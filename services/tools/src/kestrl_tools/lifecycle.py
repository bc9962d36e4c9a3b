"""What tools do once per service: `start_service` before the first session, `stop_service` after the last."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kestrl.errors import KestrlError, UserInputError, described, text_of
from kestrl.tools import ToolError
from kestrl_tools.catalogue import Origin, Tool
from kestrl_tools.execution import guarded

log = logging.getLogger(__name__)


@asynccontextmanager
async def started(tools: Mapping[str, Tool]) -> AsyncGenerator[None]:
    """Starts the tools that want it, and stops those that have started.

    Raises:
        UserInputError: A tool cannot work here; the message names it.
    """
    begun: list[Origin] = []
    try:
        for origin in {tool.origin.name: tool.origin for tool in tools.values()}.values():
            if origin.start is not None:
                await _start(origin.name, origin.start)
            begun.append(origin)
        yield
    finally:
        for origin in reversed(begun):
            if origin.stop is not None:
                await _stop(origin.name, origin.stop)


async def _start(name: str, start: Callable[[], Any]) -> None:
    try:
        await guarded(name, _called(start))
    except UserInputError as error:
        raise UserInputError(f"tool {name}: config: {error}") from error
    except ToolError as error:
        raise UserInputError(f"tool {name}: start_service: {described(error)}") from error
    except KestrlError as error:
        raise UserInputError(f"tool {name}: start_service: {text_of(error)}") from error


async def _stop(name: str, stop: Callable[[], Any]) -> None:
    try:
        await guarded(name, _called(stop))
    except (ToolError, KestrlError) as error:
        log.error("tool %s could not be stopped: %s", name, text_of(error))


async def _called(hook: Callable[[], Any]) -> Any:
    result = hook()
    return await result if inspect.isawaitable(result) else result
