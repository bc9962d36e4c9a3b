"""SGLang's dialect: requests, and answers as SGLang 0.5.23 gave them on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kestrl.engines import POLICY_HEADER, Generate, Load, Work
from kestrl.engines.sglang import Sglang
from kestrl.errors import EngineFailure
from kestrl.testing.engines import LAUNCH
from kestrl_inference.engine import Engine

DIALECT = Sglang()
JOB = "email-search-7.12"
TURN = Generate(
    id="e/1", policy=JOB, prompt_ids=[20, 21], temperature=0.7, max_tokens=6, seed=2**63 - 1, stop_token_ids=[2]
)


def generated(**changes: Any) -> bytes:
    """The answer to four prompt tokens, of which fields may be changed; those that are not read are left out."""
    meta = {
        "id": "6229da6d2934401d907ea4bddd704be1",
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 4,
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [-0.0006605588714592159, 20, None],
            [-0.17018334567546844, 20, None],
            [-0.4693104326725006, 21, None],
        ],
        "output_token_logprobs_length": 3,
        "completion_tokens": 3,
        "cached_tokens": 0,
    }
    return json.dumps({"text": "556", "output_ids": [20, 20, 21], "meta_info": meta | changes}).encode()


def scored(*entries: Any) -> bytes:
    return json.dumps({"text": "", "output_ids": [], "meta_info": {"input_token_logprobs": list(entries)}}).encode()


REFUSED = {
    "never loaded": b'{"error": {"message": "the adapter job.1 is not loaded", "code": 404}}',
    "unloaded twice": b'{"rid":null,"http_worker_ipc":null,"success":false,"error_message":"LoRA with name job.1 does '
    b'not exist. Loaded LoRAs: odict_keys([])","loaded_adapters":null}',
    "loaded twice": b'{"rid":null,"success":false,"error_message":"Failed to load LoRA adapter job.1 because it is '
    b'already loaded","loaded_adapters":{"job.1":"/a"}}',
    "too long": b'{"error":{"message":"The input (800 tokens) is longer than the model\'s context length (512 '
    b'tokens)."}}',
    "rank": b'{"rid":null,"success":false,"error_message":"LoRA adapter job.3 with rank 64 is incompatible with the '
    b"current LoRA memory pool configuration. Please ensure that the LoRA adapter's rank is within the configured "
    b'`--max-lora-rank` and that the target modules are included in `--lora-target-modules`.","loaded_adapters":{}}',
}


def test_a_turn_is_asked_for_by_token_ids_under_its_adapter_with_its_seed() -> None:
    method, path, body = DIALECT.generate(TURN)
    assert (method, path) == ("POST", "/generate")
    assert json.loads(body) == {
        "input_ids": [20, 21],
        "lora_path": JOB,
        "return_logprob": True,
        "sampling_params": {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 6,
            "sampling_seed": 2**63 - 1,
            "stop_token_ids": [2],
        },
    }
    truncated = json.loads(DIALECT.generate(replace(TURN, top_p=0.9, top_k=5)).body)["sampling_params"]
    assert (truncated["top_p"], truncated["top_k"]) == (0.9, 5)


def test_a_request_for_the_base_model_names_no_adapter() -> None:
    for request in (DIALECT.generate(replace(TURN, policy="base")), DIALECT.score("base", [1, 2])):
        assert json.loads(request.body)["lora_path"] is None


def test_an_answer_has_tokens_with_log_probs_and_the_policy_of_the_stamp() -> None:
    logprobs = [-0.0006605588714592159, -0.17018334567546844, -0.4693104326725006]
    assert DIALECT.read_generated(generated(), JOB) == (JOB, [20, 20, 21], logprobs, "length")
    stopped = DIALECT.read_generated(generated(finish_reason={"type": "stop", "matched": 21}), JOB)
    assert stopped.finish_reason == "stop"
    aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert DIALECT.read_generated(generated(finish_reason=aborted), JOB).finish_reason == "abort"


@pytest.mark.parametrize("stamped", [None, ""])
def test_an_answer_that_the_guard_did_not_see_is_not_read(stamped: str | None) -> None:
    with pytest.raises(ValueError, match="no name of a policy: the guard"):
        DIALECT.read_generated(generated(), stamped)


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": [[-0.1, 20, None], [-0.1, 20, None]]},
        {"output_token_logprobs": [[-0.1, 20, None], [-0.1, 20, None], [-0.1, 22, None]]},
        {"output_token_logprobs": [[None, 20, None], [-0.1, 20, None], [-0.1, 21, None]]},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [20, 20, 21]},
        {"finish_reason": None},
        {"finish_reason": {"type": "paused"}},
    ],
)
def test_an_answer_of_another_form_is_not_read(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"other tokens|unknown form|none of stop"):
        DIALECT.read_generated(generated(**changes), JOB)


def test_scores_are_those_of_the_given_tokens_after_the_first() -> None:
    answer = scored([None, 20, None], [-16.324066162109375, 21, None], [-18.794513702392578, 22, None])
    assert DIALECT.read_scores(answer, [20, 21, 22]) == [-16.324066162109375, -18.794513702392578]
    body = json.loads(DIALECT.score(JOB, [20, 21]).body)
    assert (body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == (0, 0)
    for ids in ([20, 21], [20, 21, 23]):
        with pytest.raises(ValueError, match="those of other tokens"):
            DIALECT.read_scores(answer, ids)
    with pytest.raises(ValueError, match="unknown form"):
        DIALECT.read_scores(scored([None, 20, None], [None, 21, None]), [20, 21])


@pytest.mark.parametrize(
    ("status", "refusal", "unknown"),
    [
        (404, "never loaded", True),
        (400, "unloaded twice", True),
        (400, "loaded twice", False),
        (400, "too long", False),
        (400, "rank", False),
    ],
)
def test_a_refusal_says_whether_the_adapter_is_unknown(status: int, refusal: str, unknown: bool) -> None:
    assert DIALECT.is_unknown_adapter(status, REFUSED[refusal]) is unknown
    assert not DIALECT.is_rank_too_high(REFUSED[refusal])  # it names rank and layers together


def test_adapters_version_and_load_are_read() -> None:
    models = (
        b'{"object":"list","data":[{"id":"base","object":"model","created":1795822070,"owned_by":"sglang",'
        b'"root":"base","parent":null,"max_model_len":512},{"id":"job.1","object":"model","created":1795822070,'
        b'"owned_by":"sglang","root":"/adapters/1","parent":"base","max_model_len":null}]}'
    )
    assert DIALECT.read_adapters(models, "base") == {"job.1": "/adapters/1"}
    assert DIALECT.read_version(b'{"timestamp":"2026-11-27T23:27:49Z","version":"0.5.23","loads":[]}') == "0.5.23"
    labels = '{engine_type="unified",model_name="base",pp_rank="0",tp_rank="0"}'
    page = "\n".join(
        [
            "# HELP sglang:token_usage The token usage",
            f"sglang:token_usage{labels} 0.25",
            f"sglang:num_running_reqs{labels} 3.0",
            f"sglang:num_queue_reqs{labels} 2.0",
            f"sglang:num_retracted_requests_total{labels} 1.0",
            f"sglang:num_retracted_reqs{labels} 9.0",
        ]
    )
    assert DIALECT.read_metrics(page) == (0.0, Load(kv_usage=0.25, running=3, waiting=2, preemptions=1), Work())


def test_the_work_is_read_from_sglangs_own_metrics() -> None:
    page = "\n".join(
        [
            'sglang:prompt_tokens_total{is_streaming="false",model_name="base"} 900.0',
            'sglang:cached_tokens_total{cache_source="device",model_name="base"} 250.0',
            'sglang:cached_tokens_total{cache_source="host",model_name="base"} 50.0',
            'sglang:generation_tokens_total{is_streaming="false",model_name="base"} 120.0',
            'sglang:per_stage_req_latency_seconds_sum{model_name="base",stage="prefill_forward"} 0.5',
            'sglang:per_stage_req_latency_seconds_sum{model_name="base",stage="request_process"} 9.0',
            'sglang:queue_time_seconds_sum{model_name="base"} 0.25',
            'sglang:e2e_request_latency_seconds_sum{is_streaming="false",model_name="base"} 2.25',
        ]
    )
    assert DIALECT.read_metrics(page).work == Work(
        prompt_tokens=900, cached_tokens=300, sampled_tokens=120, prefill_seconds=0.5, decode_seconds=1.5
    )


@pytest.mark.parametrize(
    ("stamped", "problem"),
    [
        (JOB, ""),
        ("base", f"it names the policy 'base' where '{JOB}' was asked for"),
        (None, "sglang 0.5.23 answers a generation in a form that is not known: the answer has no name of a policy"),
    ],
)
async def test_a_proof_wants_the_stamp_of_the_guard(stamped: str | None, problem: str) -> None:
    async def generate(_: web.Request) -> web.Response:
        body = json.loads(generated())
        body["output_ids"] = body["output_ids"][:1]
        body["meta_info"]["output_token_logprobs"] = body["meta_info"]["output_token_logprobs"][:1]
        return web.json_response(body, headers={POLICY_HEADER: stamped} if stamped else {})

    async def loads(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23"})

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/v1/loads", loads)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = Engine(f"http://127.0.0.1:{runner.addresses[0][1]}", "base", DIALECT, timeout=5.0)
    try:
        if problem:
            with pytest.raises(EngineFailure, match=problem) as failure:
                await engine.sample(JOB, [20, 21])
            assert failure.value.code == "engine_nonsense"
        else:
            await engine.sample(JOB, [20, 21])
    finally:
        await engine.close()
        await runner.cleanup()


def words(arguments: tuple[str, ...], option: str) -> list[str]:
    """The words after an option."""
    rest = arguments[arguments.index(option) + 1 :]
    return list(rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))])


def test_an_engine_on_a_cpu_is_started_guarded_with_seeds_and_a_bounded_cache() -> None:
    command = DIALECT.command(replace(LAUNCH, slots=4, version="0.5", options={"max-total-tokens": 4096}))
    assert command.module == "kestrl_inference.inside.sglang_launcher"
    ours = command.arguments[: command.arguments.index("--")]
    assert ours == ("--cpu", "--guard", "--version", "0.5")
    assert "--enable-deterministic-inference" in command.arguments
    assert words(command.arguments, "--max-loras-per-batch") == ["5"]
    assert words(command.arguments, "--max-total-tokens") == ["4096"]
    assert words(command.arguments, "--lora-target-modules")[0] == "q_proj"
    assert "--enable-trace" not in command.arguments
    assert command.environment["SGLANG_USE_CPU_ENGINE"] == "1"


def test_an_engine_on_gpus_uses_them_all_and_only_the_job_s_layers() -> None:
    launch = replace(LAUNCH, cpu=False, devices=2, targets=("q_proj", "v_proj"), otlp="http://c:4318", judges=True)
    command = DIALECT.command(launch)
    assert words(command.arguments, "--tp-size") == ["2"]
    assert words(command.arguments, "--lora-target-modules") == ["q_proj", "v_proj"]
    assert words(command.arguments, "--otlp-traces-endpoint") == ["http://c:4318/v1/traces"]
    assert "--constrained-json-disable-any-whitespace" in command.arguments
    assert "--cpu" not in command.arguments
    assert command.environment == {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}


def test_conversations_are_rendered_by_a_template_where_one_is_named() -> None:
    assert words(DIALECT.command(replace(LAUNCH, template="/t.jinja")).arguments, "--chat-template") == ["/t.jinja"]
    assert "--chat-template" not in DIALECT.command(LAUNCH).arguments
