"""Client of inference engines: token ids in, token ids and log-probabilities out, in the engine's dialect.

Answers are checked: the reported policy must be the requested one, and every token needs a finite log-probability.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kestrl._shared.telemetry import trace_headers
from kestrl.agents import Completion
from kestrl.engines import DRAINING, EngineDialect, Generate
from kestrl.errors import EngineFailure, described
from kestrl.redaction import Redactor
from kestrl_rollout.engine.http import Lost, PostClient, Unreachable

MESSAGE_CHARACTERS = 300
ENGINE_DRAINING = "engine_draining"
"""Code of the refusal of an engine that leaves."""
REFUSALS: Mapping[int, tuple[str, bool]] = {
    400: ("bad_request", False),
    401: ("unauthorized", False),
    403: ("unauthorized", False),
    422: ("bad_request", False),
}
"""Code of a failure, and whether it is retryable, by HTTP status."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """An engine that serves the group's policy."""

    name: str
    url: str


class EngineClient:
    """Client of all engines of the worker. Concurrent episodes bound the connections; there is no queue here."""

    def __init__(self, key: str | None, dialect: EngineDialect) -> None:
        self._dialect = dialect
        self._redactor = Redactor([key or ""])
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        self._http = PostClient({"content-type": "application/json", **authorization})

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def generate(self, engine: EngineAddress, request: Generate) -> Completion:
        """Samples one turn.

        Raises:
            EngineFailure: The engine cannot be reached, refuses, or its answer is invalid. `retryable` if another
                engine may succeed.
        """
        engine_request = self._dialect.generate(request)
        url = f"{engine.url.rstrip('/')}{engine_request.path}"
        try:
            status, payload, stamped = await self._http.post(url, engine_request.body, trace_headers())
        except Unreachable as error:
            raise EngineFailure(
                f"{engine.name}: cannot be reached at {engine.url}: {error}", code="unreachable"
            ) from error
        except Lost as error:
            raise EngineFailure(f"{engine.name}: the connection was lost: {error}", code="connection_lost") from error
        if status != 200:
            raise self._refusal(engine.name, status, payload)
        return self._completion(engine.name, request.policy, payload, stamped)

    def _refusal(self, engine: str, status: int, payload: bytes) -> EngineFailure:
        """The failure for an HTTP status."""
        text = self._shown(payload)
        code, retryable = REFUSALS.get(status, ("engine_error", status >= 500 or status == 429))
        if status == 503 and DRAINING.encode() in payload:
            code, retryable = ENGINE_DRAINING, True
        if self._dialect.is_unknown_adapter(status, payload):
            code, retryable = "unknown_policy", True  # another engine may still have it
        return EngineFailure(f"{engine}: HTTP {status}: {text}", code=code, retryable=retryable)

    def _shown(self, payload: bytes) -> str:
        """The beginning of an answer, for a message."""
        return self._redactor.text(payload[: 4 * MESSAGE_CHARACTERS].decode(errors="replace"))[:MESSAGE_CHARACTERS]

    def _completion(self, engine: str, policy: str, payload: bytes, stamped: str | None) -> Completion:
        """Checks an answer.

        Raises:
            EngineFailure: It is not a valid answer to the request.
        """
        try:
            answer = self._dialect.read_generated(payload, stamped)
        except (ValueError, RecursionError) as error:
            reason = self._redactor.text(described(error))
            raise EngineFailure(
                f"{engine}: not an answer to a generate request ({reason}): {self._shown(payload)}", code="bad_answer"
            ) from error
        if answer.policy != policy:
            raise EngineFailure(
                f"{engine}: requested policy {policy!r}, answered with {answer.policy!r}",
                code="wrong_policy",
                retryable=False,
            )
        if answer.finish_reason == "abort":
            raise EngineFailure(f"{engine}: the engine aborted the request", code="aborted")
        if not answer.token_ids or len(answer.logprobs) != len(answer.token_ids):
            raise EngineFailure(
                f"{engine}: {len(answer.token_ids)} tokens came with {len(answer.logprobs)} log-probs",
                code="bad_answer",
            )
        if not math.isfinite(sum(answer.logprobs)):  # the sum is not finite if one value is not
            raise EngineFailure(
                f"{engine}: a sampled token has no finite log-probability; the policy may hold NaN", code="bad_logprob"
            )
        return Completion(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            policy=answer.policy,
        )
