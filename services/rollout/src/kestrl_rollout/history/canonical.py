"""Histories in a form in which different spellings of the same messages are equal. Pure.

Clients send a turn back in their own spelling: arguments with other spaces and key order, other ids of calls, without
its reasoning, with keys that have no tokens. None of this makes another message. A digest of each beginning of a
history is a chain, so that a message is read once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kestrl.formats.objects import read_json

BILLING = "x-anthropic-billing-header"
"""Beginning of a line that Claude Code adds to its system prompt, with another value in each call."""
_ARGUMENTS = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatHistory:
    """The messages and tools of a request, in the form of OpenAI's chat API, with texts as strings."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Digests of a history's beginnings, by the number of their messages."""

    whole: Sequence[bytes]
    without_tools: Sequence[bytes]
    without_system: Sequence[bytes]

    @classmethod
    def of(cls, history: ChatHistory) -> Digests:
        tools = extended(b"", msgspec.json.encode(history.tools, order="sorted"))
        whole, without_tools, without_system = [tools], [b""], [tools]
        places: dict[str, int] = {}
        for message in history.messages:
            text = canonical(message, places)
            if message.get("tool_calls"):
                places = call_places(message)
            whole.append(extended(whole[-1], text))
            without_tools.append(extended(without_tools[-1], text))
            is_system = message["role"] == "system"
            without_system.append(without_system[-1] if is_system else extended(without_system[-1], text))
        return cls(whole=whole, without_tools=without_tools, without_system=without_system)


def extended(digest: bytes, text: bytes) -> bytes:
    """Digest of a history with one more message, whose canonical form is `text`."""
    return hashlib.sha256(digest + text).digest()


def canonical(message: Mapping[str, Any], places: Mapping[str, int] | None = None) -> bytes:
    """A message without what has no tokens of its own, in a form that no other message has.

    Args:
        message: The message. White space around an assistant's text is the parser's and no part of it, nor is its
            reasoning, which clients may leave out.
        places: Places of the calls before a result, by their ids.
    """
    role, text = message["role"], str(message.get("content") or "")
    if role == "assistant":
        calls = [
            (call["function"]["name"], canonical_arguments(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        ]
        return _text([role, text.strip(), calls])
    if role == "tool":
        call_id = str(message.get("tool_call_id") or "")
        return _text([role, text, (places or {}).get(call_id, call_id)])
    if role == "system":
        text = "\n".join(line for line in text.split("\n") if not line.startswith(BILLING))
    return _text([role, text])


def call_places(message: Mapping[str, Any]) -> dict[str, int]:
    """The places of a message's calls by their ids."""
    return {str(call.get("id") or ""): place for place, call in enumerate(message.get("tool_calls") or ())}


def canonical_arguments(arguments: Any) -> str:
    """The arguments of a call as JSON of one spelling; a text that is no JSON is itself."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except ValueError:
            return arguments.strip()
    return _ARGUMENTS.encode(_plain(arguments or {}))


def _plain(value: Any) -> Any:
    """A JSON value with whole numbers as such: JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in cast("list[Any]", value)]
    return value


def _text(value: Any) -> bytes:
    # It is digested and never read: `repr` is faster than JSON, and lists of different strings have different ones.
    return repr(value).encode("utf-8")
