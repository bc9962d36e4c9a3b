"""The face for clients that own their tokens: vLLM's `/inference/v1/generate`. Pure.

Sampling is the job's: what a client asks for beside its tokens, its limit and its stop tokens is not obeyed. A field
that would change what is sampled, and is not known to be harmless, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl.agents import Completion
from kestrl_rollout.gateway.fields import FieldRules, Refused, limit, mapping, read_object
from kestrl_rollout.gateway.sampler import TokenCall

TOP = FieldRules(
    read=frozenset({"token_ids", "sampling_params"}),
    harmless=frozenset({"request_id", "model", "priority", "cache_salt"}),
    defaults={"stream": (False,)},
    remedies={"stream": "the answer comes whole"},
)
PARAMETERS = FieldRules(
    read=frozenset({"max_tokens", "stop_token_ids"}),
    harmless=frozenset(
        {
            *("logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind"),
            "include_stop_str_in_output",
        }
    ),
    defaults={
        "n": (1,),
        "min_tokens": (0,),
        "ignore_eos": (False,),
        "truncate_prompt_tokens": (-1,),
        "logit_bias": ({},),
        "stop": ([], ""),
        "bad_words": ([],),
        "prompt_logprobs": (),
        "structured_outputs": (),
    },
    remedies={"stop": "give stop_token_ids"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """What a client asks to be sampled."""

    call: TokenCall
    metrics: Sequence[str]
    """Names of the metrics that count what was asked for and not obeyed."""


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
    fields = read_object(body)
    TOP.check(fields, sampling)
    parameters = mapping(fields.get("sampling_params"), "sampling_params")
    prompt = _ids(fields.get("token_ids"), "token_ids", vocabulary)
    if not prompt:
        raise Refused("token_ids is empty", code="invalid_value", field="token_ids")
    if len(prompt) >= context_length:
        raise Refused(
            f"the prompt has {len(prompt)} tokens, the model's context {context_length}; shorten it",
            code="context_length_exceeded",
            field="token_ids",
        )
    metrics = PARAMETERS.check(parameters, sampling, prefix="sampling_params.")
    stops = _ids(parameters.get("stop_token_ids") or [], "sampling_params.stop_token_ids", vocabulary)
    call = TokenCall(
        prompt_ids=prompt,
        max_tokens=limit(parameters, "max_tokens", prefix="sampling_params."),
        stop_token_ids=stops,
    )
    return TokenRequest(call=call, metrics=metrics)


def _ids(listing: Any, field: str, vocabulary: int) -> list[int]:
    ids = cast("list[Any]", listing) if isinstance(listing, list) else None
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
