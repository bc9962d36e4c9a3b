"""One episode's requests to engines: placement of each call, and one retry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl.agents import Completion, Limits
from kestrl.engines import Generate
from kestrl.errors import EngineFailure
from kestrl_rollout.engine.client import EngineAddress, EngineClient
from kestrl_rollout.engine.sessions import Sessions


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
    """An episode's use of the engines that serve its policy."""

    def __init__(
        self,
        *,
        episode_id: str,
        engines: Sequence[EngineAddress],
        policy: str,
        limits: Limits,
        client: EngineClient,
        sessions: Sessions,
    ) -> None:
        self._id = episode_id
        self._engines = {engine.name: engine for engine in engines}
        self._policy = policy
        self._limits = limits
        self._client = client
        self._sessions = sessions
        self._opened = set[str]()
        self._ended = False
        self.engine = ""
        """The engine of the call that was placed last."""
        self.retries = 0

    async def sample(self, call: ModelCall) -> Sampled:
        """Samples a turn; when its engine fails, once more on another.

        Raises:
            EngineFailure: It failed, and a retry cannot help or failed too.
        """
        first = self._place(call)
        try:
            return await self._attempt(call, 0, first)
        except EngineFailure as error:
            # A lost connection may be an idle one that the engine was closing: even the same engine may answer a retry.
            if not error.retryable or (len(self._engines) == 1 and error.code != "connection_lost"):
                raise
        self.retries += 1
        return await self._attempt(call, 1, self._place(call, exclude=(first,)))

    def _place(self, call: ModelCall, exclude: Sequence[str] = ()) -> str:
        if self._ended:
            raise EngineFailure("the episode is over", code="episode_over", retryable=False)
        session = f"{self._id}#{call.lane}" if call.lane else self._id
        self._opened.add(session)
        self.engine = self._sessions.place(session, tuple(self._engines), now=time.monotonic(), exclude=exclude)
        return self.engine

    async def _attempt(self, call: ModelCall, attempt: int, engine: str) -> Sampled:
        started = time.monotonic()
        request = Generate(
            id=f"{self._id}/{call.number}/{attempt}",
            policy=self._policy,
            prompt_ids=call.prompt_ids,
            temperature=self._limits.temperature,
            top_p=self._limits.top_p,
            top_k=self._limits.top_k,
            max_tokens=call.max_tokens,
            seed=call.seed,
            stop_token_ids=call.stop_token_ids,
        )
        attributes = {
            Attr.ENGINE: engine,
            Attr.MODEL: self._policy,
            Attr.INPUT_TOKENS: len(call.prompt_ids),
            Attr.TURN: call.number,
        }
        with span(SpanName.MODEL_CALL, attributes) as current:
            try:
                completion = await self._client.generate(self._engines[engine], request)
            except EngineFailure:
                self._sessions.failed(engine, now=time.monotonic())
                raise
            self._sessions.answered(engine)
            current.set_attribute(Attr.OUTPUT_TOKENS, len(completion.token_ids))
            current.set_attribute(Attr.FINISH_REASON, (completion.finish_reason,))
        return Sampled(completion=completion, engine=engine, seconds=time.monotonic() - started)

    def finish(self) -> None:
        """Ends the sessions; a second call has no effect."""
        self._ended = True
        for session in self._opened:
            self._sessions.finish(session)
