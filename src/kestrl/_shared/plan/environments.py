"""The environment of a job as an entry of the tool service or as a host of a worker, and what its interpreter has.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.rollout import OutsideEnvironment
from kestrl._shared.plan.settings.tools import EnvironmentEntry, ProcessEntry, ToolEntry
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.environments import NAME, Environment, VerifiersEnvironment
from kestrl._shared.spec.job import JobSpec
from kestrl.tools.shapes import is_mapping

HOST_REQUIREMENTS = ("docstring-parser>=0.16", "jsonschema-rs>=0.33", "pydantic>=2.11", "typing-extensions>=4.12")
"""What the host of an environment imports beside the standard library."""
KIND_REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "reasoningGym": ("reasoning-gym",),
    "openenv": ("websockets>=15",),
    "verifiers": ("verifiers>=0.4,<0.5", "uv"),
}
"""What the adapter of a kind imports; requirements of the manifest for the same package replace them."""
ADAPTERS: Mapping[str, str] = {
    "reasoningGym": "kestrl_tools.environments.reasoning_gym:ReasoningGym",
    "openenv": "kestrl_tools.environments.openenv:OpenEnv",
}
"""Import path of the adapter of a kind."""
LAUNCHER = "/kestrl/environment/launcher"
"""On a cluster, the socket at which the container of an environment starts its processes, in a volume of the pod."""
WAIT_SHARE = 0.8
"""Share of the deadline of a call that an episode waits for a place, so that the rest begins it."""
PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def environment_requirements(environment: Environment) -> tuple[str, ...]:
    """What is installed for an environment: the manifest's requirements, and those of host and adapter that it does
    not name.
    """
    named_packages = {_package(requirement) for requirement in environment.python.requirements}
    needed = (*KIND_REQUIREMENTS.get(environment.kind, ()), *HOST_REQUIREMENTS)
    return (
        *environment.python.requirements,
        *(requirement for requirement in needed if _package(requirement) not in named_packages),
    )


def _package(requirement: str) -> str:
    """Name of the package of a requirement, in the form in which equal names are equal."""
    name = PACKAGE.match(requirement)
    return re.sub(r"[-_.]+", "-", name[0] if name else "").lower()


def offers_tools(spec: JobSpec) -> bool:
    """Whether the environment of a job may offer tools to the model."""
    environment = spec.environment
    return environment is not None and (environment.trl is not None or environment.adapter is not None)


def environment_servers(spec: JobSpec) -> list[RemoteServer]:
    """The running server of an environment; none for another."""
    openenv = spec.environment.openenv if spec.environment is not None else None
    return [] if openenv is None or openenv.url is None else [server_at(openenv.url, "spec.environment.openenv.url")]


def stepped_environment(spec: JobSpec) -> Environment | None:
    """The environment that the tool service plays; None where there is none, or it runs its episodes itself."""
    return None if spec.environment is None or spec.environment.owns_loop else spec.environment


def environment_entries(spec: JobSpec, site: Site) -> tuple[ToolEntry, ...]:
    """The environment of a job as an entry of the tool service; none if it has none."""
    environment = stepped_environment(spec)
    if environment is None:
        return ()
    rollout = spec.rollout
    episodes, deadline = rollout.replicas * rollout.concurrency, rollout.deadlines.tool
    launcher = LAUNCHER if site.templates else None
    return (environment_entry(environment, site.environment_python, launcher, episodes=episodes, deadline=deadline),)


def outside_environment(spec: JobSpec, site: Site, *, pods: str | None) -> OutsideEnvironment | None:
    """The environment of a job that runs its episodes itself, as a worker has it; None for another.

    Args:
        spec: The job.
        site: Where it runs.
        pods: URL of its pods; None where it runs beside the worker.
    """
    environment = spec.environment
    if environment is None or environment.verifiers is None:
        return None
    rollout = spec.rollout
    episodes = rollout.replicas * rollout.concurrency
    if environment.sessions is not None:
        episodes = environment.sessions * (environment.replicas if pods else 1)
    return OutsideEnvironment(
        name=NAME,
        taskset=environment.verifiers.taskset,
        python=None if pods else site.environment_python,
        pods=pods,
        config=verifiers_config(environment.verifiers, spec),
        sessions=ceil(episodes / rollout.replicas),
        wait_seconds=WAIT_SHARE * rollout.deadlines.tool,
        start_seconds=environment.start_timeout,
    )


def verifiers_config(environment: VerifiersEnvironment, spec: JobSpec) -> dict[str, Any]:
    """Configuration of verifiers' environment. Its limits are those of the job, so that an episode that reaches one is
    scored, and not refused a call.
    """
    limits = {
        "max_turns": spec.agent.max_turns,
        "max_output_tokens": spec.agent.max_tokens,
        "max_total_tokens": spec.inference.context_length,
    }
    harness = {"harness": {"id": environment.harness}} if environment.harness else {}
    base = {
        "taskset": {"id": environment.taskset},
        "agent": {"runtime": {"type": "subprocess"}, **limits, **harness},
    }
    return _merged(base, environment.config)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes, which reach into nested ones."""
    merged = dict(base)
    for name, change in changes.items():
        before = merged.get(name)
        merged[name] = _merged(before, change) if is_mapping(before) and is_mapping(change) else change
    return merged


def environment_entry(
    environment: Environment, python: str | None, launcher: str | None = None, *, episodes: int, deadline: float
) -> ToolEntry:
    """An environment as an entry of the tool service.

    Args:
        environment: The environment.
        python: Its interpreter.
        launcher: Socket of the container with its image; None where it runs beside the tool service.
        episodes: Those that workers run at the same time.
        deadline: That of a call of a tool, in seconds.
    """
    use, config = _adapter(environment)
    return ToolEntry(
        name=NAME,
        use=use,
        config=config,
        process=ProcessEntry(memory_mb=environment.memory_mb),
        environment=EnvironmentEntry(
            python=python,
            launcher=launcher,
            acts=environment.trl is None,
            sessions=environment.sessions or episodes,
            wait_seconds=WAIT_SHARE * deadline,
            start_seconds=environment.start_timeout,
        ),
    )


def _adapter(environment: Environment) -> tuple[str, dict[str, Any]]:
    """Import path and keyword arguments of the class that plays an environment."""
    if environment.trl is not None:
        return environment.trl.use, {}
    if environment.adapter is not None:
        return environment.adapter.use, dict(environment.adapter.config)
    if environment.reasoning_gym is not None:
        gym = environment.reasoning_gym
        return ADAPTERS["reasoningGym"], {"generator": gym.generator, "settings": gym.config}
    assert environment.openenv is not None
    return ADAPTERS["openenv"], {"url": environment.openenv.url, "app": environment.openenv.app}
