"""The plan's part of an agent outside of the worker."""

from __future__ import annotations

from dataclasses import replace

from kestrl._shared.plan.components import USUAL_WORKERS, Component, Ready, Role
from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.rollout import HEALTH_PATH, AgentPodSettings, OutsideAgent
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.agent import Agent
from kestrl._shared.spec.job import AgentRLJob, JobSpec

GATEWAY_PORT = 7200
"""Port of a worker's pod at which a service reaches its episodes."""
AGENT_PORT = 7300
"""Port of the pods of an agent."""


def outside_agent(agent: Agent, site: Site) -> OutsideAgent | None:
    """Settings of the agent; None for a loop."""
    if agent.outside is None:
        return None
    return OutsideAgent(
        run=agent.run,
        python=site.agent_python if agent.run is not None else None,
        command=tuple(agent.command or ()),
        pods=f"http://{site.endpoint(Role.AGENT, 0).address}" if has_agent_pods(agent, site) else None,
        url=agent.url,
        config=agent.config,
        env={} if has_agent_pods(agent, site) else agent.env,
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


def has_agent_pods(agent: Agent, site: Site) -> bool:
    """Whether the agent runs in pods of its own."""
    return site.templates and agent.image is not None


def agent_pods(job: AgentRLJob, site: Site) -> tuple[Component, ...]:
    """The component of the agent's pods; none where it has none."""
    spec, agent = job.spec, outside_agent(job.spec.agent, site)
    if agent is None or not has_agent_pods(spec.agent, site):
        return ()
    name = f"{Role.AGENT}-0"
    settings = AgentPodSettings(
        component=name,
        job=job.metadata.name,
        run=site.run,
        listen=site.endpoint(Role.AGENT, 0).listen,
        agent=agent.model_copy(update={"env": spec.agent.env, "pods": None, "python": None, "stops": {}}),
        capacity=_episodes(spec),
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


def serves_pods(agent: Agent, site: Site) -> bool:
    """Whether episodes are served to other pods: programs and host processes may run beside the worker."""
    return site.templates and (agent.url is not None or agent.image is not None)


def gateway_listen(agent: Agent, site: Site) -> str:
    """Where a worker serves its episodes."""
    return f"0.0.0.0:{GATEWAY_PORT}" if serves_pods(agent, site) else "127.0.0.1:0"


def with_gateway(component: Component, agent: Agent, site: Site) -> Component:
    """A worker with the port of its gateway, where other pods call it."""
    return (
        replace(component, ports={**component.ports, "gateway": GATEWAY_PORT})
        if serves_pods(agent, site)
        else component
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
