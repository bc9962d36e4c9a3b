"""The host of the agent that the settings name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from kestrl._shared.plan.settings.rollout import HEALTH_PATH, OutsideAgent, OutsideEnvironment, RolloutSettings
from kestrl.errors import UserInputError
from kestrl_rollout.agents.loading import LoadedLoop, Loops
from kestrl_rollout.hosts.command import CommandHost
from kestrl_rollout.hosts.environment import EnvironmentLoop
from kestrl_rollout.hosts.environment_process import FIELD, environment_process
from kestrl_rollout.hosts.host import Host
from kestrl_rollout.hosts.loop import HostLoop
from kestrl_rollout.hosts.pods import PodsHost
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
    if agent.pods is not None:
        field, name = ("agent.run", agent.run or "") if agent.run else ("agent.command", Path(agent.command[0]).name)
        async with _client() as session:
            host = PodsHost(field, name, agent.pods, session)
            await host.started(HEALTH_PATH)
            yield host
    elif agent.command:
        yield CommandHost(agent.command, variables=agent.env, folder=folder)
    elif agent.url is not None:
        async with _client() as session:
            yield UrlHost(agent.url, session)
    else:
        assert agent.run is not None
        host = ProcessHost(
            agent.run,
            python=agent.python,
            config=agent.config,
            variables=agent.env,
            python_path=python_path,
            folder=folder,
        )
        async with _running(host):
            yield host


def _client() -> aiohttp.ClientSession:
    """A client of services. An episode's deadline is that of its POST, and its slot bounds the connections."""
    timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


@asynccontextmanager
async def _running(host: ProcessHost) -> AsyncGenerator[None]:
    """Starts the process of a host, and ends it with the context."""
    try:
        await host.start()
        yield
    finally:
        await host.close()


@asynccontextmanager
async def opened_environment_host(environment: OutsideEnvironment, python_path: Sequence[str]) -> AsyncGenerator[Host]:
    """The host of an environment that runs its episodes itself, while the context is open.

    Raises:
        UserInputError: The environment cannot be loaded.
    """
    if environment.pods is not None:
        async with _client() as session:
            pods = PodsHost(FIELD, environment.taskset, environment.pods, session)
            await pods.started(HEALTH_PATH)
            yield pods
        return
    if environment.python is None:
        raise UserInputError("spec.environment: has no interpreter here, and would run in the worker's")
    async with environment_process(environment.model_dump(), python_path) as host:
        yield host


@asynccontextmanager
async def with_outside(loops: Loops, settings: RolloutSettings) -> AsyncGenerator[Loops]:
    """The job's loops, of which the agent or environment outside of the worker is the default if there is one.

    Raises:
        UserInputError: It cannot be loaded.
    """
    agent, python_path = settings.outside, settings.python_path
    if settings.environment is not None:
        async with opened_environment_host(settings.environment, python_path) as environment_host:
            outside = LoadedLoop(
                run=EnvironmentLoop(environment_host, settings.environment).run,
                name=settings.environment.taskset,
                field=FIELD,
                built_in=True,
                uses_tools=False,
                reads_calls=False,
                outside=True,
                environment=True,
            )
            yield loops.led_by(outside)
        return
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
            outside=True,
            writes_prompts=True,
        )
        yield loops.led_by(outside)
