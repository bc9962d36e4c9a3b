"""Admission of an episode's calls: each has its number, seed, row and share of the budget from its arrival on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from kestrl.agents import LimitReached, Limits
from kestrl.episode import PROMPT_TOO_LONG, StopReason
from kestrl.errors import UserInputError
from kestrl_rollout.conversation.budget import Budget, Full, Grant
from kestrl_rollout.conversation.row_store import Place, RowStore
from kestrl_rollout.engine.seeds import PromptSeeds, turn_seed


class Admission:
    """Places calls in the rows and shares the budget among them."""

    def __init__(self, store: RowStore, limits: Limits, seed: int, *, scenario: str, check: Callable[[], None]) -> None:
        """Admits the calls of one episode.

        Args:
            store: Its rows.
            limits: Its limits.
            seed: Its seed.
            scenario: Id of its scenario, for messages.
            check: Raises once the episode can go on no more.
        """
        self._store, self._limits, self._seed = store, limits, seed
        self._scenario, self._check = scenario, check
        self._seeds = PromptSeeds(seed)
        self._budget = Budget(limits)
        self._next = asyncio.Lock()
        """Held by the call that is admitted next: others wait in the order of their arrival."""
        self._ended_call = asyncio.Event()
        """Set when a call ends, so that one that waits for its share of the budget looks again."""
        self._arrived = 0
        """Number of calls so far."""
        self.reached: StopReason | None = None
        """The first limit that was reached."""

    @property
    def sampled(self) -> int:
        """Tokens that were sampled."""
        return self._budget.sampled

    def seed_of_turn(self, turn: int) -> int:
        """The seed of a turn of a linear loop."""
        return turn_seed(self._seed, turn)

    def seed_of_prompt(self, prompt: Sequence[int]) -> int:
        """The seed of a call with a prompt of its own that arrives now."""
        return self._seeds.next(prompt)

    def has_room(self, prompt_tokens: int) -> bool:
        """Whether a call may sample, now or when others have ended.

        Raises:
            UserInputError: The first prompt is too long for the engine (code `prompt_too_long`).
        """
        if not self._arrived and prompt_tokens >= self._limits.context_length:
            raise UserInputError(
                f"scenario {self._scenario}: its prompt has {prompt_tokens} tokens, the engine holds "
                f"{self._limits.context_length}; shorten it or raise inference.contextLength",
                code=PROMPT_TOO_LONG,
            )
        decision = self._budget.decide(prompt_tokens)
        if isinstance(decision, Full):
            self.reached = self.reached or decision.reason
        return not isinstance(decision, Full)

    def check_room(self, prompt_tokens: int) -> None:
        """Raises `LimitReached` where `has_room` is false."""
        if not self.has_room(prompt_tokens):
            raise LimitReached(f"the episode's limit is reached: {self.reached}")

    @contextmanager
    def placed(self, prompt: Sequence[int]) -> Generator[Place]:
        """The place of a call that arrives now, under its number. A call that becomes no turn leaves nothing."""
        number, self._arrived = self._arrived, self._arrived + 1
        place = self._store.place(number, prompt)
        try:
            yield place
        finally:
            self._store.release(place)
            self._budget.release(number)
            self._ended_call.set()

    async def admitted(self, place: Place, max_tokens: int | None) -> int:
        """Waits for a call's share of the budget, and holds it.

        Raises:
            LimitReached: The calls before it have left none.
        """
        async with self._next:
            while not isinstance(decision := self._budget.decide(len(place.prompt), max_tokens), Grant):
                if isinstance(decision, Full):
                    self.reached = self.reached or decision.reason
                    raise LimitReached(f"the episode's limit is reached: {self.reached}")
                self._ended_call.clear()
                await self._ended_call.wait()
                self._check()
            self._budget.hold(place.call, decision.tokens)
            return decision.tokens

    def spend(self, place: Place, sampled: int) -> None:
        """Ends a call that sampled."""
        self._budget.spend(place.call, sampled)
