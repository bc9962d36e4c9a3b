"""Conversations with a mark in place of every text, in the two forms in which templates take tool results.

Most templates write a tool's result behind any turn of the model. Others (gpt-oss's, Mistral's) accept it only behind a
message with `tool_calls`. A conversation here has the model's turns as sampled tokens, not as calls, so for those
templates a turn with results gets one synthetic call for each result. `Chat` replaces what the template writes for the
synthetic calls by the sampled tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from kestrl._shared.text.chat_template import Slot, id_mark, mark

Shape = tuple[tuple[str, bool], ...]
"""What a template sees of a marked conversation: each message's role, and whether it is empty (for an assistant:
whether it has reasoning)."""

CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Call ids that are repeated to the model as they are; a template may write them into JSON without escaping."""


def marked(conversation: Shape, *, with_calls: bool) -> list[dict[str, Any]]:
    """The messages for a template.

    Args:
        conversation: The shape.
        with_calls: Whether turns with tool results are given as `tool_calls`.
    """
    turns = dict(call_turns(conversation)) if with_calls else {}
    return [
        call_message(index, turns[index]) if index in turns else _message(index, role, flag, with_calls=with_calls)
        for index, (role, flag) in enumerate(conversation)
    ]


def call_turns(conversation: Shape) -> Iterator[tuple[int, int]]:
    """Index of each turn of the model with tool results behind it, and the number of results."""
    for index, (role, _) in enumerate(conversation):
        results = sum(1 for _ in takewhile(lambda message: message[0] == "tool", conversation[index + 1 :]))
        if role == "assistant" and results:
            yield index, results


def call_message(index: int, results: int) -> dict[str, Any]:
    """The turn `index` as one synthetic call for each of the results behind it."""
    calls: list[dict[str, Any]] = [
        {"id": id_mark(at), "type": "function", "function": {"name": mark(f"n{at}"), "arguments": {}}}
        for at in range(index + 1, index + 1 + results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _message(index: int, role: str, flag: bool, *, with_calls: bool) -> dict[str, Any]:
    if role == "assistant":
        # Reasoning goes where the model wrote it: templates that handle reasoning look for these tags, others keep it
        # as text.
        thought = f"<think>\n{mark(f'r{index}')}\n</think>\n\n" if flag else ""
        return {"role": role, "content": thought + mark(f"a{index}")}
    message = {"role": role, "content": "" if flag else mark(f"m{index}", edges=True)}
    if with_calls and role == "tool":
        message |= {"tool_call_id": id_mark(index), "name": mark(f"n{index}")}
    return message


def call_id(slot: Slot, own_id: str) -> str:
    """The id of a call: the model's own, or if it wrote none that can be repeated, nine digits."""
    return own_id if CALL_ID.fullmatch(own_id) else f"{int(slot.name[1:]):09d}"
