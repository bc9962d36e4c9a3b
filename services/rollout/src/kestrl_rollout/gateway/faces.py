"""The faces for clients that send messages: APIs of providers over one internal request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kestrl_rollout.gateway import completions
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
FACES: Mapping[str, Face] = {"v1/chat/completions": COMPLETIONS}
"""By the path behind that of the episode."""
