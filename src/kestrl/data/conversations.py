"""Conversations for supervised fine-tuning: rows with `messages` and `tools`, and ReTool's rows, whose assistant text
holds `<code>` and `<interpreter>` sections. Free of torch and of tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from kestrl.data.rows import raw_rows
from kestrl.data.values import columns_as_json
from kestrl.errors import SeveralProblems, UserInputError
from kestrl.tools.shapes import is_mapping

ROLES = ("system", "user", "assistant", "tool")
MAX_PROBLEMS = 20
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Members of a message that hold its reasoning, as APIs, data sets and templates name them."""
WEIGHTS = ("weight", "train", "trainable", "training", "train_on_turn", "loss", "loss_weight")
"""Members by which data sets say whether a turn is learned: 0, 1, false or true."""
UNCLEAR_WEIGHTS = ("mask", "loss_mask", "masked", "ignore", "ignored")
"""Members that say it in either direction."""
CODE_INTERPRETER = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool for executing code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to execute."}},
            "required": ["code"],
        },
    },
}
"""The tool of ReTool's conversations, as verl's recipe declares it."""
QUESTION = "*user question:*"
"""Text before the question in ReTool's prompts."""
_SECTION = re.compile(r"<(code|interpreter)>(.*?)</\1>", re.DOTALL)
_FENCE = re.compile(r"^\s*```(?:python)?\n(.*?)\n?```\s*$", re.DOTALL)
_ANSWER = re.compile(r"</?answer>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages with the tools that their model is offered."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates take them: role, content, and `tool_calls` whose arguments are objects. The `weight` of an
    assistant's is 0 where it is not to be learned."""
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools; empty without tools."""
    place: str = field(default="", compare=False)
    """File and line, for messages."""


class RefusedConversation(UserInputError):
    """A row that is not a conversation; the message names the field and the fix."""


def read_conversations(path: Path, *, size: int | None = None) -> list[Conversation]:
    """The conversations of a .jsonl or .parquet file.

    Raises:
        UserInputError: The file or a row is invalid; one line for each problem, up to 20.
    """
    conversations: list[Conversation] = []
    problems: list[str] = []
    for line, row in raw_rows(path):
        if size is not None and len(conversations) + len(problems) >= size:
            break
        try:
            conversations.append(replace(conversation(row), place=f"{path}:{line}"))
        except RefusedConversation as error:
            problems.append(f"{path}:{line}: {error}")
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise SeveralProblems(problems)
    if not conversations:
        raise UserInputError(f"{path}: holds no rows")
    return conversations


def conversation(row: object) -> Conversation:
    """The conversation of a row.

    Raises:
        RefusedConversation: It is none.
    """
    if not is_mapping(row):
        raise RefusedConversation(f"a row must be an object, is {type(row).__name__}")
    columns, problems = columns_as_json({str(name): value for name, value in row.items()})
    if problems:
        raise RefusedConversation("; ".join(problems))
    schemas = _tools(_decoded(columns.get("tools"), "tools"))
    messages = read_messages(columns)
    if _is_retool(messages, schemas):
        return Conversation(messages=from_retool(messages), tools=[CODE_INTERPRETER])
    return Conversation(messages=messages, tools=schemas)


def read_messages(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The column `messages` of a row, checked.

    Raises:
        RefusedConversation: They are not a conversation to learn from.
    """
    messages = _decoded(columns.get("messages"), "messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedConversation("messages: must be a list of messages; add it")
    checked_messages = [
        _message(message, f"messages[{index}]") for index, message in enumerate(cast("list[object]", messages))
    ]
    if checked_messages[0]["role"] == "assistant" or not any(
        message["role"] == "assistant" for message in checked_messages
    ):
        raise RefusedConversation("messages: must begin with a prompt and hold an assistant message to learn from")
    if not any(message["role"] == "assistant" and message.get("weight", 1) for message in checked_messages):
        raise RefusedConversation("messages: no assistant message is to be learned; remove the row, or a weight of 0")
    return checked_messages


def _tools(tools: object) -> list[Mapping[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RefusedConversation("tools: must be a list of JSON schemas")
    for index, tool in enumerate(cast("list[object]", tools)):
        function = tool.get("function", tool) if is_mapping(tool) else None
        if not is_mapping(function) or not isinstance(function.get("name"), str):
            raise RefusedConversation(f"tools[{index}].function.name: is required; add it")
    return cast("list[Mapping[str, Any]]", tools)


def _decoded(value: object, field: str) -> object:
    """A column that holds JSON as text, as in some Parquet files, or is the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RefusedConversation(f"{field}: is text that is not JSON: {error}") from error


def _message(value: object, field: str) -> dict[str, Any]:
    if not is_mapping(value):
        raise RefusedConversation(f"{field}: must be an object, is {type(value).__name__}")
    message: dict[str, Any] = {name: entry for name, entry in value.items() if entry is not None}
    role = "tool" if message.get("role") == "function" else message.get("role")  # OpenAI's before tools
    if role not in ROLES:
        raise RefusedConversation(f"{field}.role: is {role!r}; use one of {', '.join(ROLES)}")
    content = message.setdefault("content", "")
    if not isinstance(content, str):
        raise RefusedConversation(f"{field}.content: must be text, is {type(content).__name__}")
    for name in REASONING:
        if not isinstance(message.get(name, ""), str):
            raise RefusedConversation(f"{field}.{name}: must be text, is {type(message[name]).__name__}")
    calls: object = message.pop("tool_calls", None) or []
    legacy = message.pop("function_call", None)
    if not isinstance(calls, list):
        raise RefusedConversation(f"{field}.tool_calls: must be a list, is {type(calls).__name__}")
    if calls and legacy:
        raise RefusedConversation(f"{field}.function_call: stands beside tool_calls; remove one of them")
    checked_calls = [
        _call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(cast("list[object]", calls))
    ]
    if legacy:
        checked_calls = [_call(legacy, f"{field}.function_call")]
    if role != "assistant" and checked_calls:
        raise RefusedConversation(f"{field}.tool_calls: only an assistant calls; its role is {role}")
    weight = _weight(message, field)
    message = {name: entry for name, entry in message.items() if name not in WEIGHTS} | {"role": role}
    if role == "assistant" and weight == 0:
        message["weight"] = 0
    elif role != "assistant" and weight:
        raise RefusedConversation(f"{field}: is marked as learned; only messages of an assistant are, remove the mark")
    return message | ({"tool_calls": checked_calls} if checked_calls else {})


def _weight(message: Mapping[str, Any], field: str) -> int | None:
    """Whether a message says that it is learned; None if it says nothing."""
    for name in UNCLEAR_WEIGHTS:
        if name in message:
            raise RefusedConversation(f"{field}.{name}: is not read; say with weight, 0 or 1, whether it is learned")
    weights = {name: message[name] for name in WEIGHTS if name in message}
    for name, value in weights.items():
        if value not in (0, 1):
            raise RefusedConversation(f"{field}.{name}: is {value!r}; a turn is learned (1) or not (0)")
    if len({int(value) for value in weights.values()}) > 1:
        raise RefusedConversation(f"{field}: {' and '.join(weights)} contradict each other; keep one of them")
    return next((int(value) for value in weights.values()), None)


def _call(value: object, field: str) -> dict[str, Any]:
    """A call with its arguments as an object, which templates expect; OpenAI's API sends text."""
    call = dict(value) if is_mapping(value) else {}
    function = call.get("function", call)
    if not is_mapping(function) or not isinstance(function.get("name"), str):
        raise RefusedConversation(f"{field}.function.name: is required; add it")
    raw_arguments = function.get("arguments")
    arguments = _decoded({} if raw_arguments is None else raw_arguments, f"{field}.function.arguments")
    if not is_mapping(arguments):
        raise RefusedConversation(f"{field}.function.arguments: must be an object, is {type(arguments).__name__}")
    if problems := columns_as_json({"arguments": arguments})[1]:
        raise RefusedConversation(f"{field}.function.{problems[0]}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _is_retool(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    assistant_texts = [message["content"] for message in messages if message["role"] == "assistant"]
    return not tools and len(assistant_texts) == 1 and _SECTION.search(assistant_texts[0]) is not None


def from_retool(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """ReTool's text as turns: `<code>` is a call of `code_interpreter`, `<interpreter>` its result.

    Follows verl's recipe (recipe/retool): the question is what follows `*user question:*`, and a fence around the code
    and the tags around the answer are dropped.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            prompt, marker, after = message["content"].partition(QUESTION)
            turns.append({**message, "content": _ANSWER.sub("", after if marker else prompt).strip()})
            continue
        text, end = message["content"], 0
        for section in _SECTION.finditer(text):
            before, body = text[end : section.start()].strip(), section[2]
            end = section.end()
            if section[1] == "interpreter":
                turns.append({"role": "tool", "content": body.strip()})
                continue
            fenced = _FENCE.match(body)
            call = {"name": "code_interpreter", "arguments": {"code": (fenced[1] if fenced else body).strip("\n")}}
            turns.append(
                {"role": "assistant", "content": before, "tool_calls": [{"type": "function", "function": call}]}
            )
        remaining = _ANSWER.sub("", text[end:]).strip()
        if remaining:
            turns.append({"role": "assistant", "content": remaining})
    return turns
