"""Dialect of vLLM 0.23 and later: its server's options, `/inference/v1/generate` and the routes of adapters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from kestrl.engines import (
    Command,
    Generate,
    Generated,
    Launch,
    Load,
    Metrics,
    Request,
    Route,
    SleepRoutes,
    Witness,
    Work,
)
from kestrl.engines.answers import json_object, listed_adapters, metric_sums
from kestrl.engines.options import Options, arguments_of
from kestrl.engines.otlp import trace_environment, traces_endpoint

GENERATE, ABORT = "/inference/v1/generate", "/inference/v1/abort_requests"
ID_PREFIX = "generate-tokens-"
"""What vLLM puts before the id of a request."""
LAUNCHER = "kestrl_inference.inside.launcher"
"""Module that starts the server in the engine's interpreter."""
SERVER = "vllm.entrypoints.openai.api_server"
START_METRIC = "process_start_time_seconds"
LOAD_METRICS = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_preemptions_total",
)
WORK_METRICS = (
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:generation_tokens_total",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
)
READ_METRICS = frozenset({START_METRIC, *LOAD_METRICS, *WORK_METRICS})
IMPOSSIBLE_LOGPROB = -9998.0
"""Bound below which vLLM's -9999 lies, which stands for NaN, -inf and missing values."""
SCORING = {
    "max_tokens": 1,
    "temperature": 1.0,
    "prompt_logprobs": 0,
    "detokenize": False,
    "skip_reading_prefix_cache": True,
}
"""Sampling parameters that make vLLM compute and return the log-probs of a prompt."""
CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
"""Size of the KV cache on a CPU: tens of thousands of tokens of a tiny model. Override it with
`inference.args.kv-cache-memory-bytes`."""
CPU_BATCHED_TOKENS = 8192
TOKEN_PREFIX = "token_id"  # noqa: S105 - a word of vLLM's answers
MEMORY_OPTIONS = ("gpu-memory-utilization", "kv-cache-memory-bytes")
"""Options of the memory on a device. The second one replaces a measurement that fails when another program of the
device frees memory meanwhile; the first one is still compared with what is free at the start."""
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # no compiler needed, and no stall at the first request
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with `uni`: the worker lives in the engine-core process
}
COMPACT_JSON = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""Form of replies that are held to a schema: a small model would otherwise write white space without end."""
PARSERS = {
    "harmony": "openai",
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "qwen_xml": "qwen3_coder",
}
"""Names of tool-call formats in the server."""
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


class _Scored(msgspec.Struct):
    """A sampled token; before 0.32 its id stands in `token` only."""

    logprob: float
    token_id: int | None = None
    token: str = ""


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


class Vllm:
    """vLLM's OpenAI-compatible server."""

    name: str = "vllm"
    witness: Witness = "engine"
    ranks: Sequence[int] = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    health: Request = Request("GET", "/health")
    metrics: Request = Request("GET", "/metrics")
    adapters: Request = Request("GET", "/v1/models")
    version: Request = Request("GET", "/version")
    # The default mode would abort requests. The routes exist in the server's development mode alone.
    sleep_routes: SleepRoutes | None = SleepRoutes(
        sleep=Request("POST", "/sleep?level=1&mode=wait"),
        wake=Request("POST", "/wake_up"),
        state=Request("GET", "/is_sleeping"),
    )
    open_routes: frozenset[Route] = frozenset({("GET", "/health"), ("GET", "/metrics"), ("GET", "/ping")})
    data_routes: frozenset[Route] = frozenset(
        {
            ("POST", GENERATE),
            ("POST", ABORT),
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/chat/completions"),
        }
    )

    def command(self, launch: Launch) -> Command:
        """With the guard as middleware. The launcher adds the options that depend on the engine's version."""
        options: Options = {
            **_model_options(launch),
            "served-model-name": launch.name,
            "host": launch.host,
            "port": launch.port,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "middleware": "kestrl_inference.inside.guard.ControlGuard",
            **({"chat-template": launch.template} if launch.template else {}),
            **_tool_options(launch),
            "disable-log-stats": False,
            **({"structured-outputs-config": COMPACT_JSON} if launch.judges else {}),
            **_trace_options(launch.otlp),
            **launch.options,
        }
        environment = {
            **ENVIRONMENT,
            **_cpu_environment(launch),
            **({"VLLM_SERVER_DEV_MODE": "1"} if launch.turns else {}),
            "VLLM_CACHE_ROOT": f"{launch.work_dir}/vllm-cache",
            "OTEL_SERVICE_NAME": "kestrl-engine",
            **trace_environment(launch.otlp),
        }
        arguments = (*_launcher_options(launch), *_version_options(launch), "--", *arguments_of(options))
        return Command(module=LAUNCHER, arguments=arguments, environment=environment)

    def generate(self, request: Generate) -> Request:
        body = {
            "request_id": request.id,
            "model": request.policy,
            "token_ids": list(request.prompt_ids),
            "sampling_params": {
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "max_tokens": request.max_tokens,
                "seed": request.seed,
                "stop_token_ids": list(request.stop_token_ids),
                "logprobs": 0,
                "detokenize": False,
            },
        }
        return Request("POST", GENERATE, msgspec.json.encode(body))

    def read_generated(self, answer: bytes, stamped: str | None = None) -> Generated:
        del stamped  # the answer itself names the policy
        try:
            completion = _ANSWERS.decode(answer)
        except msgspec.DecodeError:
            # It may hold NaN, which is not valid JSON.
            completion = msgspec.convert(json.loads(answer), _Answer)
        (choice,) = completion.choices
        scored = choice.logprobs.content
        if [_token_id(entry) for entry in scored] != choice.token_ids:
            raise ValueError(
                f"{len(choice.token_ids)} tokens came with {len(scored)} log-probs, or with those of other tokens"
            )
        logprobs = [entry.logprob for entry in scored]
        if logprobs and min(logprobs) <= IMPOSSIBLE_LOGPROB:
            logprobs = [value if value > IMPOSSIBLE_LOGPROB else math.nan for value in logprobs]
        return Generated(completion.model, choice.token_ids, logprobs, choice.finish_reason)

    def abort(self, request_id: str) -> Request | None:
        """Answered with 404 by versions that do not have the route."""
        return Request("POST", ABORT, msgspec.json.encode({"request_ids": [f"{ID_PREFIX}{request_id}"]}))

    def score(self, policy: str, token_ids: Sequence[int]) -> Request:
        body = {"model": policy, "token_ids": list(token_ids), "sampling_params": SCORING}
        return Request("POST", GENERATE, msgspec.json.encode(body))

    def read_scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        """VLLM answers null for the first token, then one object of candidates by token id per position."""
        positions: Any = json_object(answer).get("prompt_logprobs")
        try:
            if len(positions) != len(token_ids):
                raise ValueError(f"{len(positions)} positions for {len(token_ids)} tokens")
            return [
                float(position[str(token)]["logprob"])
                for position, token in zip(positions[1:], token_ids[1:], strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"prompt_logprobs have an unknown form: {error!r}") from error

    def load(self, name: str, folder: str) -> Request:
        return Request("POST", "/v1/load_lora_adapter", msgspec.json.encode({"lora_name": name, "lora_path": folder}))

    def unload(self, name: str) -> Request:
        return Request("POST", "/v1/unload_lora_adapter", msgspec.json.encode({"lora_name": name}))

    def is_unknown_adapter(self, status: int, answer: bytes) -> bool:
        del answer
        return status == 404

    def is_rank_too_high(self, answer: bytes) -> bool:
        return b"max_lora_rank" in answer

    def read_adapters(self, answer: bytes, base: str) -> dict[str, str]:
        return listed_adapters(answer, base)

    def read_version(self, answer: bytes) -> str:
        version = json_object(answer).get("version")
        if not isinstance(version, str):
            raise ValueError(f"/version has an unknown form: {answer[:200]!r}")
        return version

    def read_metrics(self, page: str) -> Metrics:
        values = metric_sums(page, READ_METRICS)
        kv, running, waiting, preemptions = (values.get(name, 0.0) for name in LOAD_METRICS)
        load = Load(kv_usage=kv, running=int(running), waiting=int(waiting), preemptions=int(preemptions))
        prompt, cached, sampled, prefill, decode = (values.get(name, 0.0) for name in WORK_METRICS)
        work = Work(
            prompt_tokens=int(prompt),
            cached_tokens=int(cached),
            sampled_tokens=int(sampled),
            prefill_seconds=prefill,
            decode_seconds=decode,
        )
        return Metrics(values.get(START_METRIC, 0.0), load, work)


def _token_id(entry: _Scored) -> int:
    if entry.token_id is not None:
        return entry.token_id
    prefix, _, number = entry.token.partition(":")
    if prefix != TOKEN_PREFIX or not number.isdecimal():
        raise ValueError(f"a log-prob names its token neither by token_id nor as {TOKEN_PREFIX}:N: {entry.token!r}")
    return int(number)


def _launcher_options(launch: Launch) -> tuple[str, ...]:
    return ("--cpu",) if launch.cpu else ()


def _version_options(launch: Launch) -> tuple[str, ...]:
    """Options of the launcher from which it makes those of the server, which differ between versions."""
    version_option = () if launch.version is None else ("--version", launch.version)
    return ("--slots", str(launch.slots), *version_option)


def _model_options(launch: Launch) -> Options:
    """Model options, for engines of a job and for the serving command."""
    return {
        "model": launch.model,
        "dtype": launch.dtype,
        "max-model-len": launch.context_length,
        "enable-lora": True,
        "max-lora-rank": launch.rank,
        **(_cpu_options(launch) if launch.cpu else _device_options(launch)),
    }


def _device_options(launch: Launch) -> Options:
    """Tensor parallelism over all devices of a replica, and the memory where the user does not set it."""
    options: Options = {"tensor-parallel-size": launch.devices} if launch.devices > 1 else {}
    if launch.memory is not None and not set(MEMORY_OPTIONS) & {name.replace("_", "-") for name in launch.options}:
        options |= dict(zip(MEMORY_OPTIONS, launch.memory, strict=True))
    return options | ({"enable-sleep-mode": True} if launch.turns else {})


def _cpu_options(launch: Launch) -> Options:
    return {
        "distributed-executor-backend": "uni",
        "kv-cache-memory-bytes": CPU_KV_CACHE_BYTES,
        # vLLM 0.32 ends on a CPU when a request with a seed is prefilled in parts ("CPU Generator does not use
        # offset"), so every prompt is prefilled whole; the budget of a pass must then hold the longest.
        "no-enable-chunked-prefill": True,
        "max-num-batched-tokens": max(launch.context_length, CPU_BATCHED_TOKENS),
    }


def _cpu_environment(launch: Launch) -> dict[str, str]:
    return {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(launch.threads)} if launch.cpu else {}


def _tool_options(launch: Launch) -> Options:
    parser = PARSERS.get(launch.tool_calls or "")
    return {} if parser is None else {"enable-auto-tool-choice": True, "tool-call-parser": parser}


def _trace_options(endpoint: str | None) -> Options:
    return {} if endpoint is None else {"otlp-traces-endpoint": traces_endpoint(endpoint)}
