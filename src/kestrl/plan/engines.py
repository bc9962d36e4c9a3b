"""Command line and environment of inference engines."""

from __future__ import annotations

from kestrl import engine_failure
from kestrl.episode import BASE_MODEL_NAME
from kestrl.plan.components import Component, Device, Ready, Role
from kestrl.plan.site import Site
from kestrl.spec.job import AgentRLJob
from kestrl.spec.rules import ENGINE_RANKS
from kestrl.telemetry.protocol import HTTP, is_http, signal_url

CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
"""Size of the KV cache on a CPU: tens of thousands of tokens of a tiny model. Override it with
`inference.args.kv-cache-memory-bytes`."""

CPU_BATCHED_TOKENS = 8192
Options = dict[str, str | int | float | bool]
"""Options of the engine's server: `{"max-loras": 4, "enable-lora": True}`."""

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # no compiler needed, and no stall at the first request
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with `uni`: the worker lives in the engine-core process
}
ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def engine_rank(rank: int) -> int:
    """Smallest `--max-lora-rank` of the engine that supports the adapter's rank."""
    return next(limit for limit in ENGINE_RANKS if limit >= rank)


def engine_component(job: AgentRLJob, site: Site, index: int) -> Component:
    """The engine of replica `index`."""
    spec = job.spec
    endpoint = site.endpoint(Role.ENGINE, index)
    build = site.build(spec.inference.accelerator, "inference")
    slots = spec.inference.adapter_slots + build.spare_slots
    options: Options = {
        **_model_options(job, site),
        "served-model-name": BASE_MODEL_NAME,
        "host": endpoint.bind,
        "port": endpoint.port,
        "max-loras": slots,
        # One more than the live versions: the engine would read an adapter that it evicted from its folder again, and
        # exit if the folder has been deleted.
        "max-cpu-loras": slots + 1,
        "enable-scale-out": build.scale_out,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "middleware": "kestrl_inference.guard.ControlGuard",
        "disable-log-stats": False,
    }
    if spec.telemetry.otlp:
        options["otlp-traces-endpoint"] = _traces_endpoint(spec.telemetry.otlp)
    options |= spec.inference.args
    return Component(
        name=f"engine-{index}",
        role=Role.ENGINE,
        module=_module(job, site),
        args=_arguments(options),
        env={
            **ENVIRONMENT,
            **_cpu_environment(job, site),
            "VLLM_CACHE_ROOT": f"{site.work_dir}/vllm-cache",
            "OTEL_SERVICE_NAME": "kestrl-engine",
            **_trace_protocol(spec.telemetry.otlp),
            engine_failure.VARIABLE: failure_file(site, index),
        },
        ports={"http": endpoint.port},
        ready=Ready(port=endpoint.port, http_path="/health"),
        device=Device(profile=spec.inference.accelerator.profile, count=spec.inference.accelerator.count),
    )


def _traces_endpoint(endpoint: str) -> str:
    return signal_url(endpoint, "traces") if is_http(endpoint) else endpoint


def _trace_protocol(endpoint: str | None) -> dict[str, str]:
    """Protocol of an OTLP/HTTP endpoint, which vLLM takes from the environment alone."""
    return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": HTTP} if endpoint and is_http(endpoint) else {}


def failure_file(site: Site, index: int) -> str:
    """File in which an engine records why it could not start, read by its agent."""
    return f"{site.work_dir}/engine-{index}-failure.json"


def serving_command(job: AgentRLJob, site: Site, adapter: str, folder: str, *, python: str) -> list[str]:
    """Command that serves an exported adapter with vLLM alone, with the configuration of the job's engines.

    Args:
        job: The job.
        site: Site with the base model and the chat template.
        adapter: The name to serve the adapter under.
        folder: Folder of the exported adapter.
        python: Interpreter with vLLM.
    """
    options: Options = {
        **_model_options(job, site),
        **({"chat-template": site.template} if site.template else {}),
        "host": "127.0.0.1",  # vLLM's default is every interface, without a key
        **job.spec.inference.args,
        "lora-modules": f"{adapter}={folder}",
    }
    environment = [f"{name}={value}" for name, value in _cpu_environment(job, site).items()]
    return [*environment, python, "-m", _module(job, site), *_arguments(options)]


def _on_cpu(job: AgentRLJob, site: Site) -> bool:
    return site.build(job.spec.inference.accelerator, "inference").device == "cpu"


def _module(job: AgentRLJob, site: Site) -> str:
    return "kestrl_inference.vllm_cpu" if _on_cpu(job, site) else "vllm.entrypoints.openai.api_server"


def _model_options(job: AgentRLJob, site: Site) -> Options:
    """Model options, for engines of a job and for the serving command."""
    spec = job.spec
    return {
        "model": site.model,
        "dtype": spec.model.dtype,
        "max-model-len": spec.inference.context_length,
        "enable-lora": True,
        "max-lora-rank": engine_rank(spec.model.adapter.rank),
        **(_cpu_options(job) if _on_cpu(job, site) else _device_options(job)),
    }


def _cpu_environment(job: AgentRLJob, site: Site) -> dict[str, str]:
    if not _on_cpu(job, site):
        return {}
    return {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": str(job.spec.inference.threads)}


def _device_options(job: AgentRLJob) -> Options:
    """Tensor parallelism over all devices of a replica."""
    count = job.spec.inference.accelerator.count
    return {"tensor-parallel-size": count} if count > 1 else {}


def _cpu_options(job: AgentRLJob) -> Options:
    return {
        "distributed-executor-backend": "uni",
        "kv-cache-memory-bytes": CPU_KV_CACHE_BYTES,
        # vLLM 0.32 ends on a CPU when a request with a seed is prefilled in parts ("CPU Generator does not use
        # offset"), so every prompt is prefilled whole; the budget of a pass must then hold the longest.
        "no-enable-chunked-prefill": True,
        "max-num-batched-tokens": max(job.spec.inference.context_length, CPU_BATCHED_TOKENS),
    }


def _arguments(options: Options) -> tuple[str, ...]:
    """`{"a": 1, "b": True, "c": False}` as `--a 1 --b`."""
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not False:
            flags += [f"--{name}", str(value)]
    return tuple(flags)
