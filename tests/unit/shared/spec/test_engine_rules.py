"""Arguments and variables of engines that guarantees rest on are refused, in every spelling that an engine reads."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl._app.local.processes import Launcher
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.spec import ProblemsError, parse_job, with_overrides
from kestrl._shared.spec.rules.engine_rules import reserved_argument
from kestrl._shared.spec.rules.reserved_arguments import RESERVED, VLLM_ARGUMENTS, VLLM_FAMILIES
from kestrl.engines import EngineName

from .test_job import MANIFEST, refused

SAMPLED = (
    "logits-processors", "hf-overrides", "override-generation-config", "speculative-config", "speculative_config.model",
    "speculative-config.num_speculative_tokens", "spec-model", "spec-method", "spec-tokens", "watermark-config",
    "generation-config", "revision", "tokenizer-revision", "model-class-overrides", "chat-template", "model-impl",
    "lora-target-modules", "diffusion-config", "hf-config-path", "runner", "convert", "logprobs-mode",
)  # fmt: skip
ANSWERED = (
    "worker-cls", "worker_cls", "worker-cls=x", "Worker-Cls", "worker-extension-cls", "worker_extension_cls",
    "headless", "scheduler-cls", "data-parallel-size", "data_parallel_size_local",
    "data-parallel-multi-port-external-lb",
    "data-parallel-of-a-later-version", "api-server-count", "tokenizer-worker-num", "pipeline-parallel-size",
    "kv-transfer-config", "kv-transfer-config.kv_connector", "weight-transfer-config", "enable-elastic-ep",
)  # fmt: skip
REACHED = (
    "port", "host", "uds", "grpc", "middleware", "--middleware", "middl", "no-enable-lora", "served_model_name",
    "api-key", "api_k", "Config", "config", "ssl-keyfile", "ssl-cert-reqs", "root-path", "tool-parser-plugin",
    "reasoning_parser_plugin", "io-processor-plugin", "logging-config", "log-config-file", "hf-token",
    "help", "lora-mod",
)  # fmt: skip


@pytest.mark.parametrize("name", [*SAMPLED, *ANSWERED, *REACHED])
def test_a_reserved_argument_is_refused_by_name_with_the_reason(name: str) -> None:
    (problem,) = refused(f"inference.args={{'{name}': x}}")
    assert problem.startswith(f"spec.inference.args.{name}: --")
    assert "is reserved; " in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tokenizer-worker-num", "one process"),
        ("detokenizer_worker_num", "one process"),
        ("dp-size", "one process"),
        ("grpc-port", "one process"),
        ("disaggregation-mode", "one process"),
        ("preferred-sampling-params", "another distribution"),
        ("speculative-algorithm", "another distribution"),
        ("enable-custom-logit-processor", "another distribution"),
        ("allow-auto-truncate", "another distribution"),
        ("forward-hooks", "loads code"),
        ("admin-api-key", "KestRL sets it"),
        ("api-k", "KestRL sets it"),
        ("context-length", "spec.inference.contextLength"),
        ("lora-target-modules", "spec.model.adapter.targets"),
    ],
)
def test_the_reserved_arguments_of_sglang_are_refused_with_the_reason(name: str, why: str) -> None:
    (problem,) = refused("inference.engine=sglang", f"inference.args={{'{name}': x}}")
    assert problem.startswith(f"spec.inference.args.{name}: --")
    assert why in problem


@pytest.mark.parametrize(
    "name", ["max-running-requests", "mem-fraction-static", "chunked-prefill-size", "schedule-policy", "kv-cache-dtype"]
)
def test_other_arguments_of_sglang_are_not_reserved(name: str) -> None:
    assert reserved_argument(name, "sglang") is None


def test_every_engine_has_reserved_arguments() -> None:
    assert set(RESERVED) == set(get_args(EngineName))


@given(
    st.sampled_from([*VLLM_ARGUMENTS, *(f"{family.rstrip('-')}-x" for family in VLLM_FAMILIES)]),
    st.integers(1, 40),
    st.sampled_from(["", "no-", "--", " "]),
    st.sampled_from(["", "=x", ".field", ".a.b", "+", ".list+"]),
    st.randoms(),
)
def test_any_spelling_of_a_reserved_argument_is_known(
    name: str, length: int, before: str, after: str, random: Any
) -> None:
    spelled = "".join(random.choice([letter, "_" if letter == "-" else letter]) for letter in name[:length])
    assert reserved_argument(before + spelled + after) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enforce-eager", "--worker-cls=x"),
        ("enforce-eager", "-O3"),
        ("max-num-seqs", "-dp"),
        ("enable-prefix-caching", "-cc.mode"),
        ("", "x"),
        ("-O", "3"),
        ("-dp", "2"),
        ("max num seqs", "3"),
        ("max-num-seqs 3 x", "x"),
        ("seed\n", "1"),
        ("\0", "1"),
        ("é", "1"),
        ("distributed-executor-backend", "my.module.Executor"),
        ("load-format", "my.module:Loader"),
    ],
)
def test_a_name_or_value_that_is_another_argument_is_refused(name: str, value: str) -> None:
    document = with_overrides(MANIFEST, ["inference.args={}"])
    document["spec"]["inference"]["args"] = {name: value}
    with pytest.raises(ProblemsError) as caught:
        parse_job(document)
    assert len(caught.value.problems) == 1


def test_other_engine_arguments_are_allowed() -> None:
    args = {
        "max-num-seqs": 7, "gpu-memory-utilization": 0.4, "tokenizer-mode": "slow",
        "enforce-eager": True, "kv-cache-dtype": "fp8", "compilation-config.mode": 3, "seed": -1, "swap-space": "-1",
        "distributed-executor-backend": "ray", "load-format": "safetensors", "quantization": "fp8", "block-size": 16,
        "trust-remote-code": True, "kv-cache-memory-bytes": 8388608, "max-num-batched-tokens": 2048,
        "no-enable-chunked-prefill": True, "additional-config": '{"ascend_scheduler_config": {}}',
        "async-scheduling": True, "limit-mm-per-prompt": '{"image": 0}', "enable-prefix-caching": True,
        "attention-backend": "FLASH_ATTN",
    }  # fmt: skip
    document = with_overrides(MANIFEST, ["inference.args={}"])
    document["spec"]["inference"]["args"] = args
    assert parse_job(document).spec.inference.args == args


TURNS = ("inference={sharing: turns, accelerator: {profile: nvidia}}", "learner.accelerator.profile=nvidia")


SHARED = "turns is for a device that engine and learner share, and their profiles are"
ONE_ENGINE = "turns is for one engine, beside the learner; set inference.replicas to 1, or use split"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.maxStaleness=1",
            "turns needs algorithm.maxStaleness 0, as no group is rolled out during an update, and it is 1; lower it "
            "or use split",
        ),
        ("inference.engine=sglang", "turns needs an engine that can sleep, which sglang cannot; use split"),
        (
            "inference.accelerator.profile=cpu",
            f"{SHARED} cpu and nvidia; give both one of a device, or use split",
        ),
        (
            "learner.accelerator.profile=ascend",
            f"{SHARED} nvidia and ascend; give both one of a device, or use split",
        ),
        ("inference.replicas=2", ONE_ENGINE),
        ("inference.replicas={min: 1, max: 2}", ONE_ENGINE),
        (
            "learner.accelerator.count=2",
            "turns needs a learner of one rank; lower learner.accelerator.count, or use split",
        ),
    ],
)
def test_turns_are_refused_where_no_device_can_be_used_in_turns(override: str, message: str) -> None:
    assert refused(*TURNS, override) == [f"spec.inference.sharing: {message}"]


def test_turns_are_no_default_and_are_accepted_on_one_device() -> None:
    sharings = [parse_job(with_overrides(MANIFEST, overrides)).spec.inference.sharing for overrides in ((), TURNS)]
    assert sharings == ["split", "turns"]


VARIABLES = (
    "VLLM_PLUGINS", "VLLM_API_KEY", "VLLM_USE_RUST_FRONTEND", "VLLM_RUST_FRONTEND_PATH", "VLLM_SERVER_DEV_MODE",
    "SGLANG_PLUGINS", "SGLANG_EXTERNAL_MODEL_PACKAGE", "SGLANG_RUST_SERVER",
    "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "VLLM_DP_SIZE", "VLLM_LORA_RESOLVER_CACHE_DIR",
    "VLLM_MODEL_REDIRECT_PATH", "VLLM_LOGGING_CONFIG_PATH",
)  # fmt: skip


@pytest.mark.parametrize("name", [*VARIABLES, "KESTRL_ENGINE_ROUTES", "KESTRL_ENGINE_KEY"])
@pytest.mark.parametrize("role", ["inference", "tools"])
def test_variables_of_an_engine_with_the_same_effects_are_refused(name: str, role: str) -> None:
    container = {"name": "engine", "env": [{"name": "A", "value": "1"}, {"name": name, "value": "x"}]}
    document = copy.deepcopy(MANIFEST)
    document["spec"]["patches"] = [{"role": role, "template": {"spec": {"containers": [container]}}}]
    if role == "tools":
        parse_job(document)
        return
    with pytest.raises(ProblemsError) as caught:
        parse_job(document)
    (problem,) = map(str, caught.value.problems)
    assert problem.startswith(f"spec.patches[0].template.spec.containers[0].env[1]: {name} is reserved; ")


@pytest.mark.parametrize("env", [1, "x", [1], [{"name": 1}], {"name": "VLLM_PLUGINS"}])
def test_a_patch_of_another_form_is_for_the_api_server(env: Any) -> None:
    document = copy.deepcopy(MANIFEST)
    spec = {"containers": [{"name": "engine", "env": env}, 1], "initContainers": 3}
    document["spec"]["patches"] = [{"role": "inference", "template": {"spec": spec}}]
    parse_job(document)


def test_an_engine_on_one_machine_does_not_inherit_them(tmp_path: Any) -> None:
    environment = dict.fromkeys(VARIABLES, "x") | {"VLLM_LOGGING_LEVEL": "DEBUG", "OTHER": "z"}
    launcher = Launcher(
        folder=tmp_path,
        secrets={secret.value: "s" for secret in Secret},
        environment=environment,
        granted={Role.ENGINE: {"VLLM_PLUGINS": "x", "MINE": "y"}},
    )
    started = launcher._environment(  # pyright: ignore[reportPrivateUsage] - what it would start
        Component(name="engine-0", role=Role.ENGINE, module="m")
    )
    assert set(started) >= {"OTHER", "MINE"}
    assert not set(started) & set(VARIABLES)
