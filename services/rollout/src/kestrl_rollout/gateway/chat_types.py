"""The internal request of all faces for clients that send messages, and its reply."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrl_rollout.gateway.fields import Refused, invalid, mapping, objects
from kestrl_rollout.history.canonical import ChatHistory

MAX_MESSAGES = 20_000
NOT_FUNCTIONS = (
    *("namespace", "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation"),
    *("computer_use_preview", "local_shell", "shell", "mcp", "custom", "apply_patch", "tool_search"),
)
"""Kinds of tools that a provider runs itself, or that are no functions: the model is not offered them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a client asks for."""

    history: ChatHistory
    model: str
    instructions: Sequence[Mapping[str, Any]] = ()
    """The first of its messages that are no part of the conversation."""
    previous: str = ""
    """Id of the response that it continues, without that response's own history."""
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the face needs to write the answer."""
    metrics: Sequence[str] = ()
    """Names of the metrics that count what was asked for and not obeyed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentCall:
    """A call as it is sent to the client."""

    id: str
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A token of the turn."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """A turn of the model."""

    content: str
    reasoning: str
    calls: Sequence[SentCall]
    cut: bool
    """Whether a limit ended it."""
    stop: str
    """The stop string that ended it."""
    policy: str
    sampled_tokens: int
    tokens: Sequence[SampledToken]
    """The sampled tokens if the request asks for their log-probabilities, else none."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the row had before."""


def new_id(prefix: str) -> str:
    """An id that no other answer has, of any episode: clients take two messages with one id for the same."""
    return f"{prefix}{secrets.token_hex(12)}"


def text_of(content: Any, name: str, *, kinds: Sequence[str] = ("text",)) -> str:
    """The text of a message's content: a string, or a list of parts of text.

    Raises:
        Refused: It has something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(objects(content, name)):
        kind = part.get("type", "text")
        if kind not in kinds:
            raise Refused(
                f"{name}[{index}] is of type {kind!r}: only text can be rendered; leave it out",
                code="unsupported_content",
                field=f"{name}[{index}]",
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise invalid(f"{name}[{index}].text", "a string")
        texts.append(text)
    return "".join(texts)


def function_tool(function: Mapping[str, Any], name: str, *, parameters: str = "parameters") -> dict[str, Any]:
    """A tool as chat templates have it: without what providers alone understand.

    Args:
        function: Its definition.
        name: The field that it is in.
        parameters: The key of its schema.

    Raises:
        Refused: It has no name, or no schema.
    """
    tool_name: Any = function.get("name")
    if not isinstance(tool_name, str) or not tool_name:
        raise invalid(f"{name}.name", "a name")
    description: Any = function.get("description")
    if description is not None and not isinstance(description, str):
        raise invalid(f"{name}.description", "a string")
    schema = dict(mapping(function.get(parameters), f"{name}.{parameters}"))
    return {
        "type": "function",
        "function": {"name": tool_name, "description": description or "", "parameters": schema},
    }
