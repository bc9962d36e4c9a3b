"""Rows of conversations: their forms, ReTool's text as turns, and what is refused by field."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kestrl.data.conversations import CODE_INTERPRETER, RefusedConversation, conversation, read_conversations
from kestrl.errors import UserInputError

SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "2+2?"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}


@pytest.mark.parametrize("arguments", [{"a": 2, "b": 2}, '{"a": 2, "b": 2}'], ids=["object", "text"])
def test_a_call_has_its_arguments_as_an_object(arguments: Any) -> None:
    row = {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call(arguments)]},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "assistant", "content": "4", "tool_calls": None},
        ],
        "tools": [SCHEMA],
    }
    found = conversation(row)
    assert found.tools == [SCHEMA]
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    assert found.messages[1]["content"] == ""
    assert "tool_calls" not in found.messages[3]


def test_columns_may_hold_json_as_text() -> None:
    row = {"messages": json.dumps([USER, {"role": "assistant", "content": "4"}]), "tools": json.dumps([SCHEMA])}
    assert conversation(row).tools == [SCHEMA]
    assert conversation(row).messages[1] == {"role": "assistant", "content": "4"}


RETOOL = (
    "I will compute it.\n<code>\n```python\nx = 2 + 2\nprint(x)\n```\n</code>\n<interpreter>\n4\n</interpreter>\n"
    "Check.\n<code>print(5)</code><interpreter>5</interpreter>So\n<answer>\\boxed{4}</answer>"
)


def test_retools_text_becomes_calls_results_and_an_answer() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "Rules ... *user question:* 2+2?"},
            {"role": "assistant", "content": RETOOL},
        ]
    }
    found = conversation(row)

    def calls(code: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": code}}}]

    assert found.tools == [CODE_INTERPRETER]
    assert found.messages == [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "I will compute it.", "tool_calls": calls("x = 2 + 2\nprint(x)")},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Check.", "tool_calls": calls("print(5)")},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "So\n\\boxed{4}"},
    ]


def test_code_in_a_conversation_with_tools_is_text() -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "<code>x</code>"}], "tools": [SCHEMA]}
    assert conversation(row).messages[1]["content"] == "<code>x</code>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "a row must be an object"),
        ({"prompt": "x"}, "messages: must be a list"),
        ({"messages": "["}, "messages: is text that is not JSON"),
        ({"messages": [USER]}, "hold an assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "must begin with a prompt"),
        (
            {"messages": [USER, {"role": "robot", "content": "x"}]},
            r"messages\[1\]\.role: is 'robot'; use one of system",
        ),
        ({"messages": [USER, {"role": "assistant", "content": 5}]}, r"messages\[1\]\.content: must be text"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [call("{")]}]},
            r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: is text that is not JSON",
        ),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}, r"tool_calls\[0\]\.function\.name"),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_field(row: Any, message: str) -> None:
    with pytest.raises(RefusedConversation, match=message):
        conversation(row)


def test_every_bad_line_of_a_file_is_reported(tmp_path: Path) -> None:
    good = {"messages": [USER, {"role": "assistant", "content": "4"}]}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (good, {"messages": []}, good, {"messages": [USER]})))
    with pytest.raises(UserInputError) as caught:
        read_conversations(path)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:2", f"{path}:4"]
    path.write_text("\n".join(json.dumps(good) for _ in range(3)))
    assert len(read_conversations(path, size=2)) == 2


@pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"train": False}, {"trainable": False}, {"loss": 0.0}, {"training": 0}]
)
def test_a_turn_that_is_not_to_be_learned_has_weight_0(mark: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "bad", **mark}]
    said += [{"role": "user", "content": "?"}, {"role": "assistant", "content": "good"}]
    messages = conversation({"messages": said}).messages
    assert [message.get("weight") for message in messages] == [None, 0, None, None]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"weight": 0.5}, r"messages\[1\].weight: is 0.5; a turn is learned \(1\) or not \(0\)"),
        ({"mask": 1}, r"messages\[1\].mask: is not read; say with weight"),
        ({"weight": 1, "train": False}, "weight and train contradict each other"),
        ({"weight": 0}, "no assistant message is to be learned"),
        ({"function_call": {"name": "f"}, "tool_calls": [{"function": {"name": "f"}}]}, "stands beside tool_calls"),
        ({"content": "\ud83d"}, "lone surrogate"),
        ({"content": ["x"]}, "must be text"),
    ],
)
def test_what_cannot_be_learned_as_it_says_is_refused(message: dict[str, Any], problem: str) -> None:
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "x", **message}]
    with pytest.raises(UserInputError, match=problem):
        conversation({"messages": said})


def test_nulls_of_arguments_and_schemas_are_kept_and_a_legacy_call_is_a_call() -> None:
    call = {"name": "f", "arguments": '{"unit": null}'}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"unit": {"default": None}}}}}
    said = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "42"},
        {"role": "assistant", "content": "It is 42.", "tool_calls": None},
    ]
    read = conversation({"messages": said, "tools": [tool]})
    assert read.messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"unit": None}}
    assert read.messages[2]["role"] == "tool"
    assert read.tools == [tool]
