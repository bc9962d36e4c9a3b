"""The seam of tool providers: a source of tools with a life cycle, such as a Python class or an MCP server.

The tool service drives every provider alike: `list_tools` once, `start` before the first session, `open` once per
episode, `stop` at the end. It validates the model's arguments against the listed schemas, bounds every step by the
deadline of a call, cancels what runs past it, and never runs two calls of one session at the same time unless the
session allows it. `kestrl.testing.tool_provider` has the conformance suite.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, runtime_checkable

from kestrl.errors import ToolFailure
from kestrl.tools import SandboxInUse, ToolSchema, WarmPool
from kestrl.tools.arguments import Arguments

Kwargs = Mapping[str, Any]
NO_KWARGS: Kwargs = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """One tool of a provider."""

    schema: ToolSchema
    arguments: Arguments
    """Check of the model's arguments."""
    fillable: frozenset[str] | None = None
    """Allowed names in `execute_kwargs`; None allows any."""
    required: frozenset[str] = frozenset()
    """Required names in `execute_kwargs`."""
    fixed: frozenset[str] = frozenset()
    """Names set by the manifest for every episode."""

    @property
    def name(self) -> str:
        return self.schema.name

    def check_fill(self, execute_kwargs: Kwargs) -> None:
        """Checks the scenario's `execute_kwargs`.

        Raises:
            ToolFailure: They are invalid.
        """
        refuse_fixed(self.name, "execute_kwargs", self.fixed, execute_kwargs)
        unknown = [] if self.fillable is None else sorted(set(execute_kwargs) - self.fillable)
        if unknown:
            raise kwargs_failure(self.name, "execute_kwargs", f"it has no parameter {', '.join(unknown)}")
        missing_parameters = sorted(self.required - set(execute_kwargs))
        if missing_parameters:
            raise kwargs_failure(
                self.name, "execute_kwargs", f"{', '.join(missing_parameters)} is hidden from the model and must be set"
            )


class ProviderSession(Protocol):
    """The tools of a provider in one episode."""

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        """Calls a tool.

        Args:
            tool: Name of a listed tool.
            arguments: Validated arguments of the model.
            filled: Arguments of the scenario, which replace those of the model.

        Returns:
            Text, a JSON value, or a `ToolResult`.

        Raises:
            ToolError: A message for the model, which may correct the call.
            KestrlError: A typed failure; `ToolFailure` for one of the tool, a retryable one for one that another
                attempt may not meet. The episode fails and is never scored.
        """
        ...

    @property
    def prompt(self) -> str:
        """Text that ends the row's prompt; empty if there is none."""
        ...

    async def state(self) -> object:
        """Final state for rewards as a JSON value, if the provider has one."""
        ...

    async def close(self) -> None:
        """Releases the session; called once, also after a call that was cancelled."""
        ...


class ToolProvider(Protocol):
    """A source of tools. Its methods run on the event loop of the tool service and must not block it."""

    @property
    def name(self) -> str:
        """Name in rows, for `create_kwargs`."""
        ...

    @property
    def environment(self) -> bool:
        """Whether a row offers all tools of the provider by its name."""
        ...

    @property
    def has_state(self) -> bool:
        """Whether sessions have a state for the reward."""
        ...

    @property
    def has_prompt(self) -> bool:
        """Whether sessions may have text for the prompt, so that they are opened before the first turn."""
        ...

    async def list_tools(self) -> Sequence[ToolDefinition]:
        """The tools, in a fixed order; called once, before anything else. It may connect to a server.

        Raises:
            UserInputError: The provider cannot be used; the message begins with the rest of the manifest field
                and ends with the fix.
        """
        ...

    def check(self, create_kwargs: Kwargs) -> None:
        """Checks the scenario's `create_kwargs` without opening a session.

        Raises:
            ToolFailure: They are invalid.
        """
        ...

    async def start(self) -> None:
        """Prepares what sessions share; called once, before the first session.

        Raises:
            UserInputError: The provider cannot work here.
        """
        ...

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        """Opens the session of an episode.

        Raises:
            ToolFailure: `create_kwargs` are invalid, or the session cannot be made.
            KestrlError: As `ProviderSession.call` does.
        """
        ...

    def health(self) -> str:
        """The problem that prevents calls now; empty if there is none known."""
        ...

    async def stop(self) -> None:
        """Releases everything; called once, last, also if `list_tools` or `start` failed."""
        ...


@runtime_checkable
class CodeProvider(ToolProvider, Protocol):
    """A provider whose tool runs code in a sandbox. A class that names this one as its base is made a provider where
    `tools[].use` names it, with the manifest's `config`.
    """

    def __init__(self, name: str, config: Kwargs, warm_pool: Callable[[], WarmPool] | None) -> None:
        """Describes the provider; `warm_pool` gives what `sandbox.claim` names when the service starts.

        Raises:
            UserInputError: The config does not fit.
        """
        ...

    @property
    def sandbox(self) -> SandboxInUse | None:
        """Where code runs; None before `start`, or if it runs none."""
        ...


def is_code_provider(candidate: object) -> TypeGuard[type[CodeProvider]]:
    """Whether an object is a class with `CodeProvider` as its base; methods of the same names do not make one."""
    return inspect.isclass(candidate) and CodeProvider in candidate.__mro__


def digest(tools: Sequence[ToolDefinition]) -> str:
    """SHA-256 of names, descriptions and schemas."""
    definitions = [[tool.name, tool.schema.description, dict(tool.schema.parameters)] for tool in tools]
    return hashlib.sha256(json.dumps(definitions, sort_keys=True).encode()).hexdigest()


def kwargs_failure(tool: str, which: str, reason: str) -> ToolFailure:
    """Failure of a row whose `create_kwargs` or `execute_kwargs` are invalid."""
    return ToolFailure(f"{tool}: the row's {which} do not fit: {reason}", code="tool_kwargs_invalid")


def refuse_fixed(tool: str, which: str, fixed: Collection[str], given: Kwargs) -> None:
    """Refuses values of rows for names set by the manifest, which apply to every episode.

    Raises:
        ToolFailure: A row sets such a name.
    """
    conflicts = sorted(set(fixed) & set(given))
    if conflicts:
        raise kwargs_failure(
            tool,
            which,
            f"the manifest's config sets {', '.join(conflicts)} for every episode; remove it from one of the two",
        )
