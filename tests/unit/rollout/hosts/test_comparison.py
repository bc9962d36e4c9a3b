"""Both records of an episode of an environment that runs it itself."""

from __future__ import annotations

from typing import Any

import pytest

from kestrl.episode import Turn
from kestrl_rollout.hosts.comparison import difference


def turn(text: str, tokens: int = 3) -> Turn:
    place: Any = {"index": 0, "row": 0, "start": 10, "end": 10 + tokens}
    return Turn(**place, text=text, finish_reason="stop", engine="e", policy="p", seconds=0.1)


def record(content: str | None, tokens: int | None = 3, calls: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"content": content, "tokens": tokens, "calls": list(calls)}


CALL = '<think>\nwhy\n</think>\n\nI look.\n<tool_call>{"name": "look", "arguments": {}}</tool_call>\nWait.'


@pytest.mark.parametrize(
    ("recorded", "turns"),
    [
        ([], []),
        ([record("a"), record("b", 4)], [turn("b", 4), turn("a")]),  # made at once
        ([record("I look.\nWait.", calls=("look",))], [turn(CALL)]),
        ([record(None, None)], [turn("")]),
    ],
)
def test_the_same_turns_are_no_difference(recorded: list[dict[str, Any]], turns: list[Turn]) -> None:
    assert difference(recorded, turns) is None


@pytest.mark.parametrize(
    ("recorded", "turns", "message"),
    [
        ([record("a")], [], "it has recorded 1 turns of the model, and 0 were sampled"),
        ([record("a")], [turn("a"), turn("b")], "it has recorded 1 turns of the model, and 2 were sampled"),
        ([record("a"), record("a")], [turn("a"), turn("b")], "turn 1 of its record is none that was sampled: 'a'"),
        ([record("a", 4)], [turn("a", 3)], "turn 0 of its record"),
        ([record("a", calls=("drop",))], [turn("a")], "turn 0 of its record"),
        ([record("a"), record("b")] * 2_001, [turn("b"), turn("a")] * 2_001, "turn 0 of its record"),
    ],
)
def test_a_difference_is_named(recorded: list[dict[str, Any]], turns: list[Turn], message: str) -> None:
    found = difference(recorded, turns)
    assert found is not None
    assert message in found
