"""Arguments and variables of engines that are reserved, by what they would change, each with the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

OWN = "remove it; KestRL sets it"
SAMPLING = "remove it; the engine would sample from another distribution than the learner computes"
ANSWERING = "remove it; adapters are verified in each engine's one process, which it would replace or multiply"
CODE = "remove it; it loads code into the server, which could pass the guard and answer in the engine's place"
VLLM_ARGUMENTS: Mapping[str, str] = {
    "model": "set spec.model.base",
    "tokenizer": "set spec.model.base",
    "dtype": "set spec.model.dtype",
    "max-model-len": "set spec.inference.contextLength",
    "tensor-parallel-size": "set spec.inference.accelerator.count",
    "max-lora-rank": "set spec.model.adapter.rank",
    "max-loras": "set spec.inference.adapterSlots",
    "max-cpu-loras": "set spec.inference.adapterSlots",
    "chat-template": "set spec.agent.template",
    "hf-token": "remove it; arguments are in a ConfigMap, so set HF_TOKEN from a Secret",
    "help": "remove it; the engine would print its help and end",
    "version": "remove it; the engine would print its version and end",
} | dict.fromkeys(
    (
        "served-model-name", "host", "port", "uds", "fd", "grpc", "middleware", "root-path", "api-key", "config",
        "enable-lora", "lora-modules", "logprobs-mode", "generation-config", "enable-scale-out", "tp", "pp", "dp",
    ),
    OWN,
) | dict.fromkeys(
    (
        "override-generation-config", "logits-processors", "logits-processor-pattern", "hf-overrides", "hf-config-path",
        "revision", "code-revision", "tokenizer-revision", "runner", "convert", "task", "model-impl",
        "model-class-overrides", "diffusion-config", "default-mm-loras", "lora-target-modules",
        "trust-request-chat-template", "chat-template-content-format", "default-chat-template-kwargs",
        "skip-tokenizer-init", "enable-trace-replay", "return-sampling-mask", "override-attention-dtype",
    ),
    SAMPLING,
) | dict.fromkeys(
    (
        "worker-cls", "worker-extension-cls", "scheduler-cls", "headless", "api-server-count", "tokenizer-worker-num",
        "pipeline-parallel-size", "nnodes", "node-rank", "master-addr", "master-port", "enable-prompt-embeds",
        "kv-transfer-config", "ec-transfer-config", "weight-transfer-config", "enable-elastic-ep",
        "elastic-ep-max-dp-size", "enable-fault-tolerance", "fault-tolerance-config",
    ),
    ANSWERING,
) | dict.fromkeys(
    (
        "tool-parser-plugin", "reasoning-parser-plugin", "io-processor-plugin", "log-config-file", "logging-config",
        "kv-connector-module-path",
    ),
    CODE,
)  # fmt: skip
VLLM_FAMILIES: Mapping[str, str] = {
    "speculative-": SAMPLING,
    "spec-": SAMPLING,
    "watermark": SAMPLING,
    "data-parallel-": ANSWERING,
    "ssl-": OWN,
}
SGLANG_ARGUMENTS: Mapping[str, str] = {
    "model-path": "set spec.model.base",
    "model": "set spec.model.base",
    "tokenizer-path": "set spec.model.base",
    "dtype": "set spec.model.dtype",
    "context-length": "set spec.inference.contextLength",
    "tp-size": "set spec.inference.accelerator.count",
    "tensor-parallel-size": "set spec.inference.accelerator.count",
    "max-lora-rank": "set spec.model.adapter.rank",
    "lora-target-modules": "set spec.model.adapter.targets",
    "max-loras-per-batch": "set spec.inference.adapterSlots",
    "max-loaded-loras": "set spec.inference.adapterSlots",
    "chat-template": "set spec.agent.template",
    "help": "remove it; the engine would print its help and end",
    "version": "remove it; the engine would print its version and end",
} | dict.fromkeys(
    (
        "served-model-name", "host", "port", "fastapi-root-path", "api-key", "admin-api-key", "config", "enable-lora",
        "lora-paths", "enable-deterministic-inference", "sampling-defaults", "skip-server-warmup", "device",
        "enable-http2", "enable-ssl-refresh",
    ),
    OWN,
) | dict.fromkeys(
    (
        "preferred-sampling-params", "enable-custom-logit-processor", "json-model-override-args", "revision",
        "model-impl", "model-config-parser", "sampling-mask-max-tokens", "rl-on-policy-target", "rl-quant-profile",
        "enable-multi-layer-eagle", "uno-lora-path", "experts-shared-outer-loras", "lora-use-virtual-experts",
        "hf-chat-template-name", "completion-template", "trust-request-chat-template", "default-chat-template-kwargs",
        "skip-tokenizer-init", "allow-auto-truncate", "is-embedding", "enable-streaming-session",
    ),
    SAMPLING,
) | dict.fromkeys(
    (
        "tokenizer-worker-num", "detokenizer-worker-num", "dp-size", "data-parallel-size", "attn-dp-size", "pp-size",
        "pipeline-parallel-size", "nnodes", "node-rank", "dist-init-addr", "enable-dp-attention", "enable-dp-lm-head",
        "enable-pdmux", "encoder-only", "language-only", "language-model-only", "use-ray", "grpc-mode", "grpc-port",
        "smg-grpc-mode", "smg-http-sidecar-port", "enable-http-worker-reuseport", "sidecar", "sidecar-args",
        "gated-launch-port", "engine-info-bootstrap-port", "checkpoint-engine-wait-weights-before-ready",
        "max-ep-size", "lora-eviction-policy", "enable-lora-overlap-loading",
    ),
    ANSWERING,
) | dict.fromkeys(
    (
        "custom-weight-loader", "forward-hooks", "stat-loggers", "custom-sigquit-handler", "tool-server",
        "decrypted-config-file", "msprobe-dump-config",
    ),
    CODE,
)  # fmt: skip
SGLANG_FAMILIES: Mapping[str, str] = {
    "speculative-": SAMPLING,
    "watermark-": SAMPLING,
    "enable-watermark": SAMPLING,
    "dllm-": SAMPLING,
    "disaggregation-": ANSWERING,
    "decoupled-spec-": ANSWERING,
    "elastic-ep-": ANSWERING,
    "ep-join-": ANSWERING,
    "remote-instance-": ANSWERING,
    "weight-cache-": ANSWERING,
    "debug-tensor-dump-": ANSWERING,
    "ssl-": OWN,
}


class Reserved(NamedTuple):
    """What is reserved of an engine."""

    arguments: Mapping[str, str]
    """Arguments of its server, with the fix."""
    families: Mapping[str, str]
    """Beginnings of arguments that are all reserved, those of later versions of the engine too."""
    classes: tuple[str, ...]
    """Arguments whose value is one of the engine's words, or names a class that it imports."""


RESERVED: Mapping[str, Reserved] = {
    "vllm": Reserved(
        VLLM_ARGUMENTS, VLLM_FAMILIES, classes=("distributed-executor-backend", "load-format", "tokenizer-mode")
    ),
    "sglang": Reserved(SGLANG_ARGUMENTS, SGLANG_FAMILIES, classes=("load-format", "tokenizer-mode")),
}
"""What is reserved, by engine."""
RESERVED_VARIABLES = re.compile(
    r"VLLM_(PLUGINS|API_KEY|.*RUST_FRONTEND.*|SERVER_DEV_MODE|MODEL_REDIRECT_PATH|LORA_RESOLVER_.*|DP_.*"
    r"|ALLOW_RUNTIME_LORA_UPDATING|ENABLE_V1_MULTIPROCESSING|ALLOW_INSECURE_SERIALIZATION|TEST_FORCE_LOAD_FORMAT"
    r"|LOGGING_CONFIG_PATH|MOE_ROUTING_SIMULATION_STRATEGY|RPC_BASE_PATH|SKIP_MODEL_NAME_VALIDATION"
    r"|ALLOW_LONG_MAX_MODEL_LEN)"
    r"|SGLANG_(PLUGINS|PLATFORM|EXTERNAL_.*|RUST_.*|HTTP_SERVER_APP_PATH|ENABLE_REQUEST_.*"
    r"|RETURN_ORIGINAL_LOGPROB|USE_CPU_ENGINE|ENABLE_DETERMINISTIC_INFERENCE|SIMULATE_.*|DISABLED_MODEL_ARCHS)"
)
"""Variables of engines with the effects of reserved arguments."""
