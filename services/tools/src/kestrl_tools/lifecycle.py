"""The life of the job's providers: started before the first session, stopped after the last."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.errors import KestrlError, UserInputError, described, text_of
from kestrl.tools import ToolError
from kestrl.tools.provider import ToolProvider
from kestrl_tools.catalogue import JobTool, load_tools, providers_of, stop_all
from kestrl_tools.environments.provider import is_environment
from kestrl_tools.execution import guarded
from kestrl_tools.tool_threads import ToolThreads


@asynccontextmanager
async def loaded(
    entries: Sequence[ToolEntry],
    threads: ToolThreads,
    *,
    folder: str | None = None,
    fields: Sequence[str] | None = None,
) -> AsyncGenerator[Mapping[str, JobTool]]:
    """The tools of the job; their providers are stopped at the end. Arguments are as in `load_tools`.

    Raises:
        UserInputError: A tool cannot be used; the message has the field and the fix.
    """
    tools = await load_tools(entries, threads, folder=folder, fields=fields)
    try:
        yield tools
    finally:
        await stop_all(providers_of(tools))


async def start_all(tools: Mapping[str, JobTool]) -> None:
    """Starts the providers.

    Raises:
        UserInputError: A tool cannot work here; the message names it.
    """
    for provider in providers_of(tools):
        await start(provider)


async def start(provider: ToolProvider) -> None:
    """Starts a provider; raises as `start_all` does."""
    name = provider.name
    place, hook = f"tool {name}: config", f"tool {name}: start_service"
    if is_environment(provider):
        place = hook = "spec.environment"
    try:
        await guarded(name, provider.start())
    except UserInputError as error:
        raise UserInputError(f"{place}: {error}") from error
    except ToolError as error:
        raise UserInputError(f"{hook}: {described(error)}") from error
    except KestrlError as error:
        raise UserInputError(f"{hook}: {text_of(error)}") from error
