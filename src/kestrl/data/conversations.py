"""Conversations for supervised fine-tuning: rows with `messages` and `tools`, and ReTool's rows, whose assistant text
holds `<code>` and `<interpreter>` sections. Free of torch and of tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kestrl.data.rows import raw_rows
from kestrl.data.values import without_nulls
from kestrl.errors import UserInputError
from kestrl.tools.shapes import is_mapping

ROLES = ("system", "user", "assistant", "tool")
MAX_PROBLEMS = 20
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
    """As chat templates take them: role, content, and `tool_calls` whose arguments are objects."""
    tools: Sequence[Mapping[str, Any]]
    """JSON schemas of the tools; empty without tools."""


class RefusedConversation(UserInputError):
    """A row that is not a conversation; the message names the field and the fix."""


def read_conversations(path: Path, *, size: int | None = None) -> list[Conversation]:
    """The conversations of a .jsonl or .parquet file.

    Raises:
        UserInputError: The file or a row is invalid; one line for each problem, up to 20.
    """
    found: list[Conversation] = []
    problems: list[str] = []
    for line, row in raw_rows(path):
        if size is not None and len(found) + len(problems) >= size:
            break
        try:
            found.append(conversation(row))
        except RefusedConversation as error:
            problems.append(f"{path}:{line}: {error}")
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise UserInputError("\n".join(problems))
    if not found:
        raise UserInputError(f"{path}: holds no rows")
    return found


def conversation(row: object) -> Conversation:
    """The conversation of a row.

    Raises:
        RefusedConversation: It is none.
    """
    if not is_mapping(row):
        raise RefusedConversation(f"a row must be an object, is {type(row).__name__}")
    columns = cast("dict[str, Any]", without_nulls(row))
    tools = _decoded(columns.get("tools", []), "tools")
    if not isinstance(tools, list):
        raise RefusedConversation("tools: must be a list of JSON schemas")
    schemas = cast("list[Mapping[str, Any]]", tools)
    read = read_messages(columns)
    if _is_retool(read, schemas):
        return Conversation(messages=from_retool(read), tools=[CODE_INTERPRETER])
    return Conversation(messages=read, tools=schemas)


def read_messages(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The column `messages` of a row, checked.

    Raises:
        RefusedConversation: They are not a conversation to learn from.
    """
    messages = _decoded(columns.get("messages"), "messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedConversation("messages: must be a list of messages; add it")
    read = [_message(message, f"messages[{index}]") for index, message in enumerate(cast("list[object]", messages))]
    if read[0]["role"] == "assistant" or not any(message["role"] == "assistant" for message in read):
        raise RefusedConversation("messages: must begin with a prompt and hold an assistant message to learn from")
    return read


def _decoded(value: object, field: str) -> object:
    """A column that holds JSON as text, as in some Parquet files, or is the value itself."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RefusedConversation(f"{field}: is text that is not JSON: {error}") from error


def _message(given: object, field: str) -> dict[str, Any]:
    if not is_mapping(given):
        raise RefusedConversation(f"{field}: must be an object, is {type(given).__name__}")
    message: dict[str, Any] = dict(given)
    if message.get("role") not in ROLES:
        raise RefusedConversation(f"{field}.role: is {message.get('role')!r}; use one of {', '.join(ROLES)}")
    content = message.setdefault("content", "")
    if not isinstance(content, str):
        raise RefusedConversation(f"{field}.content: must be text, is {type(content).__name__}")
    if message.get("tool_calls"):
        calls = cast("list[object]", message["tool_calls"])
        message["tool_calls"] = [_call(call, f"{field}.tool_calls[{index}]") for index, call in enumerate(calls)]
    else:
        message.pop("tool_calls", None)
    return message


def _call(given: object, field: str) -> dict[str, Any]:
    """A call with its arguments as an object, which templates expect; OpenAI's API sends text."""
    call = dict(cast("dict[str, Any]", given)) if isinstance(given, dict) else {}
    function: Any = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(cast("dict[str, Any]", function).get("name"), str):
        raise RefusedConversation(f"{field}.function.name: is required; add it")
    inner = cast("dict[str, Any]", function)
    arguments = _decoded(inner.get("arguments", {}), f"{field}.function.arguments")
    if not isinstance(arguments, dict):
        raise RefusedConversation(f"{field}.function.arguments: must be an object, is {type(arguments).__name__}")
    return {**call, "type": "function", "function": {"name": inner["name"], "arguments": arguments}}


def _is_retool(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    said = [message["content"] for message in messages if message["role"] == "assistant"]
    return not tools and len(said) == 1 and _SECTION.search(said[0]) is not None


def from_retool(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """ReTool's text as turns: `<code>` is a call of `code_interpreter`, `<interpreter>` its result.

    Follows verl's recipe (recipe/retool): the question is what follows `*user question:*`, and a fence around the code
    and the tags around the answer are dropped.
    """
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            asked, marker, after = message["content"].partition(QUESTION)
            turns.append({**message, "content": _ANSWER.sub("", after if marker else asked).strip()})
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
        rest = _ANSWER.sub("", text[end:]).strip()
        if rest:
            turns.append({"role": "assistant", "content": rest})
    return turns
