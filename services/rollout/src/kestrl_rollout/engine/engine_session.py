"""One episode's requests to engines: placement, one retry, and seeds that depend only on episode and turn."""

from __future__ import annotations

import hashlib
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


def turn_seed(episode_seed: int, turn: int) -> int:
    """The sampling seed of a turn: 63 bits, the same in every process and run."""
    digest = hashlib.blake2b(f"{episode_seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        seed: int,
        client: EngineClient,
        sessions: Sessions,
    ) -> None:
        self._id = episode_id
        self._engines = {engine.name: engine for engine in engines}
        self._policy = policy
        self._limits = limits
        self._seed = seed
        self._client = client
        self._sessions = sessions
        self.engine = ""
        """The engine of the last turn."""
        self.retries = 0

    async def sample(
        self, prompt_ids: Sequence[int], *, turn: int, max_tokens: int, stop_token_ids: Sequence[int]
    ) -> Sampled:
        """Samples a turn; when its engine fails, once more on another.

        Raises:
            EngineFailure: It failed, and a retry cannot help or failed too.
        """
        try:
            return await self._attempt(prompt_ids, turn, 0, max_tokens, stop_token_ids)
        except EngineFailure as error:
            # A lost connection may be an idle one that the engine was closing: even the same engine may answer a retry.
            if not error.retryable or (len(self._engines) == 1 and error.code != "connection_lost"):
                raise
        self.retries += 1
        return await self._attempt(prompt_ids, turn, 1, max_tokens, stop_token_ids)

    async def _attempt(
        self, prompt_ids: Sequence[int], turn: int, attempt: int, max_tokens: int, stop_token_ids: Sequence[int]
    ) -> Sampled:
        exclude = (self.engine,) if attempt else ()
        started = time.monotonic()
        self.engine = self._sessions.place(self._id, tuple(self._engines), now=started, exclude=exclude)
        request = Generate(
            id=f"{self._id}/{turn}/{attempt}",
            policy=self._policy,
            prompt_ids=prompt_ids,
            temperature=self._limits.temperature,
            top_p=self._limits.top_p,
            top_k=self._limits.top_k,
            max_tokens=max_tokens,
            seed=turn_seed(self._seed, turn),
            stop_token_ids=stop_token_ids,
        )
        attributes = {
            Attr.ENGINE: self.engine,
            Attr.MODEL: self._policy,
            Attr.INPUT_TOKENS: len(prompt_ids),
            Attr.TURN: turn,
        }
        with span(SpanName.MODEL_CALL, attributes) as current:
            try:
                completion = await self._client.generate(self._engines[self.engine], request)
            except EngineFailure:
                self._sessions.failed(self.engine, now=time.monotonic())
                raise
            self._sessions.answered(self.engine)
            current.set_attribute(Attr.OUTPUT_TOKENS, len(completion.token_ids))
            current.set_attribute(Attr.FINISH_REASON, (completion.finish_reason,))
        return Sampled(completion=completion, engine=self.engine, seconds=time.monotonic() - started)

    def finish(self) -> None:
        """Ends the session; a second call has no effect."""
        self._sessions.finish(self._id)
