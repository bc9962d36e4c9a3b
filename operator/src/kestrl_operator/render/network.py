"""Services, and who may talk to whom: nothing but the arrows of the house."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kestrl.plan.components import Role
from kestrl_operator.cluster import GRPC_PORT, HTTP_PORT, METRICS_PORT, workload

Object = dict[str, Any]
BY_POD = frozenset({Role.INFERENCE, Role.LEARNER, Role.ROLLOUT})
"""Addressed pod by pod, through a headless Service."""
CALLERS: dict[Role, tuple[Role, ...]] = {
    Role.INFERENCE: (Role.LEARNER, Role.ROLLOUT),
    Role.TOOLS: (Role.ROLLOUT,),
    Role.JUDGE: (Role.ROLLOUT,),
    Role.ROLLOUT: (Role.LEARNER,),
    Role.LEARNER: (),
}
"""Who calls a role. The operator, which asks the learner for its progress, is let in by its own label."""
FAR = frozenset({Role.INFERENCE, Role.LEARNER, Role.ROLLOUT})
"""Roles that may ask for names and leave the cluster's pods: to object storage, for models, adapters and checkpoints. Tools may not: with a
question for a name a secret leaves as well as with any other message."""
METADATA = ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32")
"""Where clouds tell a node who it is and give it credentials: nearly all of them, Alibaba's, Azure's."""
OPERATOR = {"app.kubernetes.io/name": "kestrl-operator"}


def selector(job: str, role: Role) -> dict[str, str]:
    """What tells a role's pods from all others."""
    return {"kestrl.dev/job": job, "kestrl.dev/role": str(role)}


def service(job: str, role: Role) -> Object:
    """The Service of a role."""
    ports = [{"name": "grpc", "port": GRPC_PORT}, {"name": "metrics", "port": METRICS_PORT}]
    if role is Role.INFERENCE:
        ports.append({"name": "http", "port": HTTP_PORT})
    spec: Object = {"selector": selector(job, role), "ports": ports}
    if role in BY_POD:
        spec["clusterIP"] = "None"
    if role in {Role.INFERENCE, Role.LEARNER}:
        spec["publishNotReadyAddresses"] = True  # who is starting is asked how far it is
    return spec


def policies(job: str, far_ports: Sequence[int]) -> Iterator[tuple[str, Object]]:
    """Nothing for all pods of the job, then what each role needs."""
    everyone = {"matchLabels": {"kestrl.dev/job": job}}
    yield f"{job}-all", {"podSelector": everyone, "policyTypes": ["Ingress", "Egress"]}
    for role, callers in CALLERS.items():
        called = [callee for callee, by in CALLERS.items() if role in by]
        yield (
            workload(job, role),
            {
                "podSelector": {"matchLabels": selector(job, role)},
                "policyTypes": ["Ingress", "Egress"],
                "ingress": _ingress(job, role, callers),
                "egress": _egress(job, role, called, far_ports),
            },
        )


def _dns() -> list[Object]:
    return [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]


def _pods(job: str, role: Role) -> Object:
    return {"podSelector": {"matchLabels": selector(job, role)}}


def _ports(role: Role) -> list[Object]:
    ports = [GRPC_PORT, *([HTTP_PORT] if role is Role.INFERENCE else [])]
    return [{"port": port, "protocol": "TCP"} for port in ports]


def _ingress(job: str, role: Role, callers: tuple[Role, ...]) -> list[Object]:
    rules: list[Object] = [{"ports": [{"port": METRICS_PORT, "protocol": "TCP"}]}]
    sources = [_pods(job, caller) for caller in callers]
    if role is Role.LEARNER:
        sources.append({"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}})
    if sources:
        rules.append({"from": sources, "ports": _ports(role)})
    return rules


def _egress(job: str, role: Role, called: list[Role], far_ports: Sequence[int]) -> list[Object]:
    rules: list[Object] = [{"to": [_pods(job, callee)], "ports": _ports(callee)} for callee in called]
    if role in FAR:
        rules.append({"ports": _dns()})
        # Object storage is wherever it is; pods of the cluster's other workloads are not meant, nor the nodes' metadata services.
        rules.append(
            {
                "to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}],
                "ports": [{"port": port, "protocol": "TCP"} for port in far_ports],
            }
        )
    return rules
