"""What the gateway needs of an episode."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from kestrl._shared.text.parser import Parsed
from kestrl.agents import Completion, Endpoint, Limits
from kestrl.episode import Json, ToolCall, Turn
from kestrl.formats import Schemas
from kestrl.tools import ToolSchema

REFUSED = "refused."
"""Beginning of the metrics that count requests that a client had to change, by code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCall:
    """A call of a client that owns its tokens."""

    prompt_ids: Sequence[int]
    max_tokens: int | None
    """Largest number of tokens that the client wants."""
    stop_token_ids: Sequence[int]
    """Tokens that end the turn beside the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A call of a client that owns no tokens."""

    prompt_ids: Sequence[int]
    history: Sequence[Mapping[str, Json]]
    """What the prompt says, for the record."""
    schemas: Schemas
    """Schemas of the tools that the client offers."""
    max_tokens: int | None
    """Largest number of tokens that the client wants."""
    stops: Sequence[str]
    """Strings that end the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A turn for a client that owns no tokens."""

    turn: Turn
    completion: Completion
    parsed: Parsed
    stop: str
    """The stop string that ended it, which is the end of its text; empty for none."""


class JobTools(Protocol):
    """The job's tools for an agent, and the record of its calls."""

    @property
    def schemas(self) -> Sequence[ToolSchema]: ...
    def show(self, turn: int, place: int, text: str, *, failed: bool) -> None:
        """Records the result of a call as the agent sent it to the model.

        Args:
            turn: Index of the turn.
            place: Place of the call in it.
            text: The result.
            failed: Whether the agent says that the call failed.
        """
        ...

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolCall:
        """Calls a tool of the job.

        Raises:
            LimitReached: A tool has ended the episode.
            KestrlError: The tool failed or a deadline passed.
        """
        ...


class Sampler(Protocol):
    """What samples for an episode: its conversation."""

    @property
    def metrics(self) -> MutableMapping[str, float]: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def job_tools(self) -> JobTools: ...
    async def generate_served(self, call: TokenCall) -> Completion:
        """Samples a turn behind a client's prompt, and adds the calls that it has to the episode's.

        Raises:
            LimitReached: A limit of the episode leaves no token.
            KestrlError: The engine failed, or a deadline passed.
        """
        ...

    async def generate_chat(self, call: ChatCall) -> ChatTurn:
        """Samples a turn behind a prompt, and parses it.

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
