"""What was said in an episode, as text, for rewards and people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl.episode import Json
from kestrl_rollout.conversation.main_row import MainRow


class Transcript:
    """Messages of a loop in their order, and conversations of clients that bring whole histories."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """`messages` are those of the scenario."""
        self._said: list[tuple[int | None, Mapping[str, Json]]] = [(None, dict(message)) for message in messages]
        """Messages, each with the row of the model's turn; None for those of others."""
        self._histories: dict[int, Sequence[Mapping[str, Json]]] = {}
        """Whole conversations by their rows."""

    @property
    def messages(self) -> Sequence[Mapping[str, Json]]:
        return tuple(message for _, message in self._said)

    def append(self, role: str, text: str, *, row: int | None = None, **further: Json) -> None:
        """Adds a message; of the model with its row."""
        self._said.append((row, {"role": role, **further, "content": text}))

    def set_history(self, row: int, history: Sequence[Mapping[str, Json]], text: str) -> None:
        """Sets a row's conversation to a client's history and the turn that followed."""
        self._histories[row] = [*history, {"role": "assistant", "content": text}]

    def of(self, main: MainRow | None) -> Sequence[Mapping[str, Json]]:
        """The main conversation."""
        if main is not None and main.row in self._histories:
            return tuple(self._histories[main.row])
        rows = set[int | None](() if main is None else main.conversation) | {None}
        return tuple(message for row, message in self._said if row in rows)
