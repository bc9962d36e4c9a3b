"""Histories that clients send back: which are the same, which continue a turn, and why others do not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kestrl._shared.text.chat import Message
from kestrl_rollout.history.canonical import BILLING, ChatHistory, canonical, canonical_arguments
from kestrl_rollout.history.threads import ForkReason, KnownTurn, Threads

SYSTEM = {"role": "system", "content": "You are a clerk."}
USER = {"role": "user", "content": "How many?"}
TOOL = {"type": "function", "function": {"name": "count", "description": "", "parameters": {}}}


def called(*arguments: str, content: Any = None, **ids: str) -> dict[str, Any]:
    """A turn with calls, whose ids are `c0`, `c1` and so on."""
    calls = [
        {"id": ids.get(f"c{place}", f"c{place}"), "function": {"name": "count", "arguments": text}}
        for place, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, call_id: str = "c0") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def history(*messages: dict[str, Any], tools: Sequence[dict[str, Any]] = (TOOL,)) -> ChatHistory:
    return ChatHistory(messages=messages, tools=tools)


def known(threads: Threads, asked: ChatHistory, *echoes: dict[str, Any], reasoning: str | None = None) -> KnownTurn:
    message = Message(role="assistant", text="", reasoning=reasoning)
    turn = KnownTurn(index=0, row=0, end=9, message=message, call_ids=(), places=())
    threads.add(threads.match(asked), echoes, turn)
    return turn


SPELLINGS = [
    '{"item": "lämp",  "n": 2}',
    '{"n":2,"item":"l\\u00e4mp"}',
    '{"item":"lämp","n":2.0}',
    {"item": "lämp", "n": 2},
]


@pytest.mark.parametrize("arguments", SPELLINGS)
def test_arguments_have_one_spelling(arguments: Any) -> None:
    assert canonical_arguments(arguments) == '{"item":"lämp","n":2}'


@pytest.mark.parametrize("arguments", ['{"n": 2.5}', '{"n": "2"}', '{"n": true}', '{"n": [2]}', "{", '{"n": NaN}'])
def test_other_arguments_are_others(arguments: str) -> None:
    assert canonical_arguments(arguments) != canonical_arguments('{"n": 2}')


def test_a_turn_is_continued_in_any_spelling() -> None:
    threads = Threads()
    turn = known(threads, history(SYSTEM, USER), called('{"n": 1}', '{"n": 2}', content=""), reasoning="Hm.")
    for echo in (
        called('{"n":1}', '{"n":2}', content=None),
        called('{"n": 1.0}', '{ "n": 2 }', content=" "),
        {**called('{"n": 1}', '{"n": 2}'), "reasoning": " Hm.\n"},
        {**called('{"n": 1}', '{"n": 2}', content=""), "cache_control": {"type": "ephemeral"}},
        called('{"n": 1}', '{"n": 2}', c0="other", c1="ids"),
    ):
        ids = [call["id"] for call in echo["tool_calls"]]
        match = threads.match(history(SYSTEM, USER, echo, result("1", ids[0]), result("2", ids[1])))
        assert (match.turn, match.since) == (turn, 2), echo
    deeper = history(SYSTEM, USER, called('{"n": 1}', '{"n": 2}'), result("1", "c0"), result("2", "c1"))
    second = known(threads, deeper, {"role": "assistant", "content": "Two."})
    renamed = called('{"n": 1}', '{"n": 2}', c0="c1", c1="c0")
    again = [SYSTEM, USER, renamed, result("1", "c1"), result("2", "c0"), {"role": "assistant", "content": "Two."}]
    match = threads.match(history(*again, {"role": "user", "content": "Sure?"}))
    assert (match.turn, match.since, set(match.known)) == (second, 5, {2, 5})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (history(SYSTEM, {**USER, "content": "Title?"}), ForkReason.NEW_CONVERSATION),
        (history({**USER, "content": "Title?"}, tools=()), ForkReason.NEW_CONVERSATION),
        (history(SYSTEM, USER, called("{}"), result("1"), tools=[TOOL, TOOL]), ForkReason.TOOLS_CHANGED),
        (history(SYSTEM, USER, called("{}"), result("1"), tools=()), ForkReason.TOOLS_CHANGED),
        (history({**SYSTEM, "content": "12:01"}, USER, called("{}"), result("1")), ForkReason.SYSTEM_CHANGED),
        (history(USER, called("{}"), result("1")), ForkReason.SYSTEM_CHANGED),
        (history(SYSTEM, USER, called('{"n": 1}'), result("1")), ForkReason.EDITED_ASSISTANT),
        (history(SYSTEM, USER, called("{}", content="Hm"), result("1")), ForkReason.EDITED_ASSISTANT),
        (history(SYSTEM, USER, {"role": "user", "content": "Summary: one."}), ForkReason.COMPACTED),
        (history(SYSTEM, USER), ForkReason.RESAMPLED),
        (history(SYSTEM, USER, called("{}"), result("1")), ForkReason.RESAMPLED),
        (history(SYSTEM, USER, called("{}"), result("7")), ForkReason.BRANCHED),
        (history(SYSTEM, USER, {**called("{}"), "reasoning": "No."}, result("1")), ForkReason.UNPROVEN),
    ],
)
def test_a_history_that_continues_no_turn_has_a_reason(changed: ChatHistory, reason: ForkReason) -> None:
    threads = Threads()
    assert threads.match(history(SYSTEM, USER)).reason is None
    known(threads, history(SYSTEM, USER), called("{}"), reasoning="Hm.")
    known(threads, history(SYSTEM, USER, called("{}"), result("1")), {"role": "assistant", "content": "One."})
    assert threads.match(changed).reason is reason


def test_a_turn_is_known_where_the_conversation_before_it_is_not() -> None:
    threads = Threads()
    turn = known(threads, history(SYSTEM, USER), called("{}"))
    match = threads.match(history({**SYSTEM, "content": "12:01"}, USER, called("{ }"), result("1")))
    assert (match.turn, match.known) == (None, {2: turn})


def test_a_billing_line_is_no_part_of_the_system_prompt() -> None:
    first, second = ({"role": "system", "content": f"{BILLING}: {n}\nYou are a clerk."} for n in (1, 2))
    assert canonical(first) == canonical(second) == canonical(SYSTEM)
    assert canonical({**USER, "content": f"{BILLING}: 1"}) != canonical({**USER, "content": f"{BILLING}: 2"})


def test_messages_do_not_run_into_each_other() -> None:
    parts = [json.dumps({"role": "user"}), "x"]
    one = canonical({"role": "user", "content": "".join(parts)})
    assert one != canonical({"role": "user", "content": parts[0]}) + canonical({"role": "user", "content": parts[1]})
