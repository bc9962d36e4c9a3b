"""The faces for clients that send messages: APIs of providers over one internal request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kestrl_rollout.gateway import completions, messages, responses
from kestrl_rollout.gateway.chat_types import ChatReply, ChatRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """A provider's API. All of its functions are pure."""

    read: Callable[[Mapping[str, Any], Mapping[str, Any]], ChatRequest]
    """Reads the fields of a request, with the job's parameters of sampling by name."""
    write: Callable[[ChatReply, ChatRequest], dict[str, Any]]
    events: Callable[[Mapping[str, Any], ChatRequest], Iterator[str]]
    """An answer as server-sent events."""
    error: Callable[[int, str, str, str], dict[str, Any]]
    """An error by HTTP status, message, code and field."""
    error_event: Callable[[Mapping[str, Any]], str]
    """An error as a server-sent event."""


COMPLETIONS = Face(
    read=completions.read,
    write=completions.write,
    events=completions.events,
    error=completions.error,
    error_event=completions.error_event,
)
MESSAGES = Face(
    read=messages.read,
    write=messages.write,
    events=messages.events,
    error=messages.error,
    error_event=messages.error_event,
)
RESPONSES = Face(
    read=responses.read,
    write=responses.write,
    events=responses.events,
    error=completions.error,
    error_event=responses.error_event,
)
FACES: Mapping[str, Face] = {
    "v1/chat/completions": COMPLETIONS,
    "v1/messages": MESSAGES,
    "v1/responses": RESPONSES,
}
"""By the path behind that of the episode."""
