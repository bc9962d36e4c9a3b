"""Components and command lines of inference engines, in the dialect of the job's engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kestrl._shared import engine_failure
from kestrl._shared.plan.components import Component, Device, Ready, Role
from kestrl._shared.plan.judges import uses_own_engines
from kestrl._shared.plan.settings.learner import EngineEntry
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.job import AgentRLJob, JobSpec
from kestrl.engines import EngineDialect, Launch
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME

OURS = "kestrl_inference."
"""Package of modules that are not the engine's own."""
SPARE_SLOTS = 1
"""Adapter slots beyond those of a batch, which the launcher gives engines of old versions."""
ROUTES = "KESTRL_ENGINE_ROUTES"
"""Environment variable with the routes of an engine that its guard opens, as JSON `{"open": [...], "data": [...]}`."""
DRAIN_MODULE = f"{OURS}inside.drain"
"""Drains the engine of a pod: `python -m MODULE PORT SECONDS`."""
STOP_SLACK = 30.0
"""Seconds to end an engine in that has drained."""


def engine_stop_seconds(spec: JobSpec) -> float:
    """Seconds between SIGTERM and SIGKILL of an engine and its agent: a turn that runs may take its whole deadline."""
    return spec.rollout.deadlines.turn + STOP_SLACK


def engine_rank(engine: str, rank: int) -> int:
    """Smallest limit of an engine's ranks that supports the adapter's."""
    return next((limit for limit in DIALECTS[engine].ranks if limit >= rank), rank)


def engine_url(site: Site, index: int, *, local: bool = False) -> str:
    """Where an engine is reached, or is by what is beside it in its pod."""
    endpoint = site.endpoint(Role.ENGINE, index)
    return f"http://127.0.0.1:{endpoint.port}" if local else f"http://{endpoint.address}"


def engine_entry(site: Site, index: int) -> EngineEntry:
    """Addresses of an engine, for the learner."""
    address = site.endpoint(Role.INFERENCE, index).address
    return EngineEntry(name=f"engine-{index}", url=engine_url(site, index), agent_address=address)


def engine_places(spec: JobSpec, site: Site) -> dict[str, object]:
    """Where the learner finds the engines, as fields of its settings: a name, a file, or one after the other."""
    if site.engine_service is not None:
        return {"engine_agents": site.engine_service.agents}
    if site.engines_file is not None:
        return {"engines_file": site.engines_file}
    return {"engines": tuple(engine_entry(site, index) for index in range(spec.inference.replicas.min))}


def engine_turns(spec: JobSpec, site: Site) -> dict[str, object]:
    """How an engine shares its device with the learner, as fields of its agent's settings."""
    seconds = {} if site.devices is None else {"move_seconds": site.devices.move_seconds}
    return {"turns": spec.inference.sharing == "turns", **seconds}


def learner_turns(spec: JobSpec, site: Site) -> dict[str, object]:
    """How the learner shares its device with an engine, as fields of its settings."""
    base_offload = site.devices is not None and site.devices.base_offload
    return {"turns": spec.inference.sharing == "turns", "base_offload": base_offload}


def engine_servers(spec: JobSpec, site: Site) -> tuple[str, ...]:
    """Where the judge finds the engines: a name, a file, or one after the other."""
    if site.engine_service is not None:
        return (site.engine_service.engines,)
    if site.engines_file is not None:
        return (Path(site.engines_file).as_uri(),)
    return tuple(engine_url(site, index) for index in range(spec.inference.replicas.min))


def engine_component(
    job: AgentRLJob, site: Site, index: int, *, template: str | None = None, tool_calls: str | None = None
) -> Component:
    """The engine of replica `index`.

    Args:
        job: The job.
        site: Where it runs.
        index: Number of the replica.
        template: File of the chat template of conversations, which no episode needs; None for the model's own.
        tool_calls: Format in which conversations have their calls of tools read; None: they stay text.
    """
    dialect = DIALECTS[job.spec.inference.engine]
    accelerator = job.spec.inference.accelerator
    endpoint = site.endpoint(Role.ENGINE, index)
    command = dialect.command(replace(_launch(job, site, index), template=template, tool_calls=tool_calls))
    return Component(
        name=f"engine-{index}",
        role=Role.ENGINE,
        module=command.module,
        python=site.engine_python,
        args=command.arguments,
        env={
            **command.environment,
            **_path(site),
            ROUTES: routes(dialect),
            engine_failure.VARIABLE: failure_file(site, index),
        },
        ports={"http": endpoint.port},
        ready=Ready(port=endpoint.port, http_path=dialect.health.path),
        device=Device(profile=accelerator.profile, count=accelerator.count),
    )


def _path(site: Site) -> dict[str, str]:
    return {} if site.engine_path is None else {"PYTHONPATH": site.engine_path}


def routes(dialect: EngineDialect) -> str:
    """Value of `ROUTES`."""
    abort = dialect.abort("any")
    return json.dumps(
        {
            "open": sorted(dialect.open_routes),
            "data": sorted(dialect.data_routes),
            "abort": [] if abort is None else [[abort.method, abort.path]],
        }
    )


def _launch(job: AgentRLJob, site: Site, index: int) -> Launch:
    spec = job.spec
    endpoint = site.endpoint(Role.ENGINE, index)
    build = site.build(spec.inference.accelerator, "inference")
    return Launch(
        model=site.model,
        name=BASE_MODEL_NAME,
        dtype=spec.model.dtype,
        context_length=spec.inference.context_length,
        rank=engine_rank(spec.inference.engine, spec.model.adapter.rank),
        slots=spec.inference.adapter_slots,
        cpu=build.device == "cpu",
        threads=spec.inference.threads,
        devices=spec.inference.accelerator.count,
        host=endpoint.bind,
        port=endpoint.port,
        work_dir=site.work_dir,
        otlp=spec.telemetry.otlp,
        options=spec.inference.args,
        memory=None if site.devices is None else site.devices.memory.get(f"engine-{index}"),
        version=spec.inference.version,
        targets=() if isinstance(targets := spec.model.adapter.targets, str) else targets,
        judges=uses_own_engines(spec),
        turns=spec.inference.sharing == "turns",
    )


def failure_file(site: Site, index: int) -> str:
    """File in which an engine records why it could not start, read by its agent."""
    return f"{site.work_dir}/engine-{index}-failure.json"
