"""Dialect of SGLang 0.5: its server's options, `/generate` and the routes of adapters.

SGLang's answers name no policy, and a request under an adapter that was unloaded is served from its old folder, so the
guard inside its server (`kestrl_inference.inside.witness`) refuses what is not loaded and names the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from kestrl.engines.answers import json_object, labelled_sum, listed_adapters, metric_sums
from kestrl.engines.options import Options, arguments_of
from kestrl.engines.otlp import trace_environment, traces_endpoint
from kestrl.episode import BASE_MODEL_NAME

LAUNCHER = "kestrl_inference.inside.sglang_launcher"
"""Module that starts the server in the engine's interpreter."""
SERVER = "sglang.launch_server"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of Qwen's and Llama's layout: SGLang wants to know at the start which layers adapters may change."""
LOAD_METRICS = (
    "sglang:token_usage",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_retracted_requests_total",
)
TOKEN_METRICS = ("sglang:prompt_tokens_total", "sglang:cached_tokens_total", "sglang:generation_tokens_total")
STAGES = "sglang:per_stage_req_latency_seconds_sum"
PREFILL = 'stage="prefill_forward"'
REQUEST_SECONDS, QUEUE_SECONDS = "sglang:e2e_request_latency_seconds_sum", "sglang:queue_time_seconds_sum"
FINISHED = ("stop", "length", "abort")
CPU_TOKENS = 32_768
"""Tokens of the KV cache on a CPU, where SGLang would take most of the memory. Override it with
`inference.args.max-total-tokens`."""
CPU_REQUESTS = 64
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # no compiler needed, and no stall at the first request with a seed
    # Only the models of common layouts are imported at first, in each of three processes.
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "kestrl_inference.inside.sglang_models",
    "OMP_WAIT_POLICY": "PASSIVE",
}


PARSERS = {
    "harmony": "gpt-oss",
    "hermes": "hermes",
    "llama3_json": "llama3",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "qwen_xml": "qwen3_coder",
}
"""Names of tool-call formats in the server."""


class Sglang:
    """SGLang's HTTP server."""

    name: str = "sglang"
    witness: Witness = "guard"
    ranks: Sequence[int] = ()
    health: Request = Request("GET", "/ready")  # /health takes a second, since it generates a token
    metrics: Request = Request("GET", "/metrics")
    adapters: Request = Request("GET", "/v1/models")
    version: Request = Request("GET", "/v1/loads")
    sleep_routes: SleepRoutes | None = None
    open_routes: frozenset[Route] = frozenset({("GET", "/ready"), ("GET", "/health"), ("GET", "/metrics")})
    data_routes: frozenset[Route] = frozenset(
        {("POST", "/generate"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("POST", "/v1/chat/completions")}
    )

    def command(self, launch: Launch) -> Command:
        """With the guard, and with seeds, which SGLang ignores without deterministic inference."""
        options: Options = {
            **_model_options(launch),
            # A base model in a batch takes a slot, too.
            "max-loras-per-batch": launch.slots + 1,
            "max-loaded-loras": launch.slots + 1,
            "served-model-name": launch.name,
            "host": launch.host,
            "port": launch.port,
            "enable-metrics": True,
            "skip-server-warmup": True,  # it would ask without a key
            "log-level-http": "warning",  # a line for each request, otherwise
            **({"chat-template": launch.template} if launch.template else {}),
            **({"tool-call-parser": PARSERS[launch.tool_calls]} if launch.tool_calls in PARSERS else {}),
            "enable-deterministic-inference": True,
            **({"constrained-json-disable-any-whitespace": True} if launch.judges else {}),
            **_trace_options(launch.otlp),
            **launch.options,
        }
        version = () if launch.version is None else ("--version", launch.version)
        arguments = (*_launcher_options(launch), "--guard", *version, "--", *arguments_of(options), *_targets(launch))
        return Command(module=LAUNCHER, arguments=arguments, environment=_environment(launch))

    def generate(self, request: Generate) -> Request:
        """Without the request's id: SGLang refuses one that it still runs, and ends a request whose client has gone
        only after seconds.
        """
        sampling = {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k or -1,
            "max_new_tokens": request.max_tokens,
            "sampling_seed": request.seed,
            "stop_token_ids": list(request.stop_token_ids),
        }
        return _generation(request.policy, request.prompt_ids, sampling)

    def read_generated(self, answer: bytes, stamped: str | None = None) -> Generated:
        if not stamped:
            raise ValueError("the answer has no name of a policy: the guard of the engine's server did not see it")
        document: Any = json_object(answer)
        try:
            meta = document["meta_info"]
            token_ids, scored = list(document["output_ids"]), meta["output_token_logprobs"]
            if [token for _, token, *_ in scored] != token_ids:
                raise ValueError(
                    f"{len(token_ids)} tokens came with {len(scored)} log-probs, or with those of other tokens"
                )
            logprobs = [float(logprob) for logprob, *_ in scored]
            reason = meta["finish_reason"]["type"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"/generate has an unknown form: {error!r}") from error
        if reason not in FINISHED:
            raise ValueError(f"finish_reason.type is none of {', '.join(FINISHED)}: {reason!r}")
        return Generated(stamped, token_ids, logprobs, reason)

    def abort(self, request_id: str) -> Request | None:
        """None: requests go without their ids."""
        del request_id
        return None

    def score(self, policy: str, token_ids: Sequence[int]) -> Request:
        """SGLang computes the log-probs of a prompt without its cache, and at temperature 1."""
        return _generation(policy, token_ids, {"temperature": 1.0, "max_new_tokens": 0}, logprob_start_len=0)

    def read_scores(self, answer: bytes, token_ids: Sequence[int]) -> list[float]:
        """SGLang answers null for the first token, then log-prob, id and text for each."""
        document: Any = json_object(answer)
        try:
            positions = document["meta_info"]["input_token_logprobs"]
            if [token for _, token, *_ in positions] != list(token_ids):
                raise ValueError(f"{len(positions)} positions for {len(token_ids)} tokens, or those of other tokens")
            return [float(logprob) for logprob, *_ in positions[1:]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"input_token_logprobs have an unknown form: {error!r}") from error

    def load(self, name: str, folder: str) -> Request:
        return Request("POST", "/load_lora_adapter", msgspec.json.encode({"lora_name": name, "lora_path": folder}))

    def unload(self, name: str) -> Request:
        return Request("POST", "/unload_lora_adapter", msgspec.json.encode({"lora_name": name}))

    def is_unknown_adapter(self, status: int, answer: bytes) -> bool:
        return status == 404 or (status == 400 and b"LoRA with name" in answer and b"does not exist" in answer)

    def is_rank_too_high(self, answer: bytes) -> bool:
        """SGLang names rank and layers together, whichever does not fit."""
        del answer
        return False

    def read_adapters(self, answer: bytes, base: str) -> dict[str, str]:
        return listed_adapters(answer, base)

    def read_version(self, answer: bytes) -> str:
        version = json_object(answer).get("version")
        if not isinstance(version, str):
            raise ValueError(f"/v1/loads has an unknown form: {answer[:200]!r}")
        return version

    def read_metrics(self, page: str) -> Metrics:
        """The start is not on the page: a restart is detected by missing adapters. Neither is the time of decoding: it
        is what queue and prefill leave of the requests' time.
        """
        sums = metric_sums(page, (*LOAD_METRICS, *TOKEN_METRICS, REQUEST_SECONDS, QUEUE_SECONDS))
        usage, running, waiting, retracted = (sums.get(name, 0.0) for name in LOAD_METRICS)
        load = Load(kv_usage=usage, running=int(running), waiting=int(waiting), preemptions=int(retracted))
        prefill = labelled_sum(page, STAGES, PREFILL)
        decode = sums.get(REQUEST_SECONDS, 0.0) - sums.get(QUEUE_SECONDS, 0.0) - prefill
        prompt, cached, sampled = (int(sums.get(name, 0.0)) for name in TOKEN_METRICS)
        work = Work(
            prompt_tokens=prompt,
            cached_tokens=cached,
            sampled_tokens=sampled,
            prefill_seconds=prefill,
            decode_seconds=max(0.0, decode),
        )
        return Metrics(0.0, load, work)


def _generation(policy: str, token_ids: Sequence[int], sampling: Mapping[str, object], **fields: object) -> Request:
    """A request to `/generate`; one for the base model names no adapter."""
    body = {
        "input_ids": list(token_ids),
        "lora_path": None if policy == BASE_MODEL_NAME else policy,
        "return_logprob": True,
        "sampling_params": sampling,
        **fields,
    }
    return Request("POST", "/generate", msgspec.json.encode(body))


def _launcher_options(launch: Launch) -> tuple[str, ...]:
    return ("--cpu",) if launch.cpu else ()


def _model_options(launch: Launch) -> Options:
    """Model options, for engines of a job and for the serving command."""
    return {
        "model-path": launch.model,
        "dtype": launch.dtype,
        "context-length": launch.context_length,
        "enable-lora": True,
        "max-lora-rank": launch.rank,
        "sampling-defaults": "openai",  # the model's own would change what a request means
        **(_cpu_options(launch) if launch.cpu else _device_options(launch)),
    }


def _targets(launch: Launch) -> tuple[str, ...]:
    return ("--lora-target-modules", *(launch.targets or LINEAR))


def _device_options(launch: Launch) -> Options:
    """Tensor parallelism over all devices of a replica. None of them is shared with the learner."""
    return {"tp-size": launch.devices} if launch.devices > 1 else {}


def _cpu_options(launch: Launch) -> Options:
    return {
        "device": "cpu",
        "attention-backend": "torch_native",
        "lora-backend": "torch_native",
        "max-total-tokens": max(launch.context_length, CPU_TOKENS),
        "max-running-requests": CPU_REQUESTS,
        "sleep-on-idle": True,  # the scheduler takes a core otherwise
    }


def _environment(launch: Launch) -> dict[str, str]:
    cpu = {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(launch.threads)} if launch.cpu else {}
    return {**cpu, **trace_environment(launch.otlp)}


def _trace_options(endpoint: str | None) -> Options:
    if endpoint is None:
        return {}
    return {
        "enable-trace": True,
        "otlp-traces-endpoint": traces_endpoint(endpoint),
        "otlp-service-name": "kestrl-engine",
    }
