"""The tools of the job: those of every provider in the manifest, under unique names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.compat.verl.imports import load
from kestrl.errors import KestrlError, SeveralProblems, UserInputError, text_of
from kestrl.tools import SandboxInUse, ToolError, ToolSchema
from kestrl.tools.provider import CodeProvider, ToolDefinition, ToolProvider, digest, is_code_provider
from kestrl_tools.environments.provider import EnvironmentProvider
from kestrl_tools.execution import guarded
from kestrl_tools.http.provider import HttpProvider
from kestrl_tools.process.provider import ProcessProvider
from kestrl_tools.python_provider import python_provider, warm_pool_of
from kestrl_tools.redacted import RedactedProvider, redactor_of
from kestrl_tools.tool_threads import ToolThreads

log = logging.getLogger(__name__)
LIST_SECONDS = 60.0
"""Time limit of listing the tools of a provider, which may start a server."""


@dataclass(frozen=True, slots=True)
class JobTool:
    """A tool of the job with its provider."""

    definition: ToolDefinition
    provider: ToolProvider
    of_server: bool = False
    """Whether a server lists it, which can change under the job."""

    @property
    def schema(self) -> ToolSchema:
        return self.definition.schema


def provider_of(entry: ToolEntry, field: str, threads: ToolThreads, *, folder: str | None = None) -> ToolProvider:
    """The provider of an entry of the manifest.

    Args:
        entry: The entry.
        field: Its place in the manifest, for messages.
        threads: Record of threads of tools that outlive their session.
        folder: Folder of the manifest, in which programs are started; None for the working directory.

    Raises:
        UserInputError: It cannot be used; the message has the field and the fix.
    """
    if entry.mcp is not None:
        from kestrl_tools.mcp.provider import McpProvider  # its SDK takes a second to import

        return RedactedProvider(McpProvider(entry, entry.mcp, folder, redactor_of(entry)), redactor_of(entry))
    if entry.http is not None:
        return RedactedProvider(HttpProvider(entry, entry.http, folder), redactor_of(entry))
    if entry.environment is not None:
        return EnvironmentProvider(entry, entry.environment, field, folder)
    if entry.process is not None:
        return ProcessProvider(entry, field, folder)
    tool_class = None if entry.use is None else load(entry.use, field=f"{field}.use")
    if is_code_provider(tool_class):
        return _code_provider(tool_class, entry, field)
    return python_provider(entry, field, threads)


def _code_provider(provider_class: type[CodeProvider], entry: ToolEntry, field: str) -> CodeProvider:
    if entry.methods is not None:
        raise UserInputError(f"{field}.methods: {entry.use} is one tool, without methods that could be some; remove it")
    claim = entry.claim
    try:
        return provider_class(entry.name, entry.config, None if claim is None else partial(warm_pool_of, claim))
    except UserInputError as error:
        raise UserInputError(f"{field}.use: {entry.use}: {error}") from error


async def load_tools(
    entries: Sequence[ToolEntry],
    threads: ToolThreads,
    *,
    folder: str | None = None,
    fields: Sequence[str] | None = None,
) -> dict[str, JobTool]:
    """Lists the tools of every provider, by name in manifest order; `stop_all` ends the providers.

    Args:
        entries: Entries of the manifest.
        threads: As in `provider_of`.
        folder: As in `provider_of`.
        fields: Place of each entry in the manifest; None if they are all of `spec.tools`.

    Raises:
        UserInputError: Tools cannot be used; one line each with the field and the fix. No provider is left running.
    """
    tools: dict[str, JobTool] = {}
    taken_names: set[str] = set()
    problems: list[str] = []
    places = fields or [field_of(index, entry) for index, entry in enumerate(entries)]
    providers: list[ToolProvider] = []
    try:
        for entry, field in zip(entries, places, strict=True):
            try:
                provider = provider_of(entry, field, threads, folder=folder)
                providers.append(provider)
                definitions = await _listed(provider, field)
            except UserInputError as error:
                problems.append(str(error))
                continue
            names = {tool.name for tool in definitions} | {entry.name}
            if clashing := names & taken_names:
                problems.append(f"{field}: there is another tool or environment named {', '.join(sorted(clashing))}")
            tools |= {tool.name: JobTool(tool, provider, entry.use is None) for tool in definitions}
            taken_names |= names
        if problems:
            raise SeveralProblems(problems)
    except BaseException:
        await stop_all(providers)
        raise
    return tools


def field_of(index: int, entry: ToolEntry) -> str:
    """Place of an entry in the manifest."""
    return "spec.environment" if entry.environment is not None else f"spec.tools[{index}]"


async def _listed(provider: ToolProvider, field: str) -> Sequence[ToolDefinition]:
    seconds = LIST_SECONDS
    if isinstance(provider, EnvironmentProvider):
        seconds += provider.start_seconds
    try:
        async with asyncio.timeout(seconds):
            definitions = await provider.list_tools()
    except TimeoutError:
        raise UserInputError(f"{field}: {provider.name}: did not list its tools within {seconds:g} s") from None
    except UserInputError as error:
        raise UserInputError(f"{field}.{error}") from error
    except KestrlError as error:
        raise UserInputError(f"{field}: {provider.name}: {text_of(error)}") from error
    names = [tool.name for tool in definitions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserInputError(f"{field}: {provider.name} lists several tools named {', '.join(twice)}")
    if not definitions:
        raise UserInputError(f"{field}: {provider.name} lists no tools")
    return definitions


def server_digests(tools: Mapping[str, JobTool]) -> dict[str, str]:
    """Digest of the offered tools of each server, by its name."""
    definitions_by_server: dict[str, list[ToolDefinition]] = {}
    for tool in tools.values():
        if tool.of_server:
            definitions_by_server.setdefault(tool.provider.name, []).append(tool.definition)
    return {name: digest(definitions) for name, definitions in definitions_by_server.items()}


def sandboxes_of(tools: Mapping[str, JobTool]) -> dict[str, SandboxInUse]:
    """Sandboxes of started tools that run code, by the name of the tool's entry."""
    return {
        provider.name: provider.sandbox
        for provider in providers_of(tools)
        if isinstance(provider, CodeProvider) and provider.sandbox is not None
    }


def unavailable(tools: Mapping[str, JobTool]) -> dict[str, int]:
    """1 for each server that cannot be called now, 0 for each other one, by its name."""
    servers = {tool.provider.name: tool.provider for tool in tools.values() if tool.of_server}
    return {name: int(bool(provider.health())) for name, provider in servers.items()}


def providers_of(tools: Mapping[str, JobTool]) -> list[ToolProvider]:
    """The providers of tools, in manifest order."""
    return list({id(tool.provider): tool.provider for tool in tools.values()}.values())


async def stop_all(providers: Sequence[ToolProvider]) -> None:
    """Stops providers in reverse order; a failure is logged."""
    for provider in reversed(providers):
        try:
            await guarded(provider.name, provider.stop())
        except (ToolError, KestrlError) as error:
            log.error("tool %s could not be stopped: %s", provider.name, text_of(error))
