"""The turns of an episode by the histories that led to them, and why a history does not continue one. Pure.

A history whose beginning ends with a turn of this episode, and in which everything before that turn is what it was,
continues the turn. The digests say so of messages; that they stand for the same tokens is so because the message that
a client has of a turn was read from its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kestrl._shared.text.chat import Message
from kestrl_rollout.history.canonical import ChatHistory, Digests, canonical, extended


class ForkReason(StrEnum):
    """Why a call begins a row though the episode has others."""

    NEW_CONVERSATION = "new_conversation"
    """No message of the user is in common with a call before: a title, a sub-agent."""
    TOOLS_CHANGED = "tools_changed"
    SYSTEM_CHANGED = "system_changed"
    EDITED_ASSISTANT = "edited_assistant"
    """A turn of the model is not what was sampled."""
    UNPROVEN = "unproven"
    """A turn's text is what was sampled, and its reasoning is not."""
    COMPACTED = "compacted"
    """Messages were replaced or left out."""
    BRANCHED = "branched"
    """The turn has been continued otherwise before, or is being continued by a call in flight."""
    RESAMPLED = "resampled"
    """The same history as in a call before."""
    TEMPLATE_REWRITES = "template_rewrites_history"
    """The chat template writes the conversation before the turn differently now."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownTurn:
    """A turn that was sampled in this episode."""

    index: int
    row: int
    end: int
    """Length of its row behind it."""
    message: Message
    call_ids: Sequence[str]
    """Ids that the model gave its calls, if any."""
    places: Sequence[int]
    """Places, among all calls of the turn, of those that the client has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What an episode has of a history."""

    history: ChatHistory
    digests: Digests
    turn: KnownTurn | None
    """The turn that it continues."""
    since: int
    """Index of that turn's message; -1 for none."""
    known: Mapping[int, KnownTurn]
    """Turns sampled here by the index of their message."""
    reason: ForkReason | None = None
    """Why it would begin a row; None for the first."""


class Threads:
    """Finds histories again."""

    def __init__(self) -> None:
        self._turns: dict[bytes, KnownTurn] = {}
        """By the digest of their history, with them."""
        self._replies: dict[bytes, KnownTurn] = {}
        """The newest by its own message."""
        self._whole = set[bytes]()
        self._without_tools = set[bytes]()
        self._without_system = set[bytes]()

    def match(self, history: ChatHistory) -> Match:
        """What is known of a history."""
        digests = Digests.of(history)
        sampled: dict[int, KnownTurn] = {}
        since, proven, unproven = -1, True, False
        for index, message in enumerate(history.messages):
            if message["role"] != "assistant":
                continue
            turn = self._turns.get(digests.whole[index + 1])
            proven = proven and _reasoning_is_sampled(message, turn)
            unproven = unproven or (turn is not None and not proven)
            if turn is not None and proven:
                sampled[index], since = turn, index
            elif proven and (reply := self._replies.get(canonical(message))) is not None:
                sampled[index] = reply
        match = Match(history=history, digests=digests, turn=sampled.get(since), since=since, known=sampled)
        return replace(match, reason=ForkReason.UNPROVEN if unproven else self.reason(match))

    def add(self, match: Match, echoes: Sequence[Mapping[str, Any]], turn: KnownTurn) -> None:
        """Adds a turn.

        Args:
            match: Its history's.
            echoes: The messages as which a client may send it back.
            turn: The turn.
        """
        self._whole.update(match.digests.whole[1:])
        self._without_tools.update(match.digests.without_tools[1:])
        self._without_system.update(match.digests.without_system[1:])
        for echo in echoes:
            text = canonical(echo)
            chain = extended(match.digests.whole[-1], text)
            self._turns[chain] = self._replies[text] = turn
            self._whole.add(chain)
            self._without_tools.add(extended(match.digests.without_tools[-1], text))
            self._without_system.add(extended(match.digests.without_system[-1], text))

    def reason(self, match: Match) -> ForkReason | None:
        """Why a history would begin a row; None for the first."""
        if not self._whole:
            return None
        digests, messages = match.digests, match.history.messages
        shared = _longest(digests.whole, self._whole)
        if _longest(digests.without_tools, self._without_tools) > shared:
            return ForkReason.TOOLS_CHANGED
        without_system = _longest(digests.without_system, self._without_system)
        if without_system > shared and any(message["role"] != "system" for message in messages[:without_system]):
            return ForkReason.SYSTEM_CHANGED
        if shared == len(messages):
            return ForkReason.RESAMPLED
        if all(message["role"] == "system" for message in messages[:shared]):
            return ForkReason.NEW_CONVERSATION
        if messages[shared]["role"] == "assistant":
            return ForkReason.EDITED_ASSISTANT
        return ForkReason.BRANCHED if shared == match.since + 1 else ForkReason.COMPACTED


def _longest(digests: Sequence[bytes], chain: set[bytes]) -> int:
    """Length of the longest beginning that was seen; a chain is seen as a whole or not at all behind it."""
    return max((count for count, digest in enumerate(digests) if digest in chain), default=0)


def _reasoning_is_sampled(message: Mapping[str, Any], turn: KnownTurn | None) -> bool:
    """Whether the reasoning that a client sent back, if any, is the turn's."""
    reasoning = str(message.get("reasoning") or "").strip()
    return not reasoning or turn is None or reasoning == (turn.message.reasoning or "").strip()
