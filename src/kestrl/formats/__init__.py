"""Tool-call formats: how a model writes its calls, and how a turn is read.

A format is any object with the attributes and methods of `ToolCallFormat`; a subclass of it gets the defaults.
The worker chooses one from the chat template; the manifest's `agent.toolCallFormat` overrides the choice, with the name of a
built-in or the import path of a format of one's own. `kestrl.testing.formats.check_format` is its conformance suite.

A turn reaches a format as pieces: text, and `Marker`s where a control token of the tokenizer stands. A marker that the tokenizer has
as a token counts only as that token: text that merely spells it stays text. A marker that it does not have is found in the text.
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
    """A piece of a turn that structures it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """One tool call as the model wrote it, readable or not: none is dropped."""

    raw: str
    """What stood between the markers."""
    name: str = ""
    """Empty when it could not be read."""
    arguments: Mapping[str, Json] | None = None
    """None when they could not be read."""
    problem: str = ""
    """Why it could not be read, in words for the model; empty when it could."""
    unfinished: bool = False
    """Whether the turn ended inside the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn, read."""

    content: str
    """What the model says to whoever asked: without calls and reasoning."""
    calls: Sequence[WrittenCall] = ()


class ToolCallFormat(Protocol):
    """How tool calls are written in one family of chat templates."""

    name: str
    """As `agent.toolCallFormat` and messages have it."""
    markers: Sequence[str]
    """Strings that structure a turn, those of reasoning included."""
    example: str
    """How a call is written, as a sentence for the model: `write ... with ... inside`."""
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    """Markers around reasoning, which is taken out before `read`; None when there are none, or `read` does it."""
    hints: Sequence[str] = ()
    """Strings that a template has which asks for this format without ever writing a call itself; all must occur."""
    inner_ends: Sequence[str] = ()
    """Control tokens that end a part of a turn: sampling goes on behind them."""

    def read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        """Reads a turn without its reasoning.

        Args:
            pieces: Text and `Marker`s, without the token that ended the turn.
            schemas: Of the tools that are offered, for formats whose values have no types of their own.
            cut: Whether a limit ended the turn.
        """
        ...

    def write(self, calls: Sequence[tuple[str, Mapping[str, Json]]]) -> str:
        """The text of calls, as `read` reads it.

        Raises:
            ValueError: The format cannot say these.
        """
        ...
