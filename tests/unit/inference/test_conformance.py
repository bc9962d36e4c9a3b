"""The conformance suite of engine dialects: vLLM's passes it, and each broken one is found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.fakes.engine import FakeEngine

from kestrl._shared.spec.inference import Inference
from kestrl.engines import Command, EngineName, Generate, Generated, Launch, Request, Route
from kestrl.engines.registry import DIALECTS
from kestrl.engines.vllm import Vllm
from kestrl.formats.registry import BUILT_IN
from kestrl.testing.engines import LAUNCH, check_dialect, check_engine

PROMPT = [5, 6, 7, 8]


class OpensLoading(Vllm):
    data_routes: frozenset[Route] = Vllm.data_routes | {("POST", "/v1/load_lora_adapter")}


class HidesSampling(Vllm):
    data_routes: frozenset[Route] = frozenset({("GET", "/v1/models")})


class LocksHealth(Vllm):
    open_routes: frozenset[Route] = frozenset()


class AnyPort(Vllm):
    def command(self, launch: Launch) -> Command:
        found = super().command(launch)
        return Command(module=found.module, arguments=found.arguments[:6], environment=found.environment)


class RaisesKeyError(Vllm):
    def read_adapters(self, answer: bytes, base: str) -> dict[str, str]:
        raise KeyError("data")


class ReadsAnything(Vllm):
    def read_scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        return [0.0] * (len(token_ids) - 1)


def test_every_engine_of_the_manifest_has_a_dialect() -> None:
    assert list(DIALECTS) == list(get_args(EngineName)) == Inference.model_json_schema()["properties"]["engine"]["enum"]


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_the_dialects_conform(name: str) -> None:
    assert DIALECTS[name].name == name
    check_dialect(DIALECTS[name])


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (OpensLoading(), "only the control key may open it"),
        (HidesSampling(), "data_routes do not have POST"),
        (LocksHealth(), "open_routes do not have GET /health"),
        (AnyPort(), "command does not have 'base'"),
        (RaisesKeyError(), "raises KeyError, not ValueError"),
        (ReadsAnything(), "instead of raising ValueError"),
        (object(), "has no name, witness, ranks, health, metrics"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else "",
)
def test_a_broken_dialect_is_found(broken: Any, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        check_dialect(broken)


class ForgetsTheSeed(Vllm):
    calls = 0

    def generate(self, request: Generate) -> Request:
        self.calls += 1
        return super().generate(
            Generate(
                id=request.id,
                policy=request.policy,
                prompt_ids=request.prompt_ids,
                temperature=1.0,
                max_tokens=request.max_tokens,
                seed=self.calls,
                stop_token_ids=(),
            )
        )


class IgnoresTopK(Vllm):
    def generate(self, request: Generate) -> Request:
        return super().generate(replace(request, top_k=0))


class IgnoresTopP(Vllm):
    def generate(self, request: Generate) -> Request:
        return super().generate(replace(request, top_p=1.0))


class SamplesTheBase(Vllm):
    def generate(self, request: Generate) -> Request:
        found = super().generate(request)
        return found._replace(body=found.body.replace(request.policy.encode(), b"base"))


class ScoresTheBase(Vllm):
    def score(self, policy: str, token_ids: Sequence[int]) -> Request:
        return super().score("base", token_ids)


class LosesALogprob(Vllm):
    def read_generated(self, answer: bytes, stamped: str | None = None) -> Generated:
        found = super().read_generated(answer, stamped)
        return found._replace(logprobs=found.logprobs[1:])


class KeepsAdapters(Vllm):
    def unload(self, name: str) -> Request:
        return self.health


class KnowsNoRefusal(Vllm):
    def is_unknown_adapter(self, status: int, answer: bytes) -> bool:
        return False


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    """Folder of an adapter."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return str(tmp_path)


async def checked(dialect: Vllm, adapter: str) -> None:
    async with FakeEngine(eos_id=258, vocab_size=250, context_length=4096) as engine:
        await asyncio.to_thread(check_engine, dialect, engine.url, base="base", adapter=adapter, prompt_ids=PROMPT)


async def test_vllms_dialect_conforms_to_an_engine(adapter: str) -> None:
    await checked(Vllm(), adapter)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (ForgetsTheSeed, "one seed gave two samples"),
        (IgnoresTopK, "top_k 1 sampled other tokens"),
        (IgnoresTopP, "a top_p of nearly 0 sampled other tokens"),
        (SamplesTheBase, "an adapter that is not loaded was sampled"),
        (ScoresTheBase, "differ by|are those of the base model"),
        (LosesALogprob, "not one log-prob for each token"),
        (KeepsAdapters, "was not unloaded"),
        (KnowsNoRefusal, "is_unknown_adapter does not know 404"),
    ],
)
async def test_a_dialect_that_its_engine_contradicts_is_found(adapter: str, make: Callable[[], Vllm], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        await checked(make(), adapter)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_every_built_in_format_of_tool_calls_has_a_parser_in_each_engine(name: str) -> None:
    for kind in BUILT_IN:
        arguments = DIALECTS[name].command(replace(LAUNCH, tool_calls=kind)).arguments
        assert arguments[arguments.index("--tool-call-parser") + 1]
        assert ("--enable-auto-tool-choice" in arguments) == (name == "vllm")


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_calls_stay_text_in_another_format_and_a_parser_of_the_users_own_comes_first(name: str) -> None:
    for kind in (None, "mine:Format"):
        assert "--tool-call-parser" not in DIALECTS[name].command(replace(LAUNCH, tool_calls=kind)).arguments
    launch = replace(LAUNCH, tool_calls="hermes", options={"tool-call-parser": "granite"})
    arguments = DIALECTS[name].command(launch).arguments
    assert [arguments[at + 1] for at, each in enumerate(arguments) if each == "--tool-call-parser"] == ["granite"]
