"""Services and NetworkPolicies: only the connections of the architecture are allowed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Network, ip_network
from types import MappingProxyType
from typing import Any

from kestrl._shared.plan.agents import AGENT_PORT, GATEWAY_PORT, agent_servers, pods_image
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.environments import environment_servers
from kestrl._shared.plan.judges import judge_servers, uses_own_engines
from kestrl._shared.plan.planning import has_rank_pods
from kestrl._shared.plan.servers import METADATA, RemoteServer
from kestrl._shared.plan.tools import sandbox_claim, tool_servers
from kestrl._shared.plan.tracking import tracking_servers
from kestrl._shared.spec import JobSpec
from kestrl.errors import UserInputError
from kestrl_operator.state.chart_values import ApiServer
from kestrl_operator.state.cluster import GRPC_PORT, HTTP_PORT, METRICS_PORT, workload

Object = dict[str, Any]
ROLES = (
    Role.INFERENCE, Role.FILES, Role.TOOLS, Role.JUDGE, Role.AGENT, Role.MLFLOW, Role.ROLLOUT, Role.RANKS, Role.LEARNER,
)  # fmt: skip
"""Roles with pods of their own in any job."""
BY_POD = frozenset({Role.INFERENCE, Role.LEARNER, Role.RANKS, Role.ROLLOUT})
"""Roles addressed pod by pod, through a headless Service."""
CALLERS: dict[Role, tuple[Role, ...]] = {
    Role.INFERENCE: (Role.LEARNER, Role.ROLLOUT),
    Role.TOOLS: (Role.ROLLOUT,),
    Role.FILES: (),
    Role.JUDGE: (Role.ROLLOUT,),
    Role.ROLLOUT: (Role.LEARNER,),
    Role.AGENT: (Role.ROLLOUT,),
    Role.MLFLOW: (),
    Role.LEARNER: (),
    Role.RANKS: (),
}
"""Callers of each role. The operator, which calls the learner for its progress, is allowed by its own label."""
EGRESS_ROLES = frozenset({Role.INFERENCE, Role.LEARNER, Role.RANKS, Role.ROLLOUT, Role.FILES, Role.MLFLOW})
"""Roles that may resolve names and leave the cluster: for object storage, models, adapters and checkpoints. Tools may
not: a DNS query can leak a secret like any other message."""
SANDBOX_LABEL = "kestrl.dev/sandbox"
"""Label of the pods of a warm pool, with its name, which the pool's template sets."""
OPERATOR = {"app.kubernetes.io/name": "kestrl-operator"}


def roles_of(spec: JobSpec) -> tuple[Role, ...]:
    """Roles with pods of their own in a job. Engines run in the pods of their agents."""
    absent = {
        *(() if has_rank_pods(spec) else (Role.RANKS,)),
        *(() if pods_image(spec) is not None else (Role.AGENT,)),
        *(() if spec.data.files else (Role.FILES,)),
        *(() if spec.telemetry.mlflow is not None else (Role.MLFLOW,)),
    }
    return tuple(role for role in ROLES if role not in absent)


def selector(job: str, role: Role) -> dict[str, str]:
    """The labels that select a role's pods."""
    return {"kestrl.dev/job": job, "kestrl.dev/role": str(role)}


def service(job: str, role: Role, *, sticky: bool = False) -> Object:
    """The Service of a role.

    Args:
        job: Name of the job.
        role: The role.
        sticky: Whether it has several pods: a worker that connects again then finds its sessions of tools.
    """
    if role is Role.AGENT:
        return {"selector": selector(job, role), "ports": [{"name": "http", "port": AGENT_PORT}]}
    if role is Role.FILES:
        return {"selector": selector(job, role), "clusterIP": "None"}  # it serves nothing; a StatefulSet names one
    ports = [{"name": "grpc", "port": GRPC_PORT}, {"name": "metrics", "port": METRICS_PORT}]
    if role is Role.INFERENCE:
        ports.append({"name": "http", "port": HTTP_PORT})
    spec: Object = {"selector": selector(job, role), "ports": ports}
    if role is Role.TOOLS and sticky:
        spec["sessionAffinity"] = "ClientIP"
    if role in BY_POD:
        spec["clusterIP"] = "None"
    if role in {Role.INFERENCE, Role.LEARNER}:
        spec["publishNotReadyAddresses"] = True  # a starting component reports its progress
    return spec


def policies(
    job: str,
    spec: JobSpec,
    far_ports: Sequence[int],
    api_server: ApiServer,
    engine_metrics_from: Sequence[Mapping[str, Any]] = (),
    of_identity: Mapping[Role, Sequence[Object]] = MappingProxyType({}),
) -> Iterator[tuple[str, Object]]:
    """A policy that denies everything for all pods of the job, then what each role needs.

    Args:
        job: Name of the job.
        spec: Its spec.
        far_ports: Ports outside of the job that its pods may reach.
        api_server: The API server's addresses.
        engine_metrics_from: Peers that may read the engines' own metrics.
        of_identity: Egress to the metadata services of a cloud identity, by role.

    Raises:
        UserInputError: A judge model or a server of tools is at a port that pods of jobs must not reach.
    """
    everyone = {"matchLabels": {"kestrl.dev/job": job}}
    yield f"{job}-all", {"podSelector": everyone, "policyTypes": ["Ingress", "Egress"]}
    rules_of_role = {
        Role.JUDGE: [*_judge_egress(job, spec, far_ports)],
        Role.TOOLS: [
            *_servers([*tool_servers(spec), *environment_servers(spec)], far_ports),
            *_claims_egress(spec, api_server),
        ],
        Role.ROLLOUT: [*_servers(agent_servers(spec.agent), far_ports)],
        Role.AGENT: [*_gateway_egress(job)],
        Role.MLFLOW: [*_servers(tracking_servers(spec), far_ports)],
    }
    roles = roles_of(spec)
    for role in roles:
        callers = CALLERS[role]
        called = [callee for callee in roles if role in CALLERS[callee]]
        yield (
            workload(job, role),
            {
                "podSelector": {"matchLabels": selector(job, role)},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [
                    *_ingress(job, role, callers),
                    *_judge_ingress(job, role, spec),
                    *_agent_ingress(job, role, spec),
                    *_metrics_ingress(role, engine_metrics_from),
                    *_ranks(job, role, spec, "from"),
                ],
                "egress": [
                    *_egress(job, role, called, far_ports),
                    *rules_of_role.get(role, []),
                    *of_identity.get(role, []),
                    *_ranks(job, role, spec, "to"),
                ],
            },
        )


def _judge_ingress(job: str, role: Role, spec: JobSpec) -> Iterator[Object]:
    """To engines, from a judge that asks the job's own model."""
    if role is Role.INFERENCE and uses_own_engines(spec):
        yield {"from": [_pods(job, Role.JUDGE)], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}


def _metrics_ingress(role: Role, clients: Sequence[Mapping[str, Any]]) -> Iterator[Object]:
    """To engines, from those who read their own metrics."""
    if role is Role.INFERENCE and clients:
        yield {"from": [dict(client) for client in clients], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}


def _ranks(job: str, role: Role, spec: JobSpec, way: str) -> Iterator[Object]:
    """Between all ranks of the learner: backends of collectives choose their ports."""
    if role in {Role.LEARNER, Role.RANKS} and has_rank_pods(spec):
        yield {way: [_pods(job, Role.LEARNER), _pods(job, Role.RANKS)], "ports": [{"protocol": "TCP"}]}


def _agent_ingress(job: str, role: Role, spec: JobSpec) -> Iterator[Object]:
    """To the gateway of workers, from the pods that run the job's episodes; where its agent is a URL from any pod,
    since a policy does not know which has the agent, and each call needs the key of its episode.
    """
    if role is not Role.ROLLOUT:
        return
    ports = [{"port": GATEWAY_PORT, "protocol": "TCP"}]
    if pods_image(spec) is not None:
        yield {"from": [_pods(job, Role.AGENT)], "ports": ports}
    elif agent_servers(spec.agent):
        yield {"from": [{"namespaceSelector": {}}], "ports": ports}


def _gateway_egress(job: str) -> Iterator[Object]:
    """To the gateway of workers, and to names: policies of the user's own may allow an agent more."""
    yield {"ports": _dns()}
    yield {"to": [_pods(job, Role.ROLLOUT)], "ports": [{"port": GATEWAY_PORT, "protocol": "TCP"}]}


def _judge_egress(job: str, spec: JobSpec, far_ports: Sequence[int]) -> Iterator[Object]:
    """From the judge to the servers of its models, and to names; nothing if the job names no judge model."""
    servers = judge_servers(spec)
    if uses_own_engines(spec):
        if not servers:
            yield {"ports": _dns()}
        yield {"to": [_pods(job, Role.INFERENCE)], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    yield from _servers(servers, far_ports)


def _servers(servers: Sequence[RemoteServer], far_ports: Sequence[int]) -> Iterator[Object]:
    """To servers of the manifest, and to names; nothing without a server. A policy knows addresses and ports but no
    host names, so that a host outside the cluster is allowed by its port.
    """
    if servers:
        yield {"ports": _dns()}
    for server in servers:
        if server.port not in far_ports:
            raise UserInputError(
                f"{server.field}: port {server.port} is not one that pods of jobs may reach "
                f"({', '.join(map(str, far_ports))}); use one of them, or have the administrator add it to "
                "jobs.egressPorts"
            )
        name = server.namespace
        selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
        far = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
        yield {"to": [far if name is None else selector], "ports": [{"port": server.port, "protocol": "TCP"}]}


def _claims_egress(spec: JobSpec, api_server: ApiServer) -> Iterator[Object]:
    """To the API server, which a policy knows by address and port only, and to the pods of the warm pool; nothing if no
    tool claims sandboxes.
    """
    claim = sandbox_claim(spec)
    if claim is not None:
        blocks = [{"ipBlock": {"cidr": cidr, **_except(cidr)}} for cidr in api_server.cidrs]
        yield {"to": blocks, "ports": [{"port": port, "protocol": "TCP"} for port in api_server.ports]}
        pool = {"podSelector": {"matchLabels": {SANDBOX_LABEL: claim[0].warm_pool}}}
        yield {"to": [pool], "ports": [{"port": claim[0].port, "protocol": "TCP"}]}


def _except(cidr: str) -> Object:
    """The metadata services within a block."""
    block = ip_network(cidr)
    if not isinstance(block, IPv4Network):
        return {}
    inside = [item for item in METADATA if IPv4Network(item).subnet_of(block)]
    return {"except": inside} if inside else {}


def _dns() -> list[Object]:
    return [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]


def _pods(job: str, role: Role) -> Object:
    return {"podSelector": {"matchLabels": selector(job, role)}}


def _ports(role: Role) -> list[Object]:
    ports = [AGENT_PORT] if role is Role.AGENT else [GRPC_PORT, *([HTTP_PORT] if role is Role.INFERENCE else [])]
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _ingress(job: str, role: Role, callers: tuple[Role, ...]) -> list[Object]:
    metrics: Object = {"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]}
    rules = [] if role in {Role.AGENT, Role.FILES, Role.MLFLOW} else [metrics]
    sources = [_pods(job, caller) for caller in callers]
    if role is Role.LEARNER:
        sources.append({"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}})
    if sources:
        rules.append({"from": sources, "ports": _ports(role)})
    return rules


def _egress(job: str, role: Role, called: list[Role], far_ports: Sequence[int]) -> list[Object]:
    rules: list[Object] = [{"to": [_pods(job, callee)], "ports": _ports(callee)} for callee in called]
    return [*rules, *outside(far_ports)] if role in EGRESS_ROLES else rules


def outside(far_ports: Sequence[int]) -> list[Object]:
    """To names, and to object storage and hubs of models, which may have any address except those of metadata services
    of nodes.
    """
    far: Object = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
    return [
        {"ports": _dns()},
        {"to": [far], "ports": [{"port": port, "protocol": "TCP"} for port in far_ports]},
    ]
