"""Client of inference engines: token ids in, token ids and log-probabilities out, in the engine's dialect.

Answers are checked: the reported policy must be the requested one, and every token needs a finite log-probability.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self

from kestrl._shared.telemetry import trace_headers
from kestrl.agents import Completion
from kestrl.engines import DRAINING, EngineDialect, Generate, Generated, Request
from kestrl.errors import EngineFailure, described
from kestrl.redaction import Redactor
from kestrl_rollout.engine.http import HttpAnswer, Lost, PostClient, Unreachable

MESSAGE_CHARACTERS = 300
ABORT_SECONDS = 5.0
"""Time limit of the end of a request that is aborted; engines take milliseconds."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """An attempt at a turn that was ended since its version had become too old."""

    tokens: int | None
    """Number of tokens that it had; None if its engine did not say."""


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
        return _completion(engine.name, await self._generated(engine, request))

    async def generate_unless(
        self, retired: asyncio.Event, engine: EngineAddress, request: Generate
    ) -> Completion | Cut:
        """Samples one turn, or ends it as soon as an event is set.

        Raises:
            EngineFailure: As of `generate`.
        """
        sampling = asyncio.create_task(self._generated(engine, request))
        waiting = asyncio.create_task(retired.wait())
        try:
            await asyncio.wait((sampling, waiting), return_when=asyncio.FIRST_COMPLETED)
            if not sampling.done():
                return Cut(tokens=await self._abort(engine, request, sampling))
            return _completion(engine.name, await sampling)
        finally:
            sampling.cancel()  # which closes its connection: an engine that knows no other end of a request sees that
            waiting.cancel()
            await asyncio.gather(sampling, waiting, return_exceptions=True)

    async def _abort(self, engine: EngineAddress, request: Generate, sampling: asyncio.Task[Generated]) -> int | None:
        """Has the engine end a request that it is answering.

        Returns:
            Number of tokens that the request had; None if the engine does not say in time.
        """
        abort = self._dialect.abort(request.id)
        if abort is None:
            return None
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                answer = await self._post(engine, abort)
                return len((await sampling).token_ids) if answer.status == HTTPStatus.OK else None
        except (TimeoutError, EngineFailure):
            return None

    async def _generated(self, engine: EngineAddress, request: Generate) -> Generated:
        """The engine's answer, of the policy that was requested.

        Raises:
            EngineFailure: As of `generate`.
        """
        answer = await self._post(engine, self._dialect.generate(request))
        if answer.status != HTTPStatus.OK:
            raise self._refusal(engine.name, answer.status, answer.body)
        return self._read(engine.name, request.policy, answer)

    async def _post(self, engine: EngineAddress, request: Request) -> HttpAnswer:
        """Sends a request.

        Raises:
            EngineFailure: The engine cannot be reached, or the connection was lost.
        """
        try:
            return await self._http.post(f"{engine.url.rstrip('/')}{request.path}", request.body, trace_headers())
        except Unreachable as error:
            raise EngineFailure(
                f"{engine.name}: cannot be reached at {engine.url}: {error}", code="unreachable"
            ) from error
        except Lost as error:
            raise EngineFailure(f"{engine.name}: the connection was lost: {error}", code="connection_lost") from error

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

    def _read(self, engine: str, policy: str, answer: HttpAnswer) -> Generated:
        """Reads an answer.

        Raises:
            EngineFailure: It is not one to a request for the policy.
        """
        try:
            generated = self._dialect.read_generated(answer.body, answer.policy)
        except (ValueError, RecursionError) as error:
            reason = self._redactor.text(described(error))
            raise EngineFailure(
                f"{engine}: not an answer to a generate request ({reason}): {self._shown(answer.body)}",
                code="bad_answer",
            ) from error
        if generated.policy != policy:
            raise EngineFailure(
                f"{engine}: requested policy {policy!r}, answered with {generated.policy!r}",
                code="wrong_policy",
                retryable=False,
            )
        return generated


def _completion(engine: str, generated: Generated) -> Completion:
    """A sampled turn.

    Raises:
        EngineFailure: It was aborted, or a token has no log-probability.
    """
    if generated.finish_reason == "abort":
        raise EngineFailure(f"{engine}: the engine aborted the request", code="aborted")
    if not generated.token_ids or len(generated.logprobs) != len(generated.token_ids):
        raise EngineFailure(
            f"{engine}: {len(generated.token_ids)} tokens came with {len(generated.logprobs)} log-probs",
            code="bad_answer",
        )
    if not math.isfinite(sum(generated.logprobs)):  # the sum is not finite if one value is not
        raise EngineFailure(
            f"{engine}: a sampled token has no finite log-probability; the policy may hold NaN", code="bad_logprob"
        )
    return Completion(
        token_ids=generated.token_ids,
        logprobs=generated.logprobs,
        finish_reason=generated.finish_reason,
        policy=generated.policy,
    )
