"""An episode as exchanges, one a turn, and two episodes aligned by turn. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kestrl._app.episodes.difference import first_difference
from kestrl.episode import Episode, ToolCall, Turn

LONGEST = 100_000
"""Maximum characters of a shown text."""


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message as text."""

    role: str
    text: str
    calls: str
    """Tool calls in the message as JSON, where no attempted call of the turn is stored; usually empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A turn of the model with the messages that answer it, or the prompt."""

    start: int
    """Number of its first message."""
    messages: Sequence[ShownMessage]
    turn: Turn | None
    """None of the prompt, and where messages do not follow the turns."""
    calls: Sequence[ToolCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedTurn:
    """An exchange and the one beside it."""

    number: int
    """0 is the prompt."""
    left: Exchange | None
    right: Exchange | None
    differs: bool
    """Whether it has the first difference."""
    opened: bool


def exchanges(episode: Episode, prompt: int) -> Sequence[Exchange]:
    """The exchanges of an episode, the prompt first.

    Args:
        episode: The episode.
        prompt: Messages of the scenario's prompt.
    """
    turns = [turn for turn in episode.turns if episode.main_row is None or turn.row == episode.main_row]
    begins = [number for number, message in enumerate(episode.messages) if _begins(message, number, prompt)]
    if not begins and turns:  # an agent without messages of its own
        first = _exchange(episode, 0, len(episode.messages), None)
        return [first, *(_of_turn(episode, turn, len(episode.messages)) for turn in turns)]
    matched: Sequence[Turn | None] = turns if len(turns) == len(begins) else [None] * len(begins)
    ends = [*begins[1:], len(episode.messages)]
    opening = _exchange(episode, 0, begins[0] if begins else len(episode.messages), None)
    turn_exchanges = [
        _exchange(episode, start, end, turn) for start, end, turn in zip(begins, ends, matched, strict=True)
    ]
    return [opening, *turn_exchanges]


def _begins(message: Mapping[str, Any], number: int, prompt: int) -> bool:
    return number >= prompt and message.get("role") == "assistant"


def _exchange(episode: Episode, start: int, end: int, turn: Turn | None) -> Exchange:
    calls = () if turn is None else tuple(call for call in episode.tool_calls if call.turn == turn.index)
    messages = [_shown(message, with_calls=not calls) for message in episode.messages[start:end]]
    if calls:  # a stored call has its result
        messages = [message for message in messages if message.role != "tool"]
    return Exchange(start=start, messages=messages, turn=turn, calls=calls)


def _of_turn(episode: Episode, turn: Turn, start: int) -> Exchange:
    calls = tuple(call for call in episode.tool_calls if call.turn == turn.index)
    message = ShownMessage("assistant", cut(turn.text), "")
    return Exchange(start=start, messages=[message], turn=turn, calls=calls)


def _shown(message: Mapping[str, Any], *, with_calls: bool) -> ShownMessage:
    calls = message.get("tool_calls") if with_calls else None
    return ShownMessage(str(message.get("role", "?")), cut(text(message.get("content"))), cut(text(calls or "")))


def text(content: Any) -> str:
    """Text of a JSON value: a string as it is."""
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, indent=1)


def cut(text: str) -> str:
    """The beginning of a text, with the number of characters that are left out."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} [{len(text) - LONGEST} more characters]"


def difference_place(conversation: Sequence[Exchange], one: Episode, other: Episode | None) -> int | None:
    """Number of the exchange with the first different message; None if all are equal, or nothing is beside it."""
    first = None if other is None else first_difference(one, other)
    if first is None:
        return None
    return max((number for number, exchange in enumerate(conversation) if exchange.start <= first), default=0)


def aligned(
    left: Sequence[Exchange], right: Sequence[Exchange], *, differs: int | None, opened: int | None
) -> Sequence[AlignedTurn]:
    """Two conversations side by side.

    Args:
        left: The episode.
        right: The one beside it; empty if there is none.
        differs: Number of the exchange with the first difference.
        opened: Index of the turn that is opened.
    """
    return [
        AlignedTurn(
            number=number,
            left=left_exchange,
            right=right_exchange,
            differs=number == differs,
            opened=left_exchange is not None and left_exchange.turn is not None and left_exchange.turn.index == opened,
        )
        for number, (left_exchange, right_exchange) in enumerate(zip_longest(left, right))
    ]
