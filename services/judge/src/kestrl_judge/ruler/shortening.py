"""Shortening of a comparison to a budget of tokens: the end of each part is kept, and what is removed is marked.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrl.episode import Json
from kestrl_judge.ruler.escaping import encode, estimated_tokens
from kestrl_judge.ruler.trajectories import Comparison, Message, Trajectory

REMOVED_MESSAGES = "({count} earlier messages removed by the grading program to fit its limit)"
REMOVED_TEXT = "({count} characters removed by the grading program to fit its limit) "
SMALLEST_SHARE = 40
"""Tokens below which a part cannot be shown in a useful way."""


class TooLarge(Exception):
    """Not even the ends of all trajectories fit the budget."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """A comparison that fits, and what was shortened."""

    comparison: Comparison
    parts: tuple[str, ...] = ()
    """`context`, `tools`, and the first episode id of each shortened trajectory."""


def shorten(comparison: Comparison, tokens: int) -> Shortened:
    """Shortens a comparison to a number of estimated tokens. Parts below their fair share stay whole.

    Raises:
        TooLarge: The budget leaves less than `SMALLEST_SHARE` tokens for a part.
    """
    sizes = [
        _size(list(comparison.context)),
        _size(list(comparison.tools)),
        *(_size(trajectory.content()) for trajectory in comparison.trajectories),
    ]
    if sum(sizes) <= tokens:
        return Shortened(comparison)
    limit = fair_share(sizes, tokens)
    if limit < SMALLEST_SHARE:
        raise TooLarge(f"{len(comparison.trajectories)} trajectories do not fit {tokens} tokens")
    parts: list[str] = []
    context, tools = comparison.context, comparison.tools
    if sizes[0] > limit:
        context = tail(context, limit)
        parts.append("context")
    if sizes[1] > limit:
        names: list[Json] = [_name(tool) for tool in tools]
        tools = [{"names": names}] if _size(names) <= limit else []
        parts.append("tools")
    trajectories: list[Trajectory] = []
    for size, trajectory in zip(sizes[2:], comparison.trajectories, strict=True):
        if size > limit:
            parts.append(trajectory.episode_ids[0])
            room = limit - _size({"messages": [], "facts": dict(trajectory.facts)})
            trajectories.append(replace(trajectory, messages=tail(trajectory.messages, room)))
        else:
            trajectories.append(trajectory)
    return Shortened(Comparison(context=context, tools=tools, trajectories=trajectories), tuple(parts))


def fair_share(sizes: Sequence[int], tokens: int) -> int:
    """Largest limit such that the sizes, each cut to the limit, fit the tokens."""
    remaining = tokens
    ordered = sorted(sizes)
    for position, size in enumerate(ordered):
        share = remaining // (len(ordered) - position)
        if size > share:
            return max(0, share)
        remaining -= size
    return ordered[-1] if ordered else 0


def tail(messages: Sequence[Message], tokens: int) -> list[Message]:
    """The last messages that fit; of the first of them, the end of its text."""
    newest_messages: list[Message] = []
    room = tokens - _size([_notice(len(messages))])
    for message in reversed(messages):
        size = _size(message) + 1
        if size > room:
            cut = _cut(message, room)
            if cut is not None:
                newest_messages.insert(0, cut)
            break
        newest_messages.insert(0, message)
        room -= size
    removed = len(messages) - len(newest_messages)
    return [_notice(removed), *newest_messages] if removed else newest_messages


def _cut(message: Message, tokens: int) -> Message | None:
    """The message with the end of its text that fits; None if nothing useful does."""
    text = message.get("content")
    if not isinstance(text, str):
        return None
    keep = min(len(text), 3 * tokens)  # a token has at most three of the estimate's characters
    while keep >= 1:
        notice = REMOVED_TEXT.format(count=len(text) - keep)
        cut = {**message, "content": notice + text[len(text) - keep :]}
        if _size(cut) <= tokens:
            return cut
        keep = keep * 4 // 5
    return None


def _notice(count: int) -> Message:
    return {"role": "notice", "content": REMOVED_MESSAGES.format(count=count)}


def _name(tool: Message) -> Json:
    function: Any = tool.get("function", tool)
    return function.get("name", "")


def _size(value: Json) -> int:
    return estimated_tokens(encode(value))
