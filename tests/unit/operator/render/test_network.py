"""Network isolation: the rendered policies, evaluated like Kubernetes evaluates them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from tests.unit.operator.rendering import ROLES, of_kind, rendered

from kestrl._shared.plan.components import Role
from kestrl_operator.render.network import selector
from kestrl_operator.state.cluster import GRPC_PORT, HTTP_PORT, METRICS_PORT

GRPC, HTTP, METRICS = GRPC_PORT, HTTP_PORT, METRICS_PORT


@dataclass(frozen=True, kw_only=True)
class Party:
    """A pod, or, without labels, an address outside the cluster."""

    address: str = "10.0.0.1"
    namespace: str = "team-a"
    labels: Mapping[str, str] = field(default_factory=dict)


def of_job(role: Role, job: str = "email-search", namespace: str = "team-a") -> Party:
    return Party(namespace=namespace, labels={**selector(job, role), "app.kubernetes.io/name": "kestrl"})


LEARNER, ROLLOUT, ENGINE, TOOLS, JUDGE = map(
    of_job, (Role.LEARNER, Role.ROLLOUT, Role.INFERENCE, Role.TOOLS, Role.JUDGE)
)
MINE = {"learner": LEARNER, "rollout": ROLLOUT, "engine": ENGINE, "tools": TOOLS, "judge": JUDGE}
OTHERS = {name: of_job(Role(party.labels["kestrl.dev/role"]), job="other") for name, party in MINE.items()}
OPERATOR = Party(namespace="kestrl-system", labels={"app.kubernetes.io/name": "kestrl-operator"})
PROMETHEUS = Party(namespace="monitoring", labels={"app.kubernetes.io/name": "prometheus"})
STRANGER = Party(namespace="team-b", labels={"app": "nginx"})
NEIGHBOUR = Party(labels={"app": "postgres"})
NAMES = Party(namespace="kube-system", labels={"k8s-app": "kube-dns"}, address="10.0.0.53")
STORAGE = Party(address="52.218.0.1", namespace="")
PRIVATE_STORAGE = Party(address="192.168.7.7", namespace="")
METADATA = Party(address="169.254.169.254", namespace="")
ALIBABAS, AZURES = Party(address="100.100.100.200", namespace=""), Party(address="168.63.129.16", namespace="")

OBJECTS, ELSEWHERE = rendered(), rendered("metadata.name=other")
POLICIES = list(of_kind([*OBJECTS, *ELSEWHERE], "NetworkPolicy").values())
SERVICES = of_kind(OBJECTS, "Service")


def selects(chosen: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(chosen) <= {"matchLabels"}
    return chosen.get("matchLabels", {}).items() <= labels.items()


def is_peer(peer: Mapping[str, Any], party: Party, namespace: str) -> bool:
    if "ipBlock" in peer:
        block = peer["ipBlock"]
        inside = [ip_address(party.address) in ip_network(cidr) for cidr in (block["cidr"], *block.get("except", ()))]
        return inside[0] and not any(inside[1:])
    if not party.labels:
        return False
    near = party.namespace == namespace if "namespaceSelector" not in peer else peer["namespaceSelector"] == {}
    return near and selects(peer.get("podSelector", {}), party.labels)


def lets_through(party: Party, other: Party, direction: str, port: int, protocol: str) -> bool:
    """Whether a pod's own policies allow traffic to or from another; a pod that no policy selects allows all."""
    chosen = [
        policy["spec"]
        for policy in POLICIES
        if policy["metadata"]["namespace"] == party.namespace
        and party.labels
        and selects(policy["spec"]["podSelector"], party.labels)
        and direction in policy["spec"]["policyTypes"]
    ]
    side = {"Egress": ("egress", "to"), "Ingress": ("ingress", "from")}[direction]
    rules: Sequence[Mapping[str, Any]] = [rule for spec in chosen for rule in spec.get(side[0], ())]
    return not chosen or any(
        (side[1] not in rule or any(is_peer(peer, other, party.namespace) for peer in rule[side[1]]))
        and ("ports" not in rule or {"port": port, "protocol": protocol} in rule["ports"])
        for rule in rules
    )


def may(one: Party, other: Party, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is allowed by the policies of both ends."""
    return lets_through(one, other, "Egress", port, protocol) and lets_through(other, one, "Ingress", port, protocol)


@pytest.mark.parametrize(
    ("one", "other", "port", "allowed"),
    [
        (LEARNER, ROLLOUT, GRPC, True),
        (LEARNER, ENGINE, GRPC, True),
        (LEARNER, ENGINE, HTTP, True),
        (LEARNER, TOOLS, GRPC, False),
        (LEARNER, JUDGE, GRPC, False),
        (ROLLOUT, ENGINE, HTTP, True),
        (ROLLOUT, TOOLS, GRPC, True),
        (ROLLOUT, JUDGE, GRPC, True),
        (ROLLOUT, LEARNER, GRPC, False),
        (ROLLOUT, ROLLOUT, GRPC, False),
        (ENGINE, ENGINE, HTTP, False),
        (ENGINE, LEARNER, GRPC, False),
        (ENGINE, ROLLOUT, GRPC, False),
        (JUDGE, LEARNER, GRPC, False),
        (TOOLS, LEARNER, GRPC, False),
        (TOOLS, ROLLOUT, GRPC, False),
        (TOOLS, ENGINE, HTTP, False),
        (TOOLS, ENGINE, GRPC, False),
        (OPERATOR, LEARNER, GRPC, True),
        (OPERATOR, ROLLOUT, GRPC, False),
        (OPERATOR, ENGINE, HTTP, False),
        (Party(labels=OPERATOR.labels, namespace="team-a"), LEARNER, GRPC, True),
        (PROMETHEUS, LEARNER, GRPC, False),
        (STRANGER, LEARNER, GRPC, False),
        (STRANGER, TOOLS, GRPC, False),
        (NEIGHBOUR, ENGINE, HTTP, False),
        (STORAGE, ENGINE, HTTP, False),
        (LEARNER, STORAGE, 443, True),
        (ENGINE, STORAGE, 443, True),
        (ROLLOUT, STORAGE, 443, True),
        (LEARNER, PRIVATE_STORAGE, 9000, True),
        (LEARNER, STORAGE, 22, False),
        (ROLLOUT, STRANGER, GRPC, False),
    ],
)
def test_only_the_connections_of_the_architecture_are_open(one: Party, other: Party, port: int, allowed: bool) -> None:
    assert may(one, other, port) is allowed


ARROWS = {
    ("learner", "rollout"),
    ("learner", "engine"),
    ("rollout", "engine"),
    ("rollout", "tools"),
    ("rollout", "judge"),
}


@pytest.mark.parametrize("one", MINE)
@pytest.mark.parametrize("other", MINE)
def test_each_allowed_connection_is_open_at_both_ends_and_no_other(one: str, other: str) -> None:
    for direction, party, peer in (("Egress", one, other), ("Ingress", other, one)):
        assert lets_through(MINE[party], MINE[peer], direction, GRPC, "TCP") is ((one, other) in ARROWS)


@pytest.mark.parametrize("name", MINE)
def test_metrics_collectors_reach_the_metrics_port_and_nothing_else(name: str) -> None:
    assert may(PROMETHEUS, MINE[name], METRICS)
    assert not may(PROMETHEUS, MINE[name], GRPC)
    assert not may(PROMETHEUS, MINE[name], HTTP)


PORTS = (22, 53, 80, 443, 4317, 5432, GRPC, HTTP, METRICS, 8080, 9000)


@pytest.mark.parametrize("who", [TOOLS, JUDGE], ids=["tools", "judge"])
@pytest.mark.parametrize("protocol", ["TCP", "UDP"])
def test_tools_and_judge_have_no_egress(who: Party, protocol: str) -> None:
    everybody = (*MINE.values(), *OTHERS.values(), OPERATOR, PROMETHEUS, STRANGER, NEIGHBOUR, NAMES, STORAGE, METADATA)
    assert [(other, port) for other in everybody for port in PORTS if may(who, other, port, protocol)] == []


@pytest.mark.parametrize("name", MINE)
def test_cloud_metadata_services_are_not_reachable(name: str) -> None:
    for service_address in (METADATA, ALIBABAS, AZURES):
        assert not [port for port in PORTS if port != 53 and may(MINE[name], service_address, port)]


@pytest.mark.parametrize("name", MINE)
def test_pods_of_another_job_are_strangers(name: str) -> None:
    for other in OTHERS.values():
        assert not [port for port in (GRPC, HTTP) if may(MINE[name], other, port) or may(other, MINE[name], port)]


@pytest.mark.parametrize(("name", "asks"), [(name, name in {"learner", "rollout", "engine"}) for name in MINE])
def test_callers_may_resolve_names(name: str, asks: bool) -> None:
    assert may(MINE[name], NAMES, 53, "UDP") is asks
    assert may(MINE[name], NAMES, 53) is asks


def test_a_pod_of_the_job_without_a_role_is_isolated() -> None:
    odd = Party(labels={"kestrl.dev/job": "email-search"})
    assert not [port for port in PORTS if may(odd, STORAGE, port) or may(odd, NAMES, port) or may(STRANGER, odd, port)]


def test_a_role_is_found_by_the_pods_that_its_policy_is_for() -> None:
    policies = of_kind(OBJECTS, "NetworkPolicy")
    workloads = of_kind(OBJECTS, "StatefulSet", "Deployment")
    for name in (f"email-search-{role}" for role in ROLES):
        chosen = policies[name]["spec"]["podSelector"]["matchLabels"]
        assert SERVICES[name]["spec"]["selector"] == chosen
        assert chosen.items() <= workloads[name]["spec"]["template"]["metadata"]["labels"].items()


def test_the_chart_sets_the_ports_of_egress() -> None:
    policies = of_kind(rendered(values={"egressPorts": [8443]}), "NetworkPolicy")
    for role in ("learner", "rollout", "inference"):
        (far,) = (
            rule
            for rule in policies[f"email-search-{role}"]["spec"]["egress"]
            if any("ipBlock" in peer for peer in rule.get("to", ()))
        )
        assert far["ports"] == [{"port": 8443, "protocol": "TCP"}]


def test_without_policies_there_are_none() -> None:
    assert of_kind(rendered(values={"networkPolicies": False}), "NetworkPolicy") == {}


@pytest.mark.parametrize(
    ("role", "headless", "early"),
    [
        (Role.INFERENCE, True, True),
        (Role.LEARNER, True, True),
        (Role.ROLLOUT, True, False),
        (Role.TOOLS, False, False),
        (Role.JUDGE, False, False),
    ],
)
def test_roles_called_pod_by_pod_have_headless_services(role: Role, headless: bool, early: bool) -> None:
    made = SERVICES[f"email-search-{role}"]["spec"]
    assert (made.get("clusterIP") == "None", made.get("publishNotReadyAddresses", False)) == (headless, early)
    ports = {item["name"]: item["port"] for item in made["ports"]}
    assert ports == {"grpc": GRPC, "metrics": METRICS, **({"http": HTTP} if role is Role.INFERENCE else {})}


def test_engines_own_metrics_are_read_by_those_whom_the_administrator_names() -> None:
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    opened = {"from": [prometheus], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    values = {"engineMetricsFrom": [prometheus]}
    for name, policy in of_kind(rendered(values=values), "NetworkPolicy").items():
        assert (opened in policy["spec"].get("ingress", [])) == (name == "email-search-inference"), name
    for policy in of_kind(rendered(), "NetworkPolicy").values():
        assert opened not in policy["spec"].get("ingress", [])
