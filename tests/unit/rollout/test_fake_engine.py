"""The fake engine is deterministic, token exact, and answers as vLLM does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.fakes.engine import Completion, FakeEngine, Fault, score


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as running:
        yield running


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> tuple[int, Any]:
    async with http.post(url, json=body, headers=headers) as response:
        text = await response.text()
        return response.status, await response.json() if text.startswith("{") else text


async def generate(http: aiohttp.ClientSession, engine: FakeEngine, ids: list[int], **sampling: Any) -> Any:
    model = sampling.pop("model", "base")
    body = {"model": model, "token_ids": ids, "sampling_params": sampling}
    status, answer = await post(http, f"{engine.url}/inference/v1/generate", body)
    assert status == 200, answer
    return answer


async def load(http: aiohttp.ClientSession, engine: FakeEngine, name: str, folder: Path, **headers: str) -> int:
    body = {"lora_name": name, "lora_path": str(folder)}
    return (await post(http, f"{engine.url}/v1/load_lora_adapter", body, **headers))[0]


async def test_the_same_request_gives_the_same_tokens(http: Any, engine: FakeEngine) -> None:
    first = await generate(http, engine, [1, 2], seed=5, logprobs=0, max_tokens=8)
    again = await generate(http, engine, [1, 2], seed=5, logprobs=0, max_tokens=8)
    other = await generate(http, engine, [1, 2], seed=6, logprobs=0, max_tokens=8)
    assert first["choices"] == again["choices"] != other["choices"]
    greedy = [await generate(http, engine, [1], seed=seed, temperature=0) for seed in (1, 2)]
    assert greedy[0]["choices"] == greedy[1]["choices"]


async def test_scoring_a_sequence_gives_what_generating_it_gave(http: Any, engine: FakeEngine) -> None:
    made = await generate(http, engine, [1, 2], seed=5, logprobs=0, max_tokens=4)
    choice = made["choices"][0]
    sequence = [1, 2, *choice["token_ids"]]
    scored = await generate(http, engine, sequence, prompt_logprobs=0, max_tokens=1)
    assert scored["prompt_logprobs"][0] is None
    values = [
        entry[str(token)]["logprob"] for token, entry in zip(sequence[1:], scored["prompt_logprobs"][1:], strict=True)
    ]
    assert values[1:] == [each["logprob"] for each in choice["logprobs"]["content"]]
    assert values == score("", sequence)[1:]
    assert all(-4 < value < 0 for value in values)


async def test_limits_and_stops(http: Any, engine: FakeEngine) -> None:
    engine.script = lambda prompt: Completion(token_ids=[5, 6, 2])
    whole = await generate(http, engine, [1], max_tokens=9)
    cut = await generate(http, engine, [1], max_tokens=2)
    assert (whole["choices"][0]["finish_reason"], cut["choices"][0]["finish_reason"]) == ("stop", "length")
    assert cut["choices"][0]["token_ids"] == [5, 6]
    assert cut["choices"][0]["logprobs"] is None
    engine.script, engine.vocab_size = None, 3
    ended = await generate(http, engine, [1], max_tokens=100, seed=1)
    assert ended["choices"][0]["token_ids"][-1] == engine.eos_id


async def test_adapters(http: Any, engine: FakeEngine, adapter: Path, tmp_path: Path) -> None:
    assert await load(http, engine, "p.1", adapter) == 200
    assert await load(http, engine, "p.1", adapter) == 400
    assert await load(http, engine, "base", adapter) == 400
    assert await load(http, engine, "p.2", tmp_path / "none") == 404
    engine.max_rank_error = True
    assert await load(http, engine, "p.2", adapter) == 500
    async with http.get(f"{engine.url}/v1/models") as response:
        models = (await response.json())["data"]
    assert [(model["id"], model["parent"]) for model in models] == [("base", None), ("p.1", "base")]
    based = await generate(http, engine, [1], seed=1, logprobs=0)
    tuned = await generate(http, engine, [1], seed=1, logprobs=0, model="p.1")
    assert tuned["model"] == "p.1"
    assert tuned["choices"] != based["choices"]
    unload = f"{engine.url}/v1/unload_lora_adapter"
    assert (await post(http, unload, {"lora_name": "p.1"}))[0] == 200
    assert (await post(http, unload, {"lora_name": "p.1"}))[0] == 404


async def test_the_bytes_are_the_policy_not_its_name(http: Any, engine: FakeEngine, adapter: Path) -> None:
    await load(http, engine, "a", adapter)
    await load(http, engine, "b", adapter)
    assert engine.weights("a") == engine.weights("b") != engine.weights("base")
    assert engine.weights("c") is None


async def test_errors(http: Any, engine: FakeEngine) -> None:
    url = f"{engine.url}/inference/v1/generate"
    status, answer = await post(http, url, {"model": "gone", "token_ids": [1]})
    assert (status, answer["error"]["code"]) == (404, 404)
    assert (await post(http, url, {"token_ids": [1] * 5000}))[0] == 400
    engine.script = lambda prompt: Fault(status=503, message="busy")
    assert (await post(http, url, {"token_ids": [1]}))[1]["error"]["message"] == "busy"
    engine.script = lambda prompt: Fault()
    with pytest.raises(aiohttp.ClientError):
        await post(http, url, {"token_ids": [1]})


async def test_keys(http: Any, adapter: Path) -> None:
    async with FakeEngine(key="data", control_key="control") as engine:
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        url = f"{engine.url}/inference/v1/generate"
        assert (await post(http, url, body))[0] == 401
        assert (await post(http, url, body, Authorization="Bearer data"))[0] == 200
        assert await load(http, engine, "p", adapter, Authorization="Bearer data") == 401
        assert await load(http, engine, "p", adapter, Authorization="Bearer control") == 200
        async with http.get(f"{engine.url}/v1/models") as response:
            assert response.status == 401
        async with http.get(f"{engine.url}/health") as response:
            assert response.status == 200
        assert (await post(http, f"{engine.url}/v1/unload_lora_adapter", {"lora_name": "p"}))[0] == 401


async def test_it_dies_and_comes_back_without_its_adapters(http: Any, engine: FakeEngine, adapter: Path) -> None:
    await load(http, engine, "p", adapter)
    url = engine.url
    await engine.stop()
    with pytest.raises(aiohttp.ClientConnectorError):
        await http.get(f"{url}/health")
    await engine.start()
    assert engine.url == url
    assert engine.adapters == {}
    engine.healthy = False
    async with http.get(f"{url}/health") as response:
        assert response.status == 503


async def test_a_held_answer(http: Any, engine: FakeEngine) -> None:
    arrived, go = asyncio.Event(), asyncio.Event()

    async def script(prompt: Any) -> Completion:
        arrived.set()
        return Completion(token_ids=[7], after=go)

    engine.script = script
    pending = asyncio.create_task(generate(http, engine, [1]))
    await arrived.wait()
    assert not pending.done()
    go.set()
    assert (await pending)["choices"][0]["token_ids"] == [7]
    assert engine.prompts[0].token_ids == [1]
