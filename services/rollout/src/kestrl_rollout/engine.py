"""Client of inference engines: token ids in, token ids and log-probabilities out, over vLLM's `/inference/v1/generate`.

Answers are checked: the reported policy must be the requested one, and every token needs a finite log-probability.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from kestrl.agents import Completion
from kestrl.errors import EngineFailure
from kestrl.telemetry import trace_headers
from kestrl_rollout.http import HttpClient, Lost, Unreachable

IMPOSSIBLE_LOGPROB = -9998.0
"""Bound below vLLM's -9999, which stands for NaN, -inf and missing values."""
MESSAGE_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddress:
    """An engine that serves the group's policy."""

    name: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample."""

    id: str
    policy: str
    """Name under which the policy is served."""
    prompt_ids: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int
    stop_token_ids: Sequence[int]

    def body(self) -> dict[str, Any]:
        return {
            "request_id": self.id,
            "model": self.policy,
            "token_ids": list(self.prompt_ids),
            "sampling_params": {
                "temperature": self.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_tokens": self.max_tokens,
                "seed": self.seed,
                "stop_token_ids": list(self.stop_token_ids),
                "logprobs": 0,
                "detokenize": False,
            },
        }


class EngineClient:
    """Client of all engines of the worker. Concurrent episodes bound the connections; there is no queue here."""

    def __init__(self, key: str | None) -> None:
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        self._http = HttpClient({"content-type": "application/json", **authorization})

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def generate(self, engine: EngineAddress, request: GenerateRequest) -> Completion:
        """Samples one turn.

        Raises:
            EngineFailure: The engine cannot be reached, refuses, or its answer is invalid. `retryable` if another
                engine may succeed.
        """
        url = f"{engine.url.rstrip('/')}/inference/v1/generate"
        try:
            status, payload = await self._http.post(url, msgspec.json.encode(request.body()), trace_headers())
        except Unreachable as error:
            raise EngineFailure(
                f"{engine.name}: cannot be reached at {engine.url}: {error}", code="unreachable"
            ) from error
        except Lost as error:
            raise EngineFailure(f"{engine.name}: the connection was lost: {error}", code="connection_lost") from error
        if status != 200:
            raise refusal(engine.name, status, payload)
        return read_completion(engine.name, request.policy, payload)


def refusal(engine: str, status: int, payload: bytes) -> EngineFailure:
    """The failure for an HTTP status."""
    text = payload[:MESSAGE_CHARACTERS].decode(errors="replace")
    code, retryable = {
        400: ("bad_request", False),
        401: ("unauthorized", False),
        403: ("unauthorized", False),
        404: ("unknown_policy", True),  # another engine may still have it
        422: ("bad_request", False),
    }.get(status, ("engine_error", status >= 500 or status == 429))
    return EngineFailure(f"{engine}: HTTP {status}: {text}", code=code, retryable=retryable)


class _Scored(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Scored]


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    """The fields used of an answer; others are skipped."""

    model: str
    choices: tuple[_Choice]


_ANSWERS = msgspec.json.Decoder(_Answer)


def _parsed(payload: bytes) -> _Answer:
    try:
        return _ANSWERS.decode(payload)
    except msgspec.DecodeError:
        # It may hold NaN, which is not valid JSON and is reported by its own error below.
        return msgspec.convert(json.loads(payload), _Answer)


def read_completion(engine: str, policy: str, payload: bytes) -> Completion:
    """Checks an answer and decodes it.

    Raises:
        EngineFailure: It is not a valid answer to the request.
    """
    try:
        answer = _parsed(payload)
    except (msgspec.MsgspecError, ValueError) as error:
        text = payload[:MESSAGE_CHARACTERS].decode(errors="replace")
        raise EngineFailure(
            f"{engine}: not an answer to a generate request ({type(error).__name__}: {error}): {text}",
            code="bad_answer",
        ) from error
    named, (choice,) = answer.model, answer.choices
    ids, finish, scored = choice.token_ids, choice.finish_reason, choice.logprobs.content
    if named != policy:
        raise EngineFailure(
            f"{engine}: requested policy {policy!r}, answered with {named!r}", code="wrong_policy", retryable=False
        )
    if finish == "abort":
        raise EngineFailure(f"{engine}: the engine aborted the request", code="aborted")
    if not ids or [entry.token_id for entry in scored] != ids:
        raise EngineFailure(
            f"{engine}: {len(ids)} tokens came with {len(scored)} log-probs, or with those of other tokens",
            code="bad_answer",
        )
    logprobs = [entry.logprob for entry in scored]
    if (
        not math.isfinite(sum(logprobs)) or min(logprobs) <= IMPOSSIBLE_LOGPROB
    ):  # the sum is not finite if one value is not
        raise EngineFailure(
            f"{engine}: a sampled token has no finite log-probability; the policy may hold NaN", code="bad_logprob"
        )
    return Completion(token_ids=ids, logprobs=logprobs, finish_reason=finish, policy=named)
