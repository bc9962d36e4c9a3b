"""The plan's part of what runs episodes outside of the worker: an agent, or an environment that runs them itself."""

from __future__ import annotations

from dataclasses import replace

from kestrl._shared.plan.components import USUAL_WORKERS, Component, Ready, Role
from kestrl._shared.plan.environments import outside_environment
from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.rollout import HEALTH_PATH, AgentPodSettings, OutsideAgent
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.agent import Agent
from kestrl._shared.spec.job import AgentRLJob, JobSpec

GATEWAY_PORT = 7200
"""Port of a worker's pod at which a service reaches its episodes."""
AGENT_PORT = 7300
"""Port of the pods of an agent."""


def outside_agent(spec: JobSpec, site: Site) -> OutsideAgent | None:
    """Settings of the agent; None for a loop."""
    agent, pods = spec.agent, pods_url(spec, site)
    if agent.outside is None:
        return None
    return OutsideAgent(
        run=agent.run,
        python=site.agent_python if agent.run is not None else None,
        command=tuple(agent.command or ()),
        pods=pods,
        url=agent.url,
        config=agent.config,
        env={} if pods else agent.env,
        stops=dict(agent.stops),
        stopped_reward=agent.stopped_reward,
    )


def outside_runner(spec: JobSpec) -> str | None:
    """The field of what runs the episodes where no loop of the worker does."""
    if spec.environment is not None and spec.environment.owns_loop:
        return f"environment.{spec.environment.kind}"
    return None if spec.agent.outside is None else f"agent.{spec.agent.outside}"


def agent_servers(agent: Agent) -> list[RemoteServer]:
    """The service of an agent by URL; none for another."""
    return [] if agent.url is None else [server_at(agent.url, "spec.agent.url")]


def pods_image(spec: JobSpec) -> str | None:
    """Image of the pods that run the episodes on a cluster: that of the agent, or of an environment that runs them
    itself; None where there are none.
    """
    environment = spec.environment
    return environment.image if environment is not None and environment.owns_loop else spec.agent.image


def pods_replicas(spec: JobSpec) -> int:
    """Number of the pods that run the episodes."""
    environment = spec.environment
    return environment.replicas if environment is not None and environment.owns_loop else spec.agent.replicas


def pods_url(spec: JobSpec, site: Site) -> str | None:
    """URL of the pods that run the episodes; None where there are none."""
    has_pods = site.templates and pods_image(spec) is not None
    return f"http://{site.endpoint(Role.AGENT, 0).address}" if has_pods else None


def agent_pods(job: AgentRLJob, site: Site) -> tuple[Component, ...]:
    """The component of the pods that run the episodes; none where there are none."""
    spec, pods = job.spec, pods_url(job.spec, site)
    if pods is None:
        return ()
    agent, environment = outside_agent(spec, site), outside_environment(spec, site, pods=None)
    capacity = _episodes(spec)
    if agent is not None:
        agent = agent.model_copy(update={"env": spec.agent.env, "pods": None, "python": None, "stops": {}})
    if environment is not None:
        assert spec.environment is not None
        capacity = spec.environment.sessions or capacity
        environment = environment.model_copy(update={"sessions": capacity, "python": None})
    name = f"{Role.AGENT}-0"
    settings = AgentPodSettings(
        component=name,
        job=job.metadata.name,
        run=site.run,
        listen=site.endpoint(Role.AGENT, 0).listen,
        agent=agent,
        environment=environment,
        capacity=capacity,
    )
    return (
        Component(
            name=name,
            role=Role.AGENT,
            module="kestrl_rollout.hosts.pod_program",
            settings=settings,
            ports={"http": AGENT_PORT},
            ready=Ready(port=AGENT_PORT, http_path=HEALTH_PATH),
        ),
    )


def _episodes(spec: JobSpec) -> int:
    """Episodes that workers run at the same time. A pod may get all: connections are spread by chance."""
    return max(spec.rollout.replicas, USUAL_WORKERS) * spec.rollout.concurrency


def serves_pods(spec: JobSpec, site: Site) -> bool:
    """Whether episodes are served to other pods: programs and host processes may run beside the worker."""
    return site.templates and (spec.agent.url is not None or pods_image(spec) is not None)


def gateway_listen(spec: JobSpec, site: Site) -> str:
    """Where a worker serves its episodes."""
    return f"0.0.0.0:{GATEWAY_PORT}" if serves_pods(spec, site) else "127.0.0.1:0"


def with_gateway(component: Component, spec: JobSpec, site: Site) -> Component:
    """A worker with the port of its gateway, where other pods call it."""
    return (
        replace(component, ports={**component.ports, "gateway": GATEWAY_PORT}) if serves_pods(spec, site) else component
    )


def outside_line(agent: Agent) -> str:
    """How an agent outside of the worker runs, for a person; empty for a loop."""
    on_cluster = f"; on a cluster in pods of {agent.image}" if agent.image is not None else ""
    if agent.run is not None:
        packages = f" with {', '.join(agent.python.requirements)}" if agent.python else ""
        return f"{agent.run}, in a process beside each worker{packages}{on_cluster}"
    if agent.command is not None:
        return f"{' '.join(agent.command)}, a process for each episode{on_cluster}"
    return "" if agent.url is None else f"{agent.url}, a POST for each episode"
