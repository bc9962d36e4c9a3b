"""What the gateway needs of an episode."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kestrl._shared.text.parser import Parsed
from kestrl.agents import Completion, Endpoint, Limits
from kestrl.episode import Json, Turn
from kestrl.formats import Schemas

REFUSED = "refused."
"""Beginning of the metrics that count requests that a client had to change, by code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A turn for a client that owns no tokens."""

    turn: Turn
    completion: Completion
    parsed: Parsed
    stop: str
    """The stop string that ended it, which is the end of its text; empty for none."""


class Sampler(Protocol):
    """What samples for an episode: its conversation."""

    @property
    def metrics(self) -> MutableMapping[str, float]: ...
    @property
    def limits(self) -> Limits: ...
    async def generate_tokens(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Completion: ...

    async def generate_chat(
        self,
        prompt_ids: Sequence[int],
        *,
        history: Sequence[Mapping[str, Json]],
        schemas: Schemas,
        max_tokens: int | None,
        stops: Sequence[str],
    ) -> ChatTurn:
        """Samples a turn behind a prompt, and parses it.

        Args:
            prompt_ids: The prompt.
            history: What the prompt says, for the record.
            schemas: Schemas of the tools that the client offers.
            max_tokens: Largest number of tokens that the client wants.
            stops: Strings that end the turn.

        Raises:
            LimitReached: A limit of the episode leaves no token.
            KestrlError: The engine failed, or a deadline passed.
        """
        ...

    def beginning(self, row: int, end: int) -> Sequence[int]:
        """The first tokens of a row."""
        ...


class Server(Protocol):
    """What serves episodes by URL."""

    def serve(self, sampler: Sampler) -> AbstractAsyncContextManager[Endpoint]:
        """Serves an episode while the context is open."""
        ...


def count(metrics: MutableMapping[str, Any], name: str, by: float = 1) -> None:
    """Adds to a metric."""
    metrics[name] = metrics.get(name, 0) + by
