"""The environment of a job as a provider of tools: processes of its own interpreter, bounded sessions, its failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kestrl._shared.plan.settings.tools import EnvironmentEntry, ToolEntry
from kestrl.episode import ACT
from kestrl.errors import Boundary, KestrlError, ToolFailure, text_of
from kestrl.tools.provider import Kwargs, ProviderSession, ToolDefinition, ToolProvider
from kestrl_tools.process.provider import ProcessProvider, ProcessSession

PREFIX = "tool_"
"""Beginning of codes of failures of tools, which those of an environment do not have: environment/raised."""
T = TypeVar("T")


@contextmanager
def environment_failures() -> Generator[None]:
    """Gives failures of tools the boundary of the environment."""
    try:
        yield
    except KestrlError as error:
        if error.boundary is not Boundary.TOOL:
            raise
        raise as_environment(error) from error


def as_environment(error: KestrlError) -> ToolFailure:
    """A failure of a tool as one of the environment."""
    code = error.code.removeprefix(PREFIX)
    return ToolFailure(text_of(error), code=code, retryable=error.retryable, boundary=Boundary.ENVIRONMENT)


class EnvironmentProvider:
    """An environment, of which every episode has a process."""

    environment = True

    def __init__(self, entry: ToolEntry, environment: EnvironmentEntry, field: str, folder: str | None) -> None:
        """Describes it; arguments are as of `ProcessProvider`."""
        self.name = entry.name
        self._processes = ProcessProvider(entry, field, folder)
        self._places = asyncio.Semaphore(environment.sessions)
        self._sessions, self._wait_seconds = environment.sessions, environment.wait_seconds
        self.start_seconds = environment.start_seconds

    @property
    def has_state(self) -> bool:
        return self._processes.has_state

    @property
    def has_prompt(self) -> bool:
        return True  # a process is forked in any case, and a row may have no prompt

    @property
    def has_reward(self) -> bool:
        return self._processes.has_reward

    @property
    def acts(self) -> bool:
        """Whether its tool `act` takes the model's turns."""
        return self._processes.acts

    async def list_tools(self) -> Sequence[ToolDefinition]:
        return await self._processes.list_tools()

    def check(self, create_kwargs: Kwargs) -> None:
        with environment_failures():
            self._processes.check(create_kwargs)

    async def start(self) -> None:
        await self._processes.start()

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        """Opens a session once there is a place.

        Raises:
            ToolFailure: There is none in time, which another attempt may find; or the session cannot be made.
        """
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._places.acquire()
        except TimeoutError:
            message = f"{self.name}: all {self._sessions} sessions were busy for {self._wait_seconds:g} s"
            raise ToolFailure(message, code="capacity", retryable=True, boundary=Boundary.ENVIRONMENT) from None
        try:
            with environment_failures():
                return EnvironmentSession(await self._processes.open(create_kwargs), self._places.release)
        except BaseException:
            self._places.release()
            raise

    def health(self) -> str:
        return self._processes.health()

    async def stop(self) -> None:
        await self._processes.stop()


class EnvironmentSession:
    """One episode of an environment."""

    def __init__(self, session: ProcessSession, release: Callable[[], None]) -> None:
        self._session, self._release = session, release

    @property
    def prompt(self) -> str:
        return self._session.prompt

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        return await _typed(self._session.call(tool, arguments, filled))

    async def state(self) -> object:
        return await _typed(self._session.state())

    async def gold(self) -> object:
        """What a perfect player does; None where the environment does not say."""
        return await _typed(self._session.gold())

    async def close(self) -> None:
        try:
            await _typed(self._session.close())
        finally:
            self._release()


async def _typed(work: Coroutine[Any, Any, T]) -> T:
    with environment_failures():
        return await work


def takes_turns(provider: ToolProvider, tool: str) -> bool:
    """Whether a tool takes the model's turns, and so is not offered to the model."""
    return isinstance(provider, EnvironmentProvider) and provider.acts and tool == ACT


def is_environment(provider: ToolProvider) -> bool:
    """Whether a provider is the environment of the job."""
    return isinstance(provider, EnvironmentProvider)
