"""One episode's requests to engines: placement of each call, and its move to another engine when one fails or leaves.

A turn whose engine went away is sampled elsewhere from the same tokens and seed: the episode does not end by it. One
that a draining engine refuses is no failure: it moves, or waits for the learner to name another engine. Any other
failure is retried once. A turn whose version became too old while it was sampled is cut and sampled by the newest one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.agents import Completion, Limits
from kestrl.engines import Generate
from kestrl.errors import EngineFailure
from kestrl_rollout.engine.client import ENGINE_DRAINING, Cut, EngineAddress, EngineClient
from kestrl_rollout.engine.engine_set import EngineSet, NewestEngines
from kestrl_rollout.engine.sessions import SessionsByEngine

AWAY = frozenset({"unreachable", "connection_lost", ENGINE_DRAINING})
"""Codes of failures that say that the engine went away, and nothing of the request."""
CUT = "cut"
"""Finish reason of an attempt whose version became too old, in traces."""
MOVES = 8
"""Maximum moves of a turn; its deadline ends it earlier if engines do not answer at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call of the model, as it was admitted."""

    number: int
    """Reserved when the call arrived; the request's id has it."""
    seed: int
    lane: int
    """Calls of a lane are placed as one session: on the engine that has their prefix in its cache."""
    prompt_ids: Sequence[int]
    max_tokens: int
    stop_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """A sampled turn: its tokens, engine and duration."""

    completion: Completion
    engine: str
    seconds: float


class EngineSession:
    """An episode's use of the engines that serve its policy, or the newest one when each turn begins."""

    def __init__(
        self,
        *,
        episode_id: str,
        engines: EngineSet,
        limits: Limits,
        client: EngineClient,
        sessions: SessionsByEngine,
    ) -> None:
        self._id = episode_id
        self._engines = engines
        self._limits = limits
        self._client = client
        self._sessions = sessions
        self._opened = set[str]()
        self._ended = False
        self.engine = ""
        """The engine of the call that was placed last."""
        self._retries = 0
        self._cut_turns = 0
        """Attempts at turns that ended since their version had become too old."""
        self._cut_seconds = 0.0
        """Time spent on them."""
        self._cut_tokens = 0
        """Tokens that they had."""
        self._uncounted_cuts = 0
        """Those of them whose engine did not say how many tokens they had."""

    async def sample(self, call: ModelCall) -> Sampled:
        """Samples a turn; when its engine fails, once more on another, and as often as engines go away.

        Raises:
            EngineFailure: It failed, and a retry cannot help or failed too.
        """
        failed = list[str]()
        moves, cuts, retried, revision = 0, 0, False, self._engines.revision
        while True:
            engine, policy = await self._place(call, exclude=failed)
            try:
                sampled = await self._attempt(call, moves + cuts, engine, policy)
                if sampled is not None:
                    return sampled
                failed, cuts = [], cuts + 1
                continue
            except EngineFailure as error:
                if self._engines.revision != revision:  # what failed before may have come back
                    failed, revision = [], self._engines.revision
                failed.append(engine.name)
                if error.code == ENGINE_DRAINING:
                    await self._engines.without(failed)
                if moves == MOVES or not self._worth_another(error, failed, retried=retried):
                    raise
                retried = retried or error.code not in AWAY
                if error.code != ENGINE_DRAINING:
                    self._retries += 1
            moves += 1

    def _worth_another(self, error: EngineFailure, failed: Sequence[str], *, retried: bool) -> bool:
        """Whether another attempt may succeed."""
        if not error.retryable:
            return False
        untried = set(self._engines.addresses) - set(failed)
        if error.code in AWAY and (untried or not self._engines.addresses):
            return True
        if retried:
            return False
        # A lost connection may be an idle one that the engine was closing: even the same engine may answer a retry.
        return bool(untried) or (error.code == "connection_lost" and len(failed) == 1)

    async def _place(self, call: ModelCall, exclude: Sequence[str] = ()) -> tuple[EngineAddress, str]:
        """The engine of an attempt, and the policy that it serves."""
        engines = await self._engines.available()
        if self._ended:
            raise EngineFailure("the episode is over", code="episode_over", retryable=False)
        session = f"{self._id}#{call.lane}" if call.lane else self._id
        self._opened.add(session)
        self.engine = self._sessions.place(session, tuple(engines), now=time.monotonic(), exclude=exclude)
        return engines[self.engine], self._engines.policy

    async def _attempt(self, call: ModelCall, attempt: int, engine: EngineAddress, policy: str) -> Sampled | None:
        """Samples a turn; None if its version became too old meanwhile."""
        started = time.monotonic()
        request = Generate(
            id=f"{self._id}/{call.number}/{attempt}",
            policy=policy,
            prompt_ids=call.prompt_ids,
            temperature=self._limits.temperature,
            top_p=self._limits.top_p,
            top_k=self._limits.top_k,
            max_tokens=call.max_tokens,
            seed=call.seed,
            stop_token_ids=call.stop_token_ids,
        )
        attributes = {
            Attr.ENGINE: engine.name,
            Attr.MODEL: policy,
            Attr.INPUT_TOKENS: len(call.prompt_ids),
            Attr.TURN: call.number,
        }
        with span(SpanName.MODEL_CALL, attributes) as current, self._engines.turn() as retired:
            try:
                if retired is None:
                    completion = await self._client.generate(engine, request)
                else:
                    completion = await self._client.generate_unless(retired, engine, request)
            except EngineFailure:
                self._sessions.failed(engine.name, now=time.monotonic())
                raise
            if isinstance(completion, Cut):
                self._count(completion, time.monotonic() - started)
                current.set_attribute(Attr.FINISH_REASON, (CUT,))
                return None
            self._sessions.answered(engine.name)
            current.set_attribute(Attr.OUTPUT_TOKENS, len(completion.token_ids))
            current.set_attribute(Attr.FINISH_REASON, (completion.finish_reason,))
        return Sampled(completion=completion, engine=engine.name, seconds=time.monotonic() - started)

    def _count(self, cut: Cut, seconds: float) -> None:
        self._cut_turns += 1
        self._cut_seconds += seconds
        if cut.tokens is None:
            self._uncounted_cuts += 1
        else:
            self._cut_tokens += cut.tokens

    def metrics(self) -> Mapping[str, float]:
        """Counts for the episode's record; those of cut turns only where the version may change."""
        retries = {"engine_retries": self._retries}
        if not isinstance(self._engines, NewestEngines):
            return retries
        return {
            **retries,
            "cut_turns": self._cut_turns,
            "cut_seconds": self._cut_seconds,
            "cut_tokens": self._cut_tokens,
            "uncounted_cuts": self._uncounted_cuts,
        }

    def finish(self) -> None:
        """Ends the sessions; a second call has no effect."""
        self._ended = True
        for session in self._opened:
            self._sessions.finish(session)
