"""What a tool is: an ordinary Python function or class. Nothing here needs to be subclassed.

* A **function** is a tool without memory: its parameters are what the model may send. The manifest's `config` fixes some of
  them for the whole job; the model is not told of those.
* A **class** is a tool with a session: one instance per episode, made with the manifest's `config` and the scenario's
  `create_kwargs`; calling the instance is calling the tool. `close()`, if there is one, ends the session.
* An **environment** is a class whose methods are tools that share one instance per episode: those that the manifest lists under
  `methods`, or all public ones of a class without `__call__`. It is made with `config`; `reset(**create_kwargs)`, if there is one,
  begins the episode; `state()`, if there is one, gives the reward its final state as a JSON value (`Episode.environments`).

What `config` sets, no row can change. Each may be `async`. What is not runs in a thread of its own: the instance is made, called and closed in the same one, so a
database connection may stay in it. Calls of one session to the same tool or environment never overlap.

The JSON Schema comes from the type hints, descriptions from the docstring (Google style). A parameter marked
`Annotated[T, Hidden()]` is filled by the scenario's `execute_kwargs` and the model is not told of it; where `execute_kwargs`
name any other parameter, the scenario's value stands, whatever the model sent.

A tool returns text, a JSON value, or a `ToolResult`. It raises `ToolError` for what the model can mend; anything else it raises
is the tool's own failure and ends the episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Hidden", "ToolError", "ToolResult", "ToolSchema"]


class ToolError(Exception):
    """The model asked for something that cannot be done; the message goes to the model, which may mend it."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Marks a parameter that only the scenario fills: `path: Annotated[str, Hidden()]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """A tool's answer when text alone is not enough."""

    text: str
    """What the model sees."""
    final: bool = False
    """Whether the episode ends here."""
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts for the reward (`ToolCall.data`), never shown to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSchema:
    """A tool as the model is told of it."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON Schema of type object."""

    def to_openai(self) -> dict[str, Any]:
        """The form chat templates expect under `tools`."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }
