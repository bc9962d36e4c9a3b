"""The face for clients that own their tokens: vLLM's `/inference/v1/generate`. Pure.

Sampling is the job's: what a client asks for beside its tokens, its limit and its stop tokens is not obeyed. A field
that would change what is sampled, and is not known to be harmless, is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl.agents import Completion

FORCED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        "repetition_penalty",
    }
)
"""Parameters of sampling that are the job's."""
HARMLESS = frozenset(
    {
        *(
            "logprobs",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "ignore_eos",
            "output_kind",
        ),
        *("include_stop_str_in_output", "min_tokens", "truncate_prompt_tokens"),
    }
)
"""Parameters that do not change what is sampled."""
DEFAULTS: Mapping[str, Sequence[Any]] = {
    "n": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "truncate_prompt_tokens": (-1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "bad_words": ([],),
    "prompt_logprobs": (),
    "structured_outputs": (),
}
"""Parameters that only these values leave as they are; null is always allowed."""
REMEDIES: Mapping[str, str] = {
    "n": "make one call for each sample",
    "stop": "give stop_token_ids",
    "logit_bias": "the learner must compute the distribution that was sampled from",
    "bad_words": "the learner must compute the distribution that was sampled from",
    "structured_outputs": "the learner must compute the distribution that was sampled from",
    "stream": "the answer comes whole",
}
TOP = frozenset({"request_id", "model", "token_ids", "sampling_params", "stream", "priority", "cache_salt"})
"""Fields of a request that are known."""
LARGEST_COUNT = 2**31 - 1


class Refused(Exception):
    """A request that the client has to change."""

    def __init__(self, message: str, *, code: str = "unsupported_parameter", field: str = "") -> None:
        super().__init__(message)
        self.code, self.field = code, field


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """What a client asks to be sampled."""

    prompt_ids: Sequence[int]
    max_tokens: int | None
    stop_token_ids: Sequence[int]
    forced: Sequence[str]
    """Parameters that it asked for and did not get."""


def read_request(body: bytes, *, vocabulary: int, context_length: int, sampling: Mapping[str, Any]) -> TokenRequest:
    """Reads a request.

    Args:
        body: JSON.
        vocabulary: Number of token ids.
        context_length: Tokens of a sequence.
        sampling: The job's parameters by name.

    Raises:
        Refused: The client has to change it.
    """
    try:
        request: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(request, dict):
        raise Refused("the body is not a JSON object", code="invalid_json")
    fields = cast("dict[str, Any]", request)
    for name, value in fields.items():
        if name not in TOP and value is not None:
            raise _unknown(name)
    if fields.get("stream"):
        raise _unknown("stream")
    asked: Any = fields.get("sampling_params")
    asked = {} if asked is None else asked
    if not isinstance(asked, dict):
        raise Refused("sampling_params is not an object", code="invalid_value", field="sampling_params")
    parameters = cast("dict[str, Any]", asked)
    prompt = _ids(fields.get("token_ids"), "token_ids", vocabulary)
    if not prompt:
        raise Refused("token_ids is empty", code="invalid_value", field="token_ids")
    if len(prompt) >= context_length:
        raise Refused(
            f"the prompt has {len(prompt)} tokens, the model's context {context_length}; shorten it",
            code="context_length_exceeded",
            field="token_ids",
        )
    forced = [name for name, value in parameters.items() if _is_forced(name, value, sampling)]
    limit: Any = parameters.get("max_tokens")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit <= LARGEST_COUNT):
        raise Refused("max_tokens is not a positive integer", code="invalid_value", field="sampling_params.max_tokens")
    stops = _ids(parameters.get("stop_token_ids") or [], "sampling_params.stop_token_ids", vocabulary)
    return TokenRequest(prompt_ids=prompt, max_tokens=limit, stop_token_ids=stops, forced=forced)


def _is_forced(name: str, value: Any, sampling: Mapping[str, Any]) -> bool:
    """Whether a parameter is not obeyed.

    Raises:
        Refused: It cannot be ignored.
    """
    if value is None or name in ("max_tokens", "stop_token_ids"):
        return False
    if name in FORCED:
        return value != sampling.get(name, value)
    if name in DEFAULTS:
        if not any(value == default and type(value) is type(default) for default in DEFAULTS[name]):
            raise _unknown(f"sampling_params.{name}")
    elif name not in HARMLESS:
        raise _unknown(f"sampling_params.{name}")
    return False


def _unknown(field: str) -> Refused:
    remedy = REMEDIES.get(field.rpartition(".")[2], "leave it out")
    return Refused(f"{field} is not supported in training: {remedy}", field=field)


def _ids(given: Any, field: str, vocabulary: int) -> list[int]:
    ids = cast("list[Any]", given) if isinstance(given, list) else None
    if ids is None or any(type(token) is not int or not 0 <= token < vocabulary for token in ids):
        raise Refused(
            f"{field} is not a list of ids of the vocabulary, 0 to {vocabulary - 1}", code="invalid_value", field=field
        )
    return cast("list[int]", ids)


def write_answer(completion: Completion, *, answer_id: str, prompt_tokens: int) -> dict[str, Any]:
    """A sampled turn in vLLM's form."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None, "top_logprobs": []}
        for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
    ]
    sampled = len(completion.token_ids)
    return {
        "request_id": answer_id,
        "model": completion.policy,
        "choices": [
            {
                "index": 0,
                "finish_reason": completion.finish_reason,
                "stop_reason": None,
                "token_ids": list(completion.token_ids),
                "logprobs": {"content": content},
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": prompt_tokens + sampled,
        },
        "prompt_logprobs": None,
    }
