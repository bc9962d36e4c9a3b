"""Cases of the public suite through the worker's gateway to a real vLLM: those that hold whatever a model says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.engine import Completion, Prompt
from tests.unit.rollout.gateway.subject import WorkerGateway

from kestrl.testing.gateway import Options, Served, check_gateway
from kestrl_demo_models.tiny import tiny

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.share(3)]
NUMBERS = (16, 17, 23, 26, 27, 43, 46, 47, 52)
CONTEXT = 1024
"""Tokens of a sequence, as of the tests' engines."""


@pytest.fixture
async def vllm(tmp_path: Path) -> AsyncIterator[Any]:
    """A real server with the demo model, and the answers that it gave."""
    from tests.integration.conftest import KEYS, Server

    server = Server(tiny(), tmp_path)
    server.start()
    try:
        server.wait_until_healthy()
        headers = {"authorization": f"Bearer {KEYS['KESTRL_ENGINE_KEY']}"}
        async with aiohttp.ClientSession(server.url, headers=headers) as http:
            yield http
    finally:
        server.stop()


class _OnVllm(WorkerGateway):
    """The worker's gateway, whose stage notes each prompt and passes it on."""

    def __init__(self, vllm: aiohttp.ClientSession, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._vllm = vllm
        self.answers: list[Sequence[int]] = []

    @asynccontextmanager
    async def serve(self, options: Options) -> AsyncGenerator[Served]:
        async with self.opened(options, folder=tiny(), seconds=60, context_length=CONTEXT) as episode:
            episode.stage.engine.script = self._sampled
            episode.says = lambda *turns: None  # the model says what it says
            yield episode

    async def _sampled(self, prompt: Prompt) -> Completion:
        request = {"model": prompt.model, "token_ids": prompt.token_ids, "sampling_params": prompt.sampling}
        async with self._vllm.post("/inference/v1/generate", json=request) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
        self.answers.append(choice["token_ids"])
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return Completion(token_ids=choice["token_ids"], finish_reason=choice["finish_reason"], logprobs=logprobs)


async def test_the_gateway_passes_before_a_real_engine(
    vllm: Any, served: Any, make_stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = _OnVllm(vllm, served, make_stage, monkeypatch)
    failed: list[str] = []
    for number in NUMBERS:
        try:
            await check_gateway(gateway, number)
        except AssertionError as error:
            failed.append(str(error))
    assert failed == []
    assert len(set(map(tuple, gateway.answers))) > 2  # a model that samples, and not one that is scripted
