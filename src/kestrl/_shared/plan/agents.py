"""The plan's part of an agent outside of the worker."""

from __future__ import annotations

from dataclasses import replace

from kestrl._shared.plan.components import Component
from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.rollout import OutsideAgent
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.agent import Agent

GATEWAY_PORT = 7200
"""Port of a worker's pod at which a service reaches its episodes."""


def outside_agent(agent: Agent, site: Site) -> OutsideAgent | None:
    """Settings of the agent; None for a loop."""
    if agent.outside is None:
        return None
    return OutsideAgent(
        run=agent.run,
        python=site.agent_python if agent.run is not None else None,
        command=tuple(agent.command or ()),
        url=agent.url,
        config=agent.config,
        env=agent.env,
        stops=dict(agent.stops),
        stopped_reward=agent.stopped_reward,
    )


def agent_servers(agent: Agent) -> list[RemoteServer]:
    """The service of an agent by URL; none for another."""
    return [] if agent.url is None else [server_at(agent.url, "spec.agent.url")]


def serves_pods(agent: Agent, site: Site) -> bool:
    """Whether episodes are served to other pods: programs and host processes run beside the worker."""
    return site.templates and agent.url is not None


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
    if agent.run is not None:
        packages = f" with {', '.join(agent.python.requirements)}" if agent.python else ""
        return f"{agent.run}, in a process beside each worker{packages}"
    if agent.command is not None:
        return f"{' '.join(agent.command)}, a process for each episode"
    return "" if agent.url is None else f"{agent.url}, a POST for each episode"
