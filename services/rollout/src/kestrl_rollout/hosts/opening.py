"""The host of the agent that the settings name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp

from kestrl._shared.plan.settings.rollout import OutsideAgent
from kestrl_rollout.agents.loading import LoadedLoop, Loops
from kestrl_rollout.hosts.command import CommandHost
from kestrl_rollout.hosts.host import Host
from kestrl_rollout.hosts.loop import HostLoop
from kestrl_rollout.hosts.process import ProcessHost
from kestrl_rollout.hosts.stops import Stops
from kestrl_rollout.hosts.url import UrlHost

CONNECT_SECONDS = 30.0
"""Time limit for a connection to a service."""


@asynccontextmanager
async def opened_host(agent: OutsideAgent, python_path: Sequence[str]) -> AsyncGenerator[Host]:
    """The host of an agent, while the context is open.

    Args:
        agent: The agent.
        python_path: Folders with the user's code, that of the manifest first.

    Raises:
        UserInputError: The agent cannot be loaded.
    """
    folder = python_path[0] if python_path else None
    if agent.command:
        yield CommandHost(agent.command, variables=agent.env, folder=folder)
    elif agent.url is not None:
        # An episode's deadline is that of its POST, and its slot bounds the connections.
        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            yield UrlHost(agent.url, session)
    else:
        assert agent.run is not None
        host = ProcessHost(
            agent.run,
            python=agent.python,
            config=agent.config,
            variables=agent.env,
            python_path=python_path,
        )
        try:
            await host.start()
            yield host
        finally:
            await host.close()


@asynccontextmanager
async def with_outside_agent(
    loops: Loops, agent: OutsideAgent | None, python_path: Sequence[str]
) -> AsyncGenerator[Loops]:
    """The job's loops, of which the agent outside of the worker is the default if there is one.

    Raises:
        UserInputError: It cannot be loaded.
    """
    if agent is None:
        yield loops
        return
    async with opened_host(agent, python_path) as host:
        loop = HostLoop(
            host,
            config={} if agent.run else agent.config,
            stops=Stops(agent.stops),
            stopped_reward=agent.stopped_reward,
        )
        outside = LoadedLoop(
            run=loop.run,
            name=host.name,
            field=host.field,
            built_in=False,
            uses_tools=True,
            reads_calls=False,
            writes_prompts=True,
        )
        yield replace(loops, default=outside)
