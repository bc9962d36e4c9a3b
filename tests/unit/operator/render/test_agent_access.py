"""What workers may reach, and who reaches them, where a service of the user's runs the episodes."""

from __future__ import annotations

from typing import Any

from tests.unit.operator.rendering import of_kind, rendered

from kestrl._shared.plan.agents import GATEWAY_PORT

ROLLOUT = "email-search-rollout"
AGENT = ("tools=[]", "agent={maxTokens: 512, url: 'http://agent.team.svc:8080/run'}")
INGRESS: dict[str, Any] = {"from": [{"namespaceSelector": {}}], "ports": [{"port": GATEWAY_PORT, "protocol": "TCP"}]}


def policy(*overrides: str) -> Any:
    return of_kind(rendered(*overrides), "NetworkPolicy")[ROLLOUT]["spec"]


def test_a_worker_and_its_agents_service_reach_each_other() -> None:
    near = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "team"}}}
    with_agent = policy(*AGENT)
    assert {"to": [near], "ports": [{"port": 8080, "protocol": "TCP"}]} in with_agent["egress"]
    assert INGRESS in with_agent["ingress"]
    (container,) = of_kind(rendered(*AGENT), "Deployment")[ROLLOUT]["spec"]["template"]["spec"]["containers"]
    assert {"name": "gateway", "containerPort": GATEWAY_PORT} in container["ports"]


def test_the_gateway_of_other_jobs_is_reached_by_no_pod() -> None:
    for overrides in (
        (),
        ("tools=[]", "agent={maxTokens: 512, command: [agent]}"),
        ("tools=[]", "agent={maxTokens: 512, run: 'mine:agent'}"),
    ):
        assert INGRESS not in policy(*overrides)["ingress"]
        assert str(GATEWAY_PORT) not in str(of_kind(rendered(*overrides), "Deployment")[ROLLOUT])
