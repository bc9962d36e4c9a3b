"""Tool-call formats: how a model writes its calls, and how a turn is parsed.

A format is any object with the attributes and methods of `ToolCallFormat`; a subclass of it gets the defaults.
The worker chooses one from the chat template; the manifest's `agent.toolCallFormat` overrides the choice, with the name
of a built-in or the import path of a format of one's own. `kestrl.testing.formats.check_format` is its conformance
suite.

A format receives a turn as pieces: text, and a `Marker` for each control token. A marker that is a token of the
tokenizer is only recognised as that token: the same characters in text stay text. Any other marker is searched in the
text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kestrl.episode import Json

__all__ = ["Marker", "Schemas", "ToolCallFormat", "Turn", "WrittenCall"]

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schema of the parameters of each tool that is offered, by name."""


class Marker(str):
    """A structural piece of a turn."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """One tool call as the model wrote it, readable or not."""

    raw: str
    """Text between the markers."""
    name: str = ""
    """Name of the tool; empty when it could not be read."""
    arguments: Mapping[str, Json] | None = None
    """Arguments; None when they could not be read."""
    problem: str = ""
    """Message for the model why the call could not be read; empty when it could."""
    unfinished: bool = False
    """Whether the turn ended inside the call."""
    id: str = ""
    """Id that the model gave the call, in formats that have one; its result repeats it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A parsed turn."""

    content: str
    """Answer of the model without calls and reasoning."""
    calls: Sequence[WrittenCall] = ()


class ToolCallFormat(Protocol):
    """How tool calls are written in one family of chat templates."""

    name: str
    """Name in `agent.toolCallFormat` and in messages."""
    markers: Sequence[str]
    """Strings that structure a turn, including those of reasoning."""
    example: str
    """Instruction for the model how to write a call: `write ... with ... inside`."""
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    """Markers around reasoning, which is removed before `read`; None if there is no reasoning, or `read` handles it."""
    hints: Sequence[str] = ()
    """Strings that identify templates of this format that never write a call themselves; all must occur."""
    inner_ends: Sequence[str] = ()
    """Control tokens that end a part of a turn; sampling continues after them."""

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        """Parses a turn without its reasoning.

        Args:
            pieces: Text and `Marker`s, without the token that ended the turn.
            schemas: Parameter schemas of the offered tools, for formats whose values are untyped text.
            cut: Whether a limit ended the turn.
        """
        ...

    def readable(self, pieces: Sequence[str]) -> str | None:
        """A turn for people and rewards, with reasoning in `<think>` and calls in `<tool_call>`.

        Args:
            pieces: All pieces of the turn, reasoning included.

        Returns:
            The text, or None if the sampled text is readable as it is.
        """
        del pieces
        return None

    def write(self, calls: Sequence[tuple[str, Mapping[str, Json]]]) -> str:
        """The text of calls, as `read` reads it.

        Raises:
            ValueError: The format cannot represent these calls.
        """
        ...
