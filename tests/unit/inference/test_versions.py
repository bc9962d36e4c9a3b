"""Versions of vLLM: what starts them, and what they answer to one and the same request with a seed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kestrl.engines.vllm import Vllm
from kestrl.engines.vllm_versions import version_facts

TOKENS = [470, 198]
LOGPROBS = [-1.11125119, -0.02296262]
"""Tokens and log-probs are the same in all of them, to the digit."""


def answer(version: tuple[int, int], **changes: Any) -> bytes:
    """The answer of a version to a generation, with the fields that this version has."""
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(TOKENS, LOGPROBS, strict=True)
    ]
    if version >= (0, 32):
        content = [{**entry, "token_id": token} for entry, token in zip(content, TOKENS, strict=True)]
    document: dict[str, Any] = {
        "request_id": "r",
        "choices": [
            {"index": 0, "logprobs": {"content": content}, "finish_reason": "length", "token_ids": TOKENS, **changes}
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
    }
    if version > (0, 23):
        document |= {"model": "job.1", "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}}
    if version >= (0, 27):
        document["ec_transfer_params"] = None
    if version >= (0, 30):
        document["choices"][0]["sampling_mask"] = None
    return json.dumps(document).encode()


@pytest.mark.parametrize("version", [(0, 25), (0, 27), (0, 30), (0, 32)], ids=str)
def test_answers_of_several_versions_are_read_alike(version: tuple[int, int]) -> None:
    generated = Vllm().read_generated(answer(version))
    assert (generated.policy, list(generated.token_ids), generated.finish_reason) == ("job.1", TOKENS, "length")
    assert list(generated.logprobs) == LOGPROBS


def test_an_answer_that_names_no_policy_is_not_read() -> None:
    with pytest.raises(ValueError, match="model"):
        Vllm().read_generated(answer((0, 23)))


@pytest.mark.parametrize("token", ["the", "token_id:", "token_id:4.0", "token_id:-1", "id:470"])
def test_a_log_prob_without_the_id_of_its_token_is_not_read(token: str) -> None:
    content = [{"token": token, "logprob": -1.0}]
    with pytest.raises(ValueError, match="names its token neither by token_id nor as token_id:N"):
        Vllm().read_generated(answer((0, 25), logprobs={"content": content}, token_ids=[470]))


def test_log_probs_of_other_tokens_are_not_taken() -> None:
    with pytest.raises(ValueError, match="with those of other tokens"):
        Vllm().read_generated(answer((0, 25), token_ids=[470, 199]))


@pytest.mark.parametrize(
    ("version", "token_routes", "spare_slots"),
    [
        ("0.23.0", False, 1),
        ("0.23.0.post1", False, 1),
        ("0.25.1+cu130", False, 1),
        ("0.27.1", False, 0),
        ("0.30.0rc2", True, 0),
        ("0.32.0", True, 0),
        ("1.0", True, 0),
        ("dev", True, 0),
        (None, True, 0),
    ],
)
def test_facts_of_a_version(version: str | None, token_routes: bool, spare_slots: int) -> None:
    assert version_facts(version) == (token_routes, spare_slots)
