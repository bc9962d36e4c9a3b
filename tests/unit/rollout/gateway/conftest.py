"""Episodes that are served."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kestrl.agents import Endpoint
from kestrl.episode import Episode

SERVING = """
import asyncio

opened = asyncio.Queue()

async def agent(conversation):
    async with conversation.serve() as endpoint:
        done = asyncio.Event()
        await opened.put((endpoint, done))
        await done.wait()
"""


@pytest.fixture
async def served(make_stage: Any, make_file: Callable[[str, str], str]) -> Callable[..., Any]:
    """Runs an episode whose loop serves it; gives its endpoint, and a way to its end."""
    name = make_file("serving", SERVING)
    stages: dict[Any, Any] = {}

    @asynccontextmanager
    async def serve(
        *, folder: Any = None, settings: Any = None, **changes: Any
    ) -> AsyncIterator[tuple[Any, Endpoint, Callable[[], Awaitable[Episode]]]]:
        key = (folder, repr(settings))
        if key not in stages:
            stages[key] = await make_stage(agent=f"{name}:agent", folder=folder, **(settings or {}))
        running = asyncio.create_task(stages[key].episode(**changes))
        endpoint, done = await importlib.import_module(name).opened.get()

        async def end() -> Episode:
            done.set()
            return await running

        try:
            yield stages[key], endpoint, end
        finally:
            await end()

    return serve
