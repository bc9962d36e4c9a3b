"""The answer of a judge's server to a request: read without trust in its form, its numbers or its size. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from kestrl.errors import described, encodable
from kestrl.tools.shapes import is_list, is_mapping

LARGEST_COUNT = 10**12
"""Bound on reported numbers of tokens."""


class NotACompletion(ValueError):
    """The answer has no completion; the text says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """An answer of a judge model."""

    content: str
    finish_reason: str
    input_tokens: int
    """As the server reports it; 0 for no usable number."""
    output_tokens: int
    """As `input_tokens`."""


def read_reply(body: bytes) -> JudgeReply:
    """The reply in a body.

    Raises:
        NotACompletion: There is none.
    """
    try:
        answer: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NotACompletion(f"the answer is not JSON ({described(error)[:200]})") from None
    choices = _of(answer, "choices")
    if not is_list(choices) or not choices:
        raise NotACompletion("the answer has no choices")
    message, usage = _of(choices[0], "message"), _of(answer, "usage")
    content, refusal = _of(message, "content"), _of(message, "refusal")
    text = f"(refused) {refusal}" if isinstance(refusal, str) and refusal else content
    if text is not None and not isinstance(text, str):
        raise NotACompletion("the content of the message is not text")
    reason = _of(choices[0], "finish_reason")
    return JudgeReply(
        content=encodable(text or ""),
        finish_reason=encodable(reason)[:100] if isinstance(reason, str) else "",
        input_tokens=_count(_of(usage, "prompt_tokens")),
        output_tokens=_count(_of(usage, "completion_tokens")),
    )


def _of(value: object, name: str) -> Any:
    return value.get(name) if is_mapping(value) else None


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST_COUNT else 0
