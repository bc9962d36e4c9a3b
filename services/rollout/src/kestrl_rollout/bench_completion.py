"""The answer of a benchmarked endpoint: read without trust in its form, its numbers or its size. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrl.errors import described, encodable
from kestrl.redaction import Redactor
from kestrl.tools.shapes import is_list, is_mapping, json_problem

MAX_CALLS = 128
"""Maximum calls of a turn that are read; no job allows as many."""
LONGEST_NAME = 256
"""Maximum characters of a call's id, and of a finish reason."""
LARGEST_COUNT = 10**9
"""Bound on reported numbers of tokens."""


class UnreadableCompletion(ValueError):
    """The answer has no completion; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A tool call as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCompletion:
    """A model's turn."""

    message: Mapping[str, Any]
    """As it is sent with the next request."""
    text: str
    calls: tuple[CompletionCall, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    counted: bool
    """Whether the endpoint reports usable numbers of tokens."""


def read_completion(body: bytes, redactor: Redactor) -> BenchCompletion:
    """The completion in a body, without credentials.

    Raises:
        NotACompletion: There is none.
    """
    try:
        answer: object = json.loads(redactor.text(encodable(json.dumps(json.loads(body), ensure_ascii=False))))
    except (ValueError, RecursionError) as error:
        raise UnreadableCompletion(f"the answer is not JSON ({described(error)[:200]})") from None
    if problem := json_problem(answer):
        raise UnreadableCompletion(f"the answer cannot be kept: {problem}")
    choices, usage = _of(answer, "choices"), _of(answer, "usage")
    if not is_list(choices) or not choices:
        raise UnreadableCompletion("a completion without a choice")
    message, reason = _of(choices[0], "message"), _of(choices[0], "finish_reason")
    if not is_mapping(message):
        raise UnreadableCompletion("a choice without a message")
    text = message.get("content")
    if text is not None and not isinstance(text, str):
        raise UnreadableCompletion("the content of the message is not text")
    calls = _calls(message.get("tool_calls"))
    counts = [_count(_of(usage, name)) for name in ("prompt_tokens", "completion_tokens")]
    return BenchCompletion(
        message=_sent_again(message, calls),
        text=text or "",
        calls=calls,
        finish_reason=reason[:LONGEST_NAME] if isinstance(reason, str) and reason else "stop",
        prompt_tokens=counts[0] or 0,
        completion_tokens=counts[1] or 0,
        counted=None not in counts,
    )


def _of(value: object, name: str) -> Any:
    return value.get(name) if is_mapping(value) else None


def _count(value: object) -> int | None:
    usable = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_COUNT
    return value if usable else None  # pyright: ignore[reportReturnType]


def _calls(calls: object) -> tuple[CompletionCall, ...]:
    if calls is None:
        return ()
    if not is_list(calls):
        raise UnreadableCompletion("the tool calls of the message are not a list")
    return tuple(_call(call, index) for index, call in enumerate(calls[:MAX_CALLS]))


def _call(call: object, index: int) -> CompletionCall:
    function, id_ = _of(call, "function"), _of(call, "id")
    name, arguments = _of(function, "name"), _of(function, "arguments")
    if not isinstance(name, str):
        raise UnreadableCompletion(f"tool call {index} has no name")
    encoded = arguments if isinstance(arguments, str) else "" if arguments is None else json.dumps(arguments)
    return CompletionCall(
        id=id_[:LONGEST_NAME] if isinstance(id_, str) and id_ else f"call_{index}", name=name, arguments=encoded
    )


def _sent_again(message: Mapping[str, Any], calls: tuple[CompletionCall, ...]) -> dict[str, Any]:
    resent = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    resent["role"] = "assistant"
    if calls:
        resent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return resent
