"""The budget of an episode: turns and sampled tokens, held for a call from its admission to its end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kestrl.agents import Limits
from kestrl.episode import StopReason


@dataclass(frozen=True, slots=True)
class Grant:
    """A call may sample."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Full:
    """A limit leaves nothing to sample."""

    reason: StopReason


@dataclass(frozen=True, slots=True)
class BudgetHeld:
    """Calls in flight hold what this one needs; their ends decide."""


@dataclass(slots=True)
class Budget:
    """What an episode has spent, and what its calls in flight hold.

    A call holds as many tokens as it may sample. One that would get fewer only because of others in flight waits for
    them, so that no turn is cut short by tokens that nobody samples in the end.
    """

    limits: Limits
    turns: int = 0
    sampled: int = 0
    _held: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens held by number of the call."""

    def decide(self, prompt_tokens: int, max_tokens: int | None = None) -> Grant | Full | BudgetHeld:
        """The decision on a call.

        Args:
            prompt_tokens: Length of its prompt.
            max_tokens: Largest number of tokens that the caller wants; None for no limit of its own.
        """
        limits = self.limits
        if self.turns + len(self._held) >= limits.max_turns:
            return Full(StopReason.MAX_TURNS)
        unsampled = limits.max_tokens - self.sampled
        room = min(unsampled, limits.context_length - prompt_tokens)
        if room <= 0:
            return Full(StopReason.MAX_TOKENS)
        tokens = min(room, limits.max_tokens_per_turn or room, room if max_tokens is None else max_tokens)
        if tokens > unsampled - sum(self._held.values()):
            return BudgetHeld()
        return Grant(tokens)

    def hold(self, call: int, tokens: int) -> None:
        """Holds a turn and its tokens for an admitted call."""
        self._held[call] = tokens

    def spend(self, call: int, sampled: int) -> None:
        """Ends a call that sampled."""
        del self._held[call]
        self.turns += 1
        self.sampled += sampled

    def release(self, call: int) -> None:
        """Ends a call that became no turn; no effect on one that has ended."""
        self._held.pop(call, None)
