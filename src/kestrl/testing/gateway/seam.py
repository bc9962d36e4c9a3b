"""What the suite needs of a gateway: episodes that it serves, and an engine that says what a case wants."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kestrl.episode import Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Limits and rules of an episode."""

    max_turns: int = 60
    max_tokens: int = 3500
    temperature: float = 1.0
    refuses: Sequence[str] = ()
    """`agent.refuses` of the job."""
    keep_alive: float = 10.0
    """Seconds between comments of a silent stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrompt:
    """A prompt that the engine was sent."""

    token_ids: Sequence[int]
    sampling: Mapping[str, Any]
    policy: str


@dataclass(frozen=True, slots=True)
class Held:
    """An engine that answers no prompt until it is released."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a prompt has come."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a prompt was taken back."""
    release: asyncio.Event = field(default_factory=asyncio.Event)


class Served(Protocol):
    """An episode that the gateway serves, and what is behind it."""

    @property
    def base_url(self) -> str:
        """URL of the episode, with `/v1` at its end."""
        ...

    @property
    def api_key(self) -> str: ...
    @property
    def prompts(self) -> Sequence[EnginePrompt]:
        """What the engine was sent so far, in order."""
        ...

    def says(self, *turns: str) -> None:
        """Has the model say these: the n-th turn of any conversation is `turns[n]`, the last one is repeated. The model
        ends each turn by itself.
        """
        ...

    def holds(self) -> Held:
        """Has the engine keep all later prompts waiting."""
        ...

    def fails(self) -> None:
        """Has the engine break the connection of all later prompts."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...
    def whole(self, text: str) -> Sequence[int]:
        """The ids of a text in which control tokens are control tokens."""
        ...

    async def end(self) -> Episode:
        """Ends the episode. A second call returns the same."""
        ...


class Subject(Protocol):
    """A gateway that is put through the cases."""

    def serve(self, options: Options) -> AbstractAsyncContextManager[Served]:
        """Serves an episode while the context is open."""
        ...

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool call as the model writes it."""
        ...

    async def own_loop(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], turns: Sequence[str]
    ) -> Episode:
        """An episode of the built-in tool loop whose tools answer `found WORD`."""
        ...
