"""Tools: ordinary Python functions or classes. Nothing here needs to be subclassed.

* A **function** is a stateless tool: its parameters are the arguments of the model. The manifest's `config` sets some
  of them for the whole job; these are hidden from the model.
* A **class** is a tool with a session: one instance per episode, made with the manifest's `config` and the scenario's
  `create_kwargs`; calling the instance is calling the tool. `close()`, if there is one, ends the session.
* An **environment** is a class whose methods are tools that share one instance per episode: those that the manifest
  lists under `methods`, or all public ones of a class without `__call__`. It is made with `config`;
  `reset(**create_kwargs)`, if there is one, begins the episode; `state()`, if there is one, gives the reward its final
  state as a JSON value (`Episode.environments`).

Rows cannot override values of `config`. Each of these may be `async`. An instance that is not runs in a thread of its
own: it is created, called and closed in the same thread, so it may keep a database connection. Calls of one session to
the same tool or environment never overlap.

The JSON Schema comes from the type hints, descriptions from the docstring (Google style). A parameter marked
`Annotated[T, Hidden()]` is set by the scenario's `execute_kwargs` and hidden from the model; for any other parameter in
`execute_kwargs`, the scenario's value overrides that of the model.

A tool returns text, a JSON value, or a `ToolResult`. It raises `ToolError` for what the model can fix; any other
exception is a failure of the tool and ends the episode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Hidden", "SandboxInUse", "ToolError", "ToolResult", "ToolSchema", "WarmPool"]


class ToolError(Exception):
    """The request of the model cannot be fulfilled; the message goes to the model, which may correct the request."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Marks a parameter that only the scenario sets: `path: Annotated[str, Hidden()]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a tool with more than text."""

    text: str
    """Text for the model."""
    final: bool = False
    """Whether the episode ends."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts for the reward (`ToolCall.data`), never shown to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInUse:
    """The sandbox in which a tool runs code, for the status of the job; a class returns it from `start_service`."""

    backend: str
    """Name of the back-end, such as zygote."""
    isolation: str
    """What isolates the code on this node, such as namespaces."""

    def __str__(self) -> str:
        return f"{self.backend}, isolates by {self.isolation}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPool:
    """A warm pool of sandboxes of agent-sandbox that the manifest names (`tools[].sandbox.claim`): the argument
    `warm_pool` of the tool's `start_service`.
    """

    name: str
    """Name of the SandboxWarmPool, in the namespace of the job."""
    token: str = field(repr=False)
    """Bearer token of `kestrl sandbox serve` in its pods."""
    port: int
    """Port of that server."""
    bind_seconds: float
    """Time in which a claim has to have a sandbox that answers: less than the deadline of a call."""
    use_seconds: float
    """Longest time for which one sandbox gets new runs: the deadline of an episode."""
    keep_seconds: float
    """Time after which the cluster deletes a claim in any case, also when nobody is left to release it."""
    read_token: Callable[[], str] | None = field(default=None, repr=False, compare=False)
    """Reads the present token, which changes when the Secret does; None where it never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """Definition of a tool for the model."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of type object."""

    def to_openai(self) -> dict[str, Any]:
        """Form for `tools` of chat templates."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }
