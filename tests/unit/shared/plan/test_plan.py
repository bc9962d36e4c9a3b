"""The plan: which components, with which settings, and that it is a pure function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.local.processes import Launcher
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.engines import engine_component, engine_rank
from kestrl._shared.plan.planning import group_seconds, plan
from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.plan.settings.learner import LearnerSettings
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.plan.site import Build, ReplicaEndpoint, Site
from kestrl._shared.spec import AgentRLJob, parse_job, with_overrides
from kestrl.errors import UserInputError

MANIFEST: dict[str, Any] = {
    "apiVersion": "kestrl.dev/v1alpha1",
    "kind": "AgentRLJob",
    "metadata": {"name": "job"},
    "spec": {
        "model": {"base": "/models/tiny"},
        "data": {"train": {"uri": "train.jsonl", "size": 64}, "validation": {"uri": "validation.jsonl"}},
        "tools": [{"name": "search", "use": "mine:Search", "config": {"limit": 3}}],
        "rewards": [{"rule": "mine:reward", "timeout": "2s"}, {"rule": "format", "weight": 0.1}],
        "inference": {"replicas": 2},
        "rollout": {"replicas": 2},
    },
}


def job_with(*overrides: str) -> AgentRLJob:
    return parse_job(with_overrides(MANIFEST, overrides))


def endpoint(role: Role, index: int) -> ReplicaEndpoint:
    return ReplicaEndpoint(bind="0.0.0.0", host=f"{role}-{index}.job", port=7000 + list(Role).index(role))


SITE = Site(
    run="job-1",
    endpoint=endpoint,
    model="/models/tiny",
    template=None,
    train="/data/train.jsonl",
    validation="/data/validation.jsonl",
    storage="s3://bucket/job-1",
    database="sqlite:////run/ledger.db",
    work_dir="/run/work",
    python_path=("/mine",),
)


def test_a_tool_without_a_name_is_called_as_in_its_module() -> None:
    job = job_with("tools=[{use: 'mine:look'}, {use: 'mine:Shop', methods: [buy]}, {name: s, use: 'mine:Shop'}]")
    tools = by_name(job)["tools-0"].settings
    assert isinstance(tools, ToolsSettings)
    assert [(tool.name, tool.methods) for tool in tools.tools] == [("look", None), ("Shop", ("buy",)), ("s", None)]


def test_config_reaches_the_loop_and_the_rewards() -> None:
    job = job_with(
        "agent.loop=mine:Agent",
        "agent.config={depth: 2}",
        "agent.loops={other: 'mine:Other'}",
        "agent.loopsConfig={other: {depth: 3}}",
        "rewards=[{rule: 'mine:near', config: {scale: 3}}]",
    )
    components = by_name(job)
    rollout, judge = components["rollout-0"].settings, components["judge-0"].settings
    assert isinstance(rollout, RolloutSettings)
    assert isinstance(judge, JudgeSettings)
    assert (rollout.agent_config, rollout.agents_config) == ({"depth": 2}, {"other": {"depth": 3}})
    assert [entry.config for entry in judge.rewards] == [{"scale": 3}]


def test_an_agent_outside_of_the_worker_reaches_the_workers_with_what_it_needs() -> None:
    agent = "agent={command: [agent], config: {depth: 2}, env: {A: b}, stops: {'exit:3': agent_limit}}"
    settings = by_name(job_with("tools=[]", agent))["rollout-0"].settings
    assert isinstance(settings, RolloutSettings)
    assert settings.outside is not None
    assert settings.outside.command == ("agent",)
    assert (settings.outside.config, settings.outside.env) == ({"depth": 2}, {"A": "b"})
    assert settings.outside.stops == {"exit:3": "agent_limit"}
    assert (settings.agent_config, settings.gateway_listen) == ({}, "127.0.0.1:0")


def by_name(job: AgentRLJob) -> dict[str, Component]:
    return {component.name: component for component in plan(job, SITE)}


def flags(component: Component) -> dict[str, str]:
    arguments = list(component.args)
    return {
        name.removeprefix("--"): "" if not rest or rest[0].startswith("--") else rest[0]
        for position, name in enumerate(arguments)
        if name.startswith("--")
        for rest in [arguments[position + 1 :]]
    }


def test_a_job_needs_these_components() -> None:
    assert list(by_name(job_with())) == [
        *("engine-0", "engine-1", "inference-0", "inference-1"),
        *("tools-0", "judge-0", "rollout-0", "rollout-1", "learner-0"),
    ]


def test_the_plan_is_a_pure_function() -> None:
    assert plan(job_with(), SITE) == plan(job_with(), SITE)


def test_settings_survive_a_round_trip_through_their_file() -> None:
    for component in plan(job_with(), SITE):
        if component.settings is not None:
            assert (
                type(component.settings).model_validate_json(component.settings.model_dump_json()) == component.settings
            )


def test_passes_of_the_learner_are_those_of_the_manifest() -> None:
    """By default nothing is compiled, checkpointed or offloaded."""
    pass_settings = ("gradientCheckpointing=true", "checkpointedLayers=3", "compileLayers=true", "tokensPerPass=512")
    options: list[dict[str, Any]] = []
    for overrides in ((), tuple(f"learner.{field}" for field in pass_settings)):
        settings = by_name(job_with(*overrides))["learner-0"].settings
        assert isinstance(settings, LearnerSettings)
        options.append(settings.pass_options())
    usual, changed = options
    assert not any(usual[name] for name in ("compile_layers", "gradient_checkpointing", "activation_offload"))
    assert changed["compile_layers"]
    assert (changed["checkpointed_layers"], changed["tokens_per_pass"]) == (3, 512)


def test_the_learner_knows_every_worker_engine_and_agent() -> None:
    settings = by_name(job_with())["learner-0"].settings
    assert isinstance(settings, LearnerSettings)
    assert settings.rollout_addresses == ("rollout-0.job:7002", "rollout-1.job:7002")
    assert [(engine.name, engine.url) for engine in settings.engines] == [
        ("engine-0", "http://engine-0.job:7000"),
        ("engine-1", "http://engine-1.job:7000"),
    ]
    assert settings.engines[1].agent_address == "inference-1.job:7001"


def test_a_site_may_keep_the_learner_alive_and_set_the_runs_trace() -> None:
    site = replace(SITE, keep_alive=True, traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    here, there = by_name(job_with()), {component.name: component for component in plan(job_with(), site)}
    before, after = here["learner-0"].settings, there["learner-0"].settings
    assert isinstance(before, LearnerSettings)
    assert isinstance(after, LearnerSettings)
    assert (before.keep_alive, before.traceparent) == (False, None)
    assert (after.keep_alive, after.traceparent) == (site.keep_alive, site.traceparent)
    assert [name for name in here if here[name] != there[name]] == ["learner-0"]


def test_only_the_engine_and_its_agent_hold_the_control_key() -> None:
    holders = {item.role for item in plan(job_with(), SITE) if Secret.ENGINE_CONTROL_KEY in item.secrets}
    assert holders == {Role.ENGINE, Role.INFERENCE}
    tools = by_name(job_with())["tools-0"]
    assert tools.secrets == (Secret.ROLLOUT_TO_TOOLS,)


def test_only_the_learner_is_not_started_again() -> None:
    assert [item.name for item in plan(job_with(), SITE) if not item.restarts] == ["learner-0"]


def test_the_engine_samples_as_the_learner_scores() -> None:
    engine = by_name(job_with())["engine-0"]
    arguments = flags(engine)
    assert arguments["logprobs-mode"] == "processed_logprobs"
    assert arguments["generation-config"] == "vllm"
    assert arguments["served-model-name"] == "base"
    assert arguments["slots"] == "4"


def test_only_an_engine_that_sleeps_has_the_servers_development_mode() -> None:
    devices = ("inference={replicas: 1, accelerator: {profile: nvidia}}", "learner.accelerator.profile=nvidia")
    for sharing in ("split", "turns"):
        components, in_turns = by_name(job_with(*devices, f"inference.sharing={sharing}")), sharing == "turns"
        engine, agent, learner = (components[f"{role}-0"] for role in ("engine", "inference", "learner"))
        assert engine.env.get("VLLM_SERVER_DEV_MODE") == ("1" if in_turns else None)
        assert ("enable-sleep-mode" in flags(engine)) == in_turns
        assert "kestrl_inference.inside.guard.ControlGuard" in flags(engine)["middleware"]
        assert isinstance(agent.settings, AgentSettings)
        assert isinstance(learner.settings, LearnerSettings)
        assert (agent.settings.turns, learner.settings.turns) == (in_turns, in_turns)
    assert "VLLM_SERVER_DEV_MODE" not in by_name(job_with())["engine-0"].env


@pytest.mark.parametrize(
    ("endpoint", "engines", "protocol"),
    [
        ("http://c:4317", "http://c:4317", None),
        ("http://c:4318", "http://c:4318/v1/traces", "http/protobuf"),
        ("https://c/otlp/", "https://c/otlp/v1/traces", "http/protobuf"),
    ],
)
def test_engines_and_services_trace_to_the_endpoint(endpoint: str, engines: str, protocol: str | None) -> None:
    components = by_name(job_with(f"telemetry.otlp={endpoint}", "telemetry.tracedGroups=0.25"))
    engine, rollout = components["engine-0"], components["rollout-0"].settings
    assert flags(engine)["otlp-traces-endpoint"] == engines
    assert engine.env.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") == protocol
    assert isinstance(rollout, RolloutSettings)
    assert (rollout.otlp_endpoint, rollout.traced_groups) == (endpoint, 0.25)


def test_the_cpu_recipe_is_only_for_the_cpu() -> None:
    gpu = by_name(job_with("inference.accelerator={profile: nvidia, count: 2}"))["engine-0"]
    assert gpu.module == "kestrl_inference.inside.launcher"
    assert "--cpu" not in gpu.args
    assert "TORCHDYNAMO_DISABLE" not in gpu.env
    assert "kv-cache-memory-bytes" not in flags(gpu)
    assert (gpu.device.profile, gpu.device.count) == ("nvidia", 2)


def test_a_served_policy_has_the_job_s_engine_and_a_chat_template() -> None:
    job = job_with("inference.args.max-num-seqs=64")
    served = engine_component(job, SITE, 0, template="/t.jinja")
    assert flags(served) == flags(engine_component(job, SITE, 0)) | {"chat-template": "/t.jinja"}
    assert flags(served)["max-num-seqs"] == "64"


def test_arguments_of_the_manifest_win() -> None:
    engine = by_name(job_with("inference.args={max-num-seqs: 7, enforce-eager: true}"))["engine-0"]
    arguments = flags(engine)
    assert arguments["max-num-seqs"] == "7"
    assert arguments["enforce-eager"] == ""


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (4, 8), (8, 8), (9, 16), (512, 512)])
def test_an_engine_gets_a_rank_it_accepts(rank: int, expected: int) -> None:
    assert engine_rank("vllm", rank) == expected
    assert engine_rank("sglang", rank) == rank


def test_a_group_has_time_for_its_scoring() -> None:
    assert group_seconds(job_with().spec) == 600.0 + (2.0 + 10.0) * 8 + 10.0
    assert group_seconds(job_with("rollout.deadlines.group=20m").spec) == 1200.0


def test_staleness_decides_on_the_correction() -> None:
    asynchronous = by_name(job_with("algorithm.maxStaleness=2"))["learner-0"].settings
    synchronous = by_name(job_with())["learner-0"].settings
    assert isinstance(asynchronous, LearnerSettings)
    assert isinstance(synchronous, LearnerSettings)
    overlapping, alternating = asynchronous.algorithm.correction, synchronous.algorithm.correction
    assert (overlapping.decoupled, overlapping.weights, overlapping.cap) == (True, "token", 2.0)
    assert (alternating.decoupled, alternating.weights) == (False, "none")


@pytest.mark.parametrize(
    ("overrides", "decoupled", "weights"),
    [
        (["algorithm.miniBatches=2"], True, "token"),
        (["algorithm.miniBatchEpochs=2"], True, "token"),
        (["algorithm.miniBatches=2", "algorithm.correction.mode=bypass"], False, "none"),
        (["algorithm.correction.mode=decoupled", "algorithm.correction.weights=icepop"], True, "icepop"),
        (["algorithm.name=gspo"], True, "token"),
        (["algorithm.name=gspo", "algorithm.correction.mode=bypass"], False, "none"),
        (["algorithm.name=gspo", "algorithm.clip.low=0.2", "algorithm.clip.high=0.2"], False, "none"),
        (["algorithm.clip.high=0.05", "model.dtype=bfloat16"], True, "token"),
        (["algorithm.clip.high=0.05", "model.dtype=float32"], False, "none"),
        (["algorithm.logprobGapBound=0.25"], True, "token"),
        (["algorithm.correction.reject=geometric", "model.dtype=bfloat16"], True, "token"),
        (["algorithm.correction.reject=geometric", "model.dtype=float32"], False, "none"),
        (["algorithm.correction.reject=k3", "model.dtype=bfloat16"], False, "none"),
        (
            ["algorithm.correction.reject=k3", "algorithm.correction.rejectKl=0.001", "model.dtype=bfloat16"],
            True,
            "token",
        ),
    ],
)
def test_several_updates_and_the_mode_decide_on_the_correction(
    overrides: list[str], decoupled: bool, weights: str
) -> None:
    learner = by_name(job_with(*overrides))["learner-0"].settings
    assert isinstance(learner, LearnerSettings)
    assert (learner.algorithm.correction.decoupled, learner.algorithm.correction.weights) == (decoupled, weights)


def test_user_code_lies_on_the_path_of_every_service() -> None:
    for component in plan(job_with(), SITE):
        if component.settings is not None:
            assert component.settings.python_path == ("/mine",)


def test_agents_and_engines_agree_on_slots() -> None:
    components = by_name(job_with("inference.adapterSlots=6"))
    agent = components["inference-0"].settings
    assert isinstance(agent, AgentSettings)
    assert agent.slots == int(flags(components["engine-0"])["slots"]) == 6
    rollout = components["rollout-0"].settings
    assert isinstance(rollout, RolloutSettings)
    assert rollout.tokenizer == "/models/tiny"


@pytest.mark.parametrize("part", ["inference", "learner"])
def test_a_profile_unknown_at_the_site_is_reported(part: str) -> None:
    with pytest.raises(
        UserInputError, match=rf"spec.{part}.accelerator.profile: 'tpu' is not one of ascend, cpu, nvidia"
    ):
        plan(job_with(f"{part}.accelerator.profile=tpu"), SITE)


def test_a_site_may_have_other_profiles() -> None:
    site = replace(SITE, builds={"cpu": Build("cpu"), "old-npu": Build("npu")})
    job = job_with("inference.accelerator.profile=old-npu", "learner.accelerator.profile=old-npu")
    parts = {component.name: component for component in plan(job, site)}
    assert flags(parts["engine-0"])["slots"] == "4"
    settings = parts["learner-0"].settings
    assert isinstance(settings, LearnerSettings)
    assert settings.device == "npu"


def test_threads_of_torch_busy_wait_with_a_bound() -> None:
    components = by_name(job_with())
    assert {component.env_defaults["GOMP_SPINCOUNT"] for component in components.values()} == {"2000"}


def test_a_variable_that_the_user_set_takes_precedence(tmp_path: Path) -> None:
    learner = by_name(job_with())["learner-0"]
    secrets = dict.fromkeys((secret.value for secret in Secret), "x")

    def value(**environment: str) -> str:
        launcher = Launcher(folder=tmp_path, secrets=secrets, environment=environment)
        return launcher._environment(learner)["GOMP_SPINCOUNT"]

    assert (value(), value(GOMP_SPINCOUNT="7")) == ("2000", "7")


def judge_of(*overrides: str) -> tuple[Component, JudgeSettings]:
    component = next(each for each in plan(job_with(*overrides), SITE) if each.role is Role.JUDGE)
    assert isinstance(component.settings, JudgeSettings)
    return component, component.settings


def test_the_judge_of_a_run_on_one_machine_follows_its_engines() -> None:
    site = replace(SITE, engines_file="/runs/a run/engines.json")
    job = job_with("rewards=[{ruler: {self: true}}]")
    judge, learner = (
        next(each for each in plan(job, site) if each.role is role) for role in (Role.JUDGE, Role.LEARNER)
    )
    assert isinstance(judge.settings, JudgeSettings)
    assert isinstance(learner.settings, LearnerSettings)
    assert judge.settings.ruler is not None
    assert judge.settings.ruler.judges[0].base_urls == ("file:///runs/a%20run/engines.json#/v1",)
    assert learner.settings.engines_file == "/runs/a run/engines.json"


def test_only_a_ruler_on_the_jobs_engines_gets_their_key() -> None:
    component, settings = judge_of("rewards=[{ruler: {self: true}}]", "inference.contextLength=4000")
    assert settings.ruler is not None
    judge = settings.ruler.judges[0]
    assert (judge.model, judge.key_variable, judge.strict_schema) == ("base", "KESTRL_ENGINE_KEY", True)
    assert len(judge.base_urls) == 2
    assert all(url.endswith("/v1") for url in judge.base_urls)
    assert (settings.ruler.max_prompt_tokens, settings.ruler.max_reply_tokens) == (3000, 1000)
    assert Secret.ENGINE_KEY in component.secrets
    for plain in (judge_of()[0], judge_of("rewards=[{ruler: {baseUrl: 'https://x/v1', model: m}}]")[0]):
        assert Secret.ENGINE_KEY not in plain.secrets
        assert plain.user_secrets == {}


def test_engines_that_judge_write_no_white_space_between_values() -> None:
    def arguments(*overrides: str) -> str:
        engine = next(each for each in plan(job_with(*overrides), SITE) if each.role is Role.ENGINE)
        return " ".join(engine.args)

    assert '"disable_any_whitespace": true' in arguments("rewards=[{ruler: {self: true}}]")
    assert "structured-outputs" not in arguments()


def test_a_ruler_extends_the_deadline_of_its_group_and_asks_for_tools() -> None:
    rewards = "rewards=[{rule: format}, {weight: 2, ruler: {baseUrl: 'https://x/v1', model: m, gate: {rule: format}}}]"
    job = job_with(rewards)
    assert group_seconds(job.spec) == group_seconds(job_with("rewards=[{rule: format}]").spec) + 300
    settings = judge_of(rewards)[1]
    assert settings.ruler is not None
    assert (settings.ruler.field, settings.ruler.weight, settings.ruler.gate) == (
        "spec.rewards[1].ruler",
        2.0,
        "format",
    )
    workers = [each.settings for each in plan(job, SITE) if isinstance(each.settings, RolloutSettings)]
    assert [each.describes_tools for each in workers] == [True, True]


def test_a_correctness_judge_has_its_own_models_keys_and_servers() -> None:
    component, settings = judge_of(
        "rewards=[{rule: exact_answer, correctness: {baseUrl: 'https://a:8443/v1', model: m, secretRef: {name: s}, "
        "second: {baseUrl: 'http://b/v1', model: n, secretRef: {name: t}, secretKey: K}, budget: {calls: 9}}}, "
        "{ruler: {self: true}}]"
    )
    assert settings.correctness is not None
    assert settings.ruler is not None
    assert settings.state_dir is not None
    assert [entry.asks_judge for entry in settings.rewards] == [True]
    assert settings.correctness.field == "spec.rewards[0].correctness"
    assert settings.correctness.budget_calls == 9
    assert [model.model for model in settings.correctness.judges] == ["m", "n"]
    keys = {name: (key.secret, key.key) for name, key in component.user_secrets.items()}
    assert keys == {"KESTRL_JUDGE_KEY_2": ("s", "OPENAI_API_KEY"), "KESTRL_JUDGE_KEY_3": ("t", "K")}
    assert [model.key_variable for model in settings.correctness.judges] == list(keys)
    assert component.own_secrets  # of the engines, for the ruler


def test_on_one_machine_all_ranks_are_processes_of_the_learner() -> None:
    components = by_name(job_with("learner.replicas=2", "learner.accelerator={profile: nvidia, count: 4}"))
    learner = components["learner-0"]
    assert isinstance(learner.settings, LearnerSettings)
    assert (learner.settings.ranks, learner.settings.pods, learner.settings.ranks_listen) == (8, 1, None)
    assert learner.device.count == 8
    assert "ranks-0" not in components


def test_a_data_set_that_is_named_twice_is_meant_to_be() -> None:
    def held_out_apart(*overrides: str) -> bool:
        learner = next(each for each in plan(job_with(*overrides), SITE) if each.role is Role.LEARNER)
        assert isinstance(learner.settings, LearnerSettings)
        return learner.settings.held_out_apart

    assert held_out_apart()
    assert not held_out_apart("data.validation.uri=train.jsonl", "data.validation.size=8")
    assert not held_out_apart("data.validation=null")
