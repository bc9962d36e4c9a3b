"""System messages where a template has one place for them."""

from __future__ import annotations

from typing import Any

import pytest

from kestrl._shared.text.chat_model import ChatModel
from kestrl_rollout.history.system_messages import joined, takes_several


def read(text: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[each[0]], "content": each} for each in text.split()]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ("s1 u1 a1 u2", ["s1", "u1", "a1", "u2"]),
        ("s1 s2 u1", ["s1\n\ns2", "u1"]),
        ("s1 u1 s2", ["s1", "u1\n\ns2"]),
        ("u1 s1 s2 a1", ["u1\n\ns1\n\ns2", "a1"]),
        ("s1 u1 a1 s2 u2 s3 a2", ["s1", "u1", "a1", "s2\n\nu2\n\ns3", "a2"]),
        ("u1 a1 t1 s1", ["u1", "a1", "t1", "s1"]),
        ("u1 u2", ["u1", "u2"]),
    ],
)
def test_later_ones_are_paragraphs_of_their_neighbours(messages: str, expected: list[str]) -> None:
    placed = joined(read(messages))
    assert [message["content"] for message in placed] == expected
    assert [message["role"] for message in placed[1:]].count("system") == 0


def test_a_beginning_stays_the_same_behind_each_turn() -> None:
    whole = read("s1 s2 u1 s3 a1 t1 s4 u2 a2 s5")
    for end in (4, 8):
        beginning = joined(whole[:end])
        assert joined(whole)[: len(beginning)] == beginning


def test_whether_a_template_takes_several_is_seen(chat_model: ChatModel) -> None:
    assert not takes_several(chat_model.chat)
