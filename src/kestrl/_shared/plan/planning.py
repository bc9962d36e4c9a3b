"""`plan(job, site)`: the components of a job and their settings. Pure."""

from __future__ import annotations

from dataclasses import replace

from kestrl._shared.plan.agents import agent_pods, gateway_listen, outside_agent, outside_runner, pods_url, with_gateway
from kestrl._shared.plan.components import USUAL_WORKERS, Component, Device, Ready, Role
from kestrl._shared.plan.devices import with_devices
from kestrl._shared.plan.engines import (
    engine_component,
    engine_places,
    engine_servers,
    engine_stop_seconds,
    engine_turns,
    engine_url,
    failure_file,
    learner_turns,
)
from kestrl._shared.plan.environments import environment_entries, offers_tools, outside_environment
from kestrl._shared.plan.evaluation import evaluation_sampling
from kestrl._shared.plan.judges import (
    correctness_entry,
    judges_of,
    reward_entries,
    ruler_entry,
    ruler_of,
    uses_own_engines,
    with_judge_secrets,
)
from kestrl._shared.plan.settings.common import DataSettings, ServiceSettings
from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.plan.settings.judge import JudgeSettings
from kestrl._shared.plan.settings.learner import LearnerSettings, RanksSettings, SinkEntry
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.plan.site import Site
from kestrl._shared.plan.tools import file_holders, tool_entries, with_tool_secrets
from kestrl._shared.plan.tracking import followers
from kestrl._shared.plan.updates import accepted_gap, algorithm_settings, gap_bounds
from kestrl._shared.spec.job import AgentRLJob, DataSet, JobSpec
from kestrl.episode.deadlines import RolloutDeadlines

PROBE_BOUND = {"float32": 1e-2, "bfloat16": 0.5}
"""Maximum difference on the probe in nats; its tokens are unlikely and have large log-probs."""
SCORING_SLACK = 10.0
"""Seconds of a group in addition to its episodes and rewards."""


def plan(job: AgentRLJob, site: Site) -> tuple[Component, ...]:
    """Components of a job, engines first since they start slowest: one per replica, or one per role if the site uses
    templates.
    """
    spec = job.spec
    engines, workers = (1, 1) if site.templates else (spec.inference.replicas.min, spec.rollout.replicas)
    components = (
        *(engine_component(job, site, index) for index in range(engines)),
        *(agent_component(job, site, index) for index in range(engines)),
        _tools(job, site),
        _judge(job, site),
        *(_rollout(job, site, index) for index in range(workers)),
        *agent_pods(job, site),
        *file_holders(spec, site),
        *followers(job, site),
        *([_ranks(job, site)] if has_rank_pods(job.spec) and site.ranks_port is not None else ()),
        _learner(job, site),
    )
    return components if site.devices is None else tuple(with_devices(item, site.devices) for item in components)


def has_rank_pods(spec: JobSpec) -> bool:
    """Whether the learner has pods of ranks beside its own, on a cluster."""
    return spec.learner.replicas > 1


def rollout_deadlines(spec: JobSpec) -> RolloutDeadlines:
    """The deadlines of a job, that of a group included."""
    return RolloutDeadlines.model_validate({**dict(spec.rollout.deadlines), "group": group_seconds(spec)})


def group_seconds(spec: JobSpec) -> float:
    """Deadline of a group in seconds: as configured, or the episode's plus the maximum time of scoring."""
    limits = spec.rollout.deadlines
    if limits.group is not None:
        return limits.group
    scoring = sum(reward.timeout for reward in spec.rewards if reward.rule is not None) * spec.algorithm.group_size
    judging = sum(placed.judge.timeout for placed in judges_of(spec))
    return limits.episode + scoring + judging + SCORING_SLACK


def _service(role: Role, index: int, job: AgentRLJob, site: Site) -> dict[str, object]:
    return {
        "component": f"{role}-{index}",
        "job": job.metadata.name,
        "run": site.run,
        "listen": site.endpoint(role, index).listen,
        "python_path": site.python_path,
        "otlp_endpoint": job.spec.telemetry.otlp,
        "traced_groups": job.spec.telemetry.traced_groups,
        "metrics_listen": site.endpoint(role, index).metrics_listen,
    }


def _component(role: Role, index: int, settings: ServiceSettings, site: Site, *, restarts: bool = True) -> Component:
    endpoint = site.endpoint(role, index)
    return Component(
        name=f"{role}-{index}",
        role=role,
        module=f"kestrl_{role}",
        settings=settings,
        ports={
            "grpc": endpoint.port,
            **({} if endpoint.metrics_port is None else {"metrics": endpoint.metrics_port}),
        },
        ready=Ready(port=endpoint.port),
        restarts=restarts,
    )


def agent_component(job: AgentRLJob, site: Site, index: int) -> Component:
    """The agent of the engine of replica `index`."""
    settings = AgentSettings.model_validate(
        {
            **_service(Role.INFERENCE, index, job, site),
            "engine": job.spec.inference.engine,
            "engine_name": f"engine-{index}",
            "engine_url": engine_url(site, index, local=site.templates),
            "reported_url": None if site.engine_service is None else site.engine_service.engine_of_pod,
            "base_model": site.model,
            "adapters_dir": f"{site.work_dir}/adapters-{index}",
            "failure_file": failure_file(site, index),
            "slots": job.spec.inference.adapter_slots,
            "probe_bound": PROBE_BOUND[job.spec.model.dtype],
            **engine_turns(job.spec, site),
            "drain_seconds": job.spec.rollout.deadlines.turn,
        }
    )
    return replace(_component(Role.INFERENCE, index, settings, site), stop_seconds=engine_stop_seconds(job.spec))


def _tools(job: AgentRLJob, site: Site) -> Component:
    spec = job.spec
    settings = ToolsSettings.model_validate(
        {
            **_service(Role.TOOLS, 0, job, site),
            "tools": (*tool_entries(spec, site.files), *environment_entries(spec, site)),
            "files": dict(site.files),
            "call_seconds": spec.rollout.deadlines.tool,
            # Constant for up to USUAL_WORKERS workers, so that scaling does not restart the tool service.
            "max_sessions": 2 * max(spec.rollout.replicas, USUAL_WORKERS) * spec.rollout.concurrency,
        }
    )
    return with_tool_secrets(_component(Role.TOOLS, 0, settings, site), spec)


def _judge(job: AgentRLJob, site: Site) -> Component:
    spec = job.spec
    servers = engine_servers(spec, site) if uses_own_engines(spec) else ()
    ruler, correctness = ruler_entry(spec, servers), correctness_entry(spec, servers)
    judges = ruler is not None or correctness is not None
    settings = JudgeSettings.model_validate(
        {
            **_service(Role.JUDGE, 0, job, site),
            "rewards": reward_entries(spec),
            "ruler": ruler,
            "correctness": correctness,
            # On a cluster a volume of the pod, which a restarted container keeps.
            "state_dir": None if not judges else "/tmp/judge" if site.templates else f"{site.work_dir}/judge",  # noqa: S108
        }
    )
    return with_judge_secrets(_component(Role.JUDGE, 0, settings, site), spec)


def _rollout(job: AgentRLJob, site: Site, index: int) -> Component:
    spec = job.spec
    settings = RolloutSettings.model_validate(
        {
            **_service(Role.ROLLOUT, index, job, site),
            "engine": job.spec.inference.engine,
            "tokenizer": site.model,
            "template": site.template,
            "template_arguments": spec.agent.template.arguments if spec.agent.template else {},
            "agent": spec.agent.loop,
            "agent_config": {} if spec.agent.outside else spec.agent.config,
            "outside": outside_agent(spec, site),
            "environment": outside_environment(spec, site, pods=pods_url(spec, site)),
            "refused_fields": tuple(spec.agent.refuses),
            "gateway_listen": gateway_listen(spec, site),
            "tool_call_format": spec.agent.tool_call_format,
            "agents": spec.agent.loops,
            "agents_config": spec.agent.loops_config,
            "offers_tools": bool(spec.tools) or offers_tools(spec),
            "describes_tools": bool(spec.tools) and ruler_of(spec) is not None,
            "tools_address": site.endpoint(Role.TOOLS, 0).address,
            "judge_address": site.endpoint(Role.JUDGE, 0).address,
            "concurrency": spec.rollout.concurrency,
            "context_length": spec.inference.context_length,
            "max_parallel_calls": spec.agent.max_parallel_calls,
            "max_tool_tokens": spec.agent.max_tool_tokens,
            "call_seconds": spec.rollout.deadlines.tool,
        }
    )
    return with_gateway(_component(Role.ROLLOUT, index, settings, site), spec, site)


def _data(path: str, data: DataSet, spec: JobSpec) -> DataSettings:
    return DataSettings(
        path=path,
        size=data.size,
        promptless=spec.environment is not None,
        runner=outside_runner(spec),
        loops=tuple(spec.agent.loops),
    )


def _learner(job: AgentRLJob, site: Site) -> Component:
    spec = job.spec
    data, validation = spec.data.train, spec.data.validation
    settings = LearnerSettings.model_validate(
        {
            **_service(Role.LEARNER, 0, job, site),
            "model": site.model,
            "dtype": spec.model.dtype,
            "rank": spec.model.adapter.rank,
            "alpha": spec.model.adapter.alpha,
            "targets": spec.model.adapter.targets
            if isinstance(spec.model.adapter.targets, str)
            else tuple(spec.model.adapter.targets),
            "adapter_from": spec.model.adapter.from_,
            "data": _data(site.train, data, spec),
            "validation": _data(site.validation, validation, spec) if validation and site.validation else None,
            "held_out_apart": spec.data.held_out_apart,
            "evaluation": evaluation_sampling(spec),
            "seed": spec.data.seed,
            "epochs": spec.schedule.epochs,
            "max_steps": spec.schedule.max_steps,
            "eval_every": spec.schedule.eval_every,
            "checkpoint_every": spec.schedule.checkpoint_every,
            "grace_seconds": spec.learner.termination_grace,
            "keep_checkpoints": spec.schedule.keep_checkpoints,
            "keep_adapters": spec.schedule.keep_adapters,
            "keep_episodes": spec.schedule.keep_episodes,
            "temperature": spec.sampling.temperature,
            "max_tokens": spec.agent.max_tokens,
            "max_turns": spec.agent.max_turns,
            "max_tokens_per_turn": spec.agent.max_tokens_per_turn or 0,
            "deadlines": rollout_deadlines(spec),
            "algorithm": algorithm_settings(spec),
            "storage": site.storage,
            "storage_seconds": spec.storage.retry_timeout,
            "database": site.database,
            "rollout_addresses": site.workers
            or tuple(site.endpoint(Role.ROLLOUT, index).address for index in range(spec.rollout.replicas)),
            **engine_places(spec, site),
            **learner_turns(spec, site),
            "adapter_slots": spec.inference.adapter_slots,
            "gap_bounds": gap_bounds(accepted_gap(spec)),
            "max_failed_share": spec.algorithm.max_failed_share,
            "threads": spec.learner.threads,
            "gradient_checkpointing": spec.learner.gradient_checkpointing,
            "checkpointed_layers": spec.learner.checkpointed_layers,
            "activation_offload": spec.learner.activation_offload,
            "compile_layers": spec.learner.compile_layers,
            "tokens_per_pass": spec.learner.tokens_per_pass,
            "device": site.build(spec.learner.accelerator, "learner").device,
            **_division(spec, site),
            "ranks_listen": f"{site.endpoint(Role.LEARNER, 0).bind}:{site.ranks_port}"
            if has_rank_pods(spec) and site.ranks_port is not None
            else None,
            "tools": bool(spec.tools) or offers_tools(spec),
            "sinks": tuple(
                SinkEntry(use=sink.use, config=sink.config, field=f"spec.telemetry.sinks[{index}]")
                for index, sink in enumerate(spec.telemetry.sinks)
            ),
            "keep_alive": site.keep_alive,
            "traceparent": site.traceparent,
        }
    )
    component = _component(Role.LEARNER, 0, settings, site, restarts=False)
    accelerator = spec.learner.accelerator
    ports = component.ports if settings.ranks_listen is None else {**component.ports, "ranks": site.ranks_port or 0}
    device = Device(profile=accelerator.profile, count=settings.ranks_per_pod)
    return replace(component, device=device, ports=ports)


def _division(spec: JobSpec, site: Site) -> dict[str, object]:
    """The number of ranks, and of pods among which they are divided."""
    learner = spec.learner
    pods = 1 if site.ranks_port is None else learner.replicas
    return {"ranks": learner.replicas * learner.accelerator.count, "pods": pods}


def _ranks(job: AgentRLJob, site: Site) -> Component:
    spec = job.spec
    accelerator = spec.learner.accelerator
    settings = RanksSettings.model_validate(
        {
            **_service(Role.RANKS, 0, job, site),
            **_division(spec, site),
            "leader": f"{site.endpoint(Role.LEARNER, 0).host}:{site.ranks_port}",
            "device": site.build(accelerator, "learner").device,
        }
    )
    component = _component(Role.RANKS, 0, settings, site)
    device = Device(profile=accelerator.profile, count=accelerator.count)
    return replace(component, module="kestrl_learner.rank_pod", device=device)
