"""The engine's HTTP dialect, and engines that do not speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kestrl.engines import Load, Work
from kestrl.engines.sglang import Sglang
from kestrl.engines.vllm import Vllm
from kestrl.errors import EngineFailure
from kestrl_inference import engine as client
from kestrl_inference.engine import Engine, EngineRefused

Answer = Callable[[web.Request], Any]


@asynccontextmanager
async def answering(answer: Answer, *, timeout: float = 5.0) -> AsyncIterator[Engine]:
    """An engine that gives every request the same kind of answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        said = answer(request)
        said = await said if asyncio.iscoroutine(said) else said
        return said if isinstance(said, web.StreamResponse) else web.json_response(said)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = Engine(f"http://127.0.0.1:{runner.addresses[0][1]}/", "base", Vllm(), timeout=timeout)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


def raw(text: str, status: int = 200) -> Answer:
    return lambda _request: web.Response(text=text, status=status)


MODELS = {"data": [{"id": "base", "root": "/m", "parent": None}, {"id": "job.1", "root": "/a", "parent": "base"}]}


def vllm(metrics: str | None, models: Any = MODELS) -> Answer:
    def answer(request: web.Request) -> Any:
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models":
            return models
        return web.Response(status=404) if metrics is None else web.Response(text=metrics)

    return answer


async def test_a_look_shows_health_adapters_and_birth() -> None:
    page = (
        "# HELP process_start_time_seconds x\nprocess_start_time_seconds_x 1\n"
        "process_start_time_seconds 1.79524452639e+09\n"
    )
    async with answering(vllm(page)) as engine:
        pulse = await engine.look()
        assert (pulse.healthy, pulse.adapters, pulse.born) == (True, frozenset({"job.1"}), 1795244526.39)
        assert await engine.adapters() == {"job.1": "/a"}


@pytest.mark.parametrize("metrics", [None, "vllm:x 1\n"], ids=["no metrics", "no birth"])
async def test_an_engine_that_does_not_report_its_start_is_healthy(metrics: str | None) -> None:
    async with answering(vllm(metrics)) as engine:
        pulse = await engine.look()
        assert (pulse.healthy, pulse.born) == (True, 0.0)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raw("dead", 503), "503: dead"),
        (raw("<html>another server</html>"), "not JSON"),
        (raw("[]"), "not a JSON object"),
        (vllm(None, models={"models": []}), "/v1/models has an unknown form"),
        (vllm(None, models={"data": [{"name": "base"}]}), "/v1/models has an unknown form"),
        (vllm(None, models={"data": None}), "/v1/models has an unknown form"),
    ],
    ids=["unhealthy", "HTML", "a list", "no data", "no ids", "null"],
)
async def test_a_server_that_is_not_an_engine_is_not_healthy(answer: Answer, reason: str) -> None:
    async with answering(answer) as engine:
        pulse = await engine.look()
        assert not pulse.healthy
        assert reason in pulse.reason


async def test_a_hung_engine_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CHECK_SECONDS", 0.05)
    async with answering(lambda _request: asyncio.sleep(60)) as engine:
        assert "no answer in 0.05 s" in (await engine.look()).reason


async def test_no_engine_at_all_is_not_healthy() -> None:
    engine = Engine("http://127.0.0.1:9", "base", Vllm(), timeout=5.0)
    pulse = await engine.look()
    assert not pulse.healthy
    assert "ClientConnectorError" in pulse.reason
    await engine.close()


async def test_every_failure_is_typed() -> None:
    async with answering(lambda _request: asyncio.sleep(60), timeout=0.05) as hung:
        with pytest.raises(EngineFailure) as caught:
            await hung.load("job.1", "/a")
        assert (caught.value.code, caught.value.retryable) == ("engine_deadline", True)
    async with answering(raw("no", 500)) as refusing:
        with pytest.raises(EngineRefused, match="POST /v1/load_lora_adapter: 500: no") as refused:
            await refusing.load("job.1", "/a")
        assert (refused.value.code, refused.value.retryable, refused.value.status) == ("engine_refused", False, 500)


async def test_unloading_what_is_not_there_is_not_an_error_and_a_wrong_key_is() -> None:
    async with answering(raw("not found", 404)) as engine:
        await engine.unload("job.1")
    async with answering(raw("key", 403)) as engine:
        with pytest.raises(EngineRefused, match="403"):
            await engine.unload("job.1")


async def test_an_adapter_is_never_loaded_in_place() -> None:
    bodies: list[Any] = []

    async def keep(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response()

    async with answering(keep) as engine:
        await engine.load("job.1", "/a")
    assert bodies == [{"lora_name": "job.1", "lora_path": "/a"}]


def listed(*positions: Any) -> list[Any]:
    return [None, *positions]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        listed({"6": {"logprob": -1.0}}),
        listed({"6": {"logprob": -1.0}}, {"8": {"logprob": -1.0}}),
        listed({"6": {"logprob": -1.0}}, None),
        listed({"6": {"logprob": -1.0}}, {"7": {"logprob": None}}),
        listed({"6": -1.0}, {"7": -2.0}),
    ],
    ids=["none", "empty", "too short", "another token", "a gap", "no number", "another shape"],
)
async def test_scores_that_are_not_understood_are_nonsense_not_numbers(answer: Any) -> None:
    async with answering(lambda _request: {"prompt_logprobs": answer}) as engine:
        with pytest.raises(EngineFailure, match="prompt_logprobs have an unknown form") as caught:
            await engine.score("job.1", [5, 6, 7])
    assert caught.value.code == "engine_nonsense"


@pytest.mark.parametrize("value", ["NaN", "-Infinity"])
async def test_scores_that_are_not_finite_prove_nothing(value: str) -> None:
    body = json.dumps({"prompt_logprobs": listed({"6": {"logprob": 0}})}).replace("0}", value + "}")
    async with answering(raw(body)) as engine:
        with pytest.raises(EngineFailure, match="not finite"):
            await engine.score("job.1", [5, 6])


@pytest.mark.parametrize(
    ("dialect", "metric"),
    [
        (Vllm(), "vllm:num_requests_running"),
        (Vllm(), "vllm:kv_cache_usage_perc"),
        (Sglang(), "sglang:num_running_reqs"),
        (Sglang(), "sglang:token_usage"),
    ],
)
@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "1e308\n{name} 1e308"])
async def test_metrics_that_are_not_finite_are_nonsense_not_numbers(
    dialect: Vllm | Sglang, metric: str, value: str
) -> None:
    page = f"{metric} {value.format(name=metric)}\n"

    def answer(request: web.Request) -> Any:
        return web.Response(text=page) if request.path == "/metrics" else {"data": []}

    async with answering(answer) as engine:
        engine.dialect = dialect
        pulse = await engine.look()
    assert not pulse.healthy
    assert f"the metric {metric} is " in pulse.reason
    assert "no finite number" in pulse.reason


async def test_scores_are_those_of_the_tokens_themselves() -> None:
    positions = listed({"6": {"logprob": -1.5}, "3": {"logprob": -0.1}}, {"7": {"logprob": -2.5}})
    async with answering(lambda _request: {"prompt_logprobs": positions}) as engine:
        assert await engine.score("job.1", [5, 6, 7]) == [-1.5, -2.5]


def test_the_load_is_read_from_vllms_own_metrics() -> None:
    page = (
        "# HELP vllm:kv_cache_usage_perc KV-cache usage.\n# TYPE vllm:kv_cache_usage_perc gauge\n"
        'vllm:kv_cache_usage_perc{engine="0",model_name="base"} 0.25\n'
        'vllm:num_requests_running{engine="0",model_name="base"} 3.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="base"} 2.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
        'vllm:num_preemptions_total{engine="0",model_name="base"} 1.0\n'
        'vllm:num_preemptions_total{engine="1",model_name="base"} 4.0\n'
    )
    assert Vllm().read_metrics(page).load == Load(kv_usage=0.25, running=3, waiting=2, preemptions=5)
    assert Vllm().read_metrics("# nothing\n") == (0.0, Load(), Work())


def test_the_work_is_read_from_vllms_own_metrics() -> None:
    labels = '{engine="0",model_name="base"}'
    page = (
        f"vllm:prompt_tokens_total{labels} 900.0\n"
        f"vllm:prefix_cache_hits_total{labels} 300.0\n"
        f"vllm:external_prefix_cache_hits_total{labels} 7.0\n"
        f"vllm:generation_tokens_total{labels} 120.0\n"
        f"vllm:request_prefill_time_seconds_count{labels} 9.0\n"
        f"vllm:request_prefill_time_seconds_sum{labels} 0.5\n"
        f"vllm:request_decode_time_seconds_sum{labels} 1.5\n"
    )
    assert Vllm().read_metrics(page).work == Work(
        prompt_tokens=900, cached_tokens=300, sampled_tokens=120, prefill_seconds=0.5, decode_seconds=1.5
    )
