"""Arguments and variables of engines that a job must not set: access control, adapter verification and exact log-probs
depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl.tools.shapes import is_list, is_mapping

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(\.[^\s=]*)?")
"""An argument's name without its dashes, and perhaps fields of its JSON."""
NUMBER = re.compile(r"-[0-9.].*")
OWN = "remove it; KestRL sets it"
SAMPLING = "remove it; the engine would sample from another distribution than the learner computes"
ANSWERING = "remove it; adapters are verified in each engine's one process, which it would replace or multiply"
CODE = "remove it; it loads code into the server, which could pass the guard and answer in the engine's place"
RESERVED_ARGS: Mapping[str, str] = {
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
"""Reserved arguments of the engine's server, with the fix."""
RESERVED_FAMILIES: Mapping[str, str] = {
    "speculative-": SAMPLING,
    "spec-": SAMPLING,
    "watermark": SAMPLING,
    "data-parallel-": ANSWERING,
    "ssl-": OWN,
}
"""Beginnings of arguments that are all reserved, those of later versions of the engine too."""
CLASSES = ("distributed-executor-backend", "load-format", "tokenizer-mode")
"""Arguments whose value is one of the engine's words, or names a class that it imports."""
RESERVED_VARIABLES = re.compile(
    r"VLLM_(PLUGINS|API_KEY|.*RUST_FRONTEND.*|SERVER_DEV_MODE|MODEL_REDIRECT_PATH|LORA_RESOLVER_.*|DP_.*"
    r"|ALLOW_RUNTIME_LORA_UPDATING|ENABLE_V1_MULTIPROCESSING|ALLOW_INSECURE_SERIALIZATION|TEST_FORCE_LOAD_FORMAT"
    r"|LOGGING_CONFIG_PATH|MOE_ROUTING_SIMULATION_STRATEGY|RPC_BASE_PATH|SKIP_MODEL_NAME_VALIDATION"
    r"|ALLOW_LONG_MAX_MODEL_LEN)"
)
"""Variables of an engine with the effects of reserved arguments."""
OWN_VARIABLES = "KESTRL_"


def engine_problems(spec: JobSpec) -> Iterator[Problem]:
    """Arguments and variables of engines that are reserved."""
    for name, value in spec.inference.args.items():
        problem = _argument_problem(name, value)
        if problem:
            yield Problem(f"spec.inference.args.{name}", problem)
    for number, patch in enumerate(spec.patches):
        if patch.role == "inference":
            yield from _variable_problems(f"spec.patches[{number}].template.spec", patch.template.get("spec"))


def _argument_problem(name: str, value: object) -> str:
    reserved = reserved_argument(name)
    if reserved is not None:
        return f"--{reserved[0]} is reserved; {reserved[1]}"
    if not NAME.fullmatch(name):
        return (
            "is no name of an argument; write it as `max-num-seqs`, without dashes before it and with its value behind"
        )
    if isinstance(value, str):
        if value.startswith("-") and not NUMBER.fullmatch(value):
            return f"the value {value[:40]!r} begins with a dash, so that the engine would read it as another argument"
        if _flag(name) in CLASSES and not re.fullmatch("[A-Za-z0-9_]*", value):
            return f"the value {value[:40]!r} names a class; {CODE}"
    return ""


def reserved_argument(name: str) -> tuple[str, str] | None:
    """A reserved argument that the engine reads in a name, with the fix. Underscores are dashes to it, a beginning that
    is unique stands for an argument, `no-` for its opposite, and a dot is before a field of its JSON.
    """
    flag = _flag(name)
    for family, fix in RESERVED_FAMILIES.items():
        if flag.startswith(family) or family.startswith(flag):
            return (flag if flag.startswith(family) else f"{family}...", fix)
    exact = RESERVED_ARGS.get(flag)
    if exact is not None:
        return flag, exact
    return next(((known, fix) for known, fix in RESERVED_ARGS.items() if known.startswith(flag)), None)


def _flag(name: str) -> str:
    text = name.strip().lstrip("-").replace("_", "-").lower()
    return re.split("[=.+]", text, maxsplit=1)[0].strip().removeprefix("no-")


def _variable_problems(place: str, spec: Any) -> Iterator[Problem]:
    """Reserved variables of the containers of a patch."""
    for field in ("containers", "initContainers"):
        containers: Any = spec.get(field) if is_mapping(spec) else None
        for number, container in enumerate(containers if is_list(containers) else ()):
            variables: Any = container.get("env") if is_mapping(container) else None
            for index, variable in enumerate(variables if is_list(variables) else ()):
                name: Any = variable.get("name") if is_mapping(variable) else None
                if isinstance(name, str) and (name.startswith(OWN_VARIABLES) or RESERVED_VARIABLES.fullmatch(name)):
                    yield Problem(
                        f"{place}.{field}[{number}].env[{index}]",
                        f"{name} is reserved; remove it, as access to the engine and verified adapters depend on it",
                    )
