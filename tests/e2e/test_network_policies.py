"""The nftables rules of NetworkPolicy objects, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from .cluster.policies import Pod, ruleset, selects


def rules(*policies: dict[str, Any], pods: list[Pod] | None = None) -> str:
    there = pods or [
        Pod("10.0.0.1", "a", {"app": "web"}, {("http", "TCP"): 8080}),
        Pod("10.0.0.2", "a", {"app": "client"}, {}),
        Pod("10.0.0.3", "b", {"app": "client"}, {}),
    ]
    objects = [{"metadata": {"namespace": "a"}, "spec": {"policyTypes": ["Ingress"], **policy}} for policy in policies]
    return ruleset(there, {"a": {"team": "red"}, "b": {"team": "blue"}}, objects)


def test_without_policies_nothing_is_filtered() -> None:
    assert "jump" not in rules()


def test_a_policy_isolates_the_pods_it_selects_in_its_namespace() -> None:
    table = rules({"podSelector": {"matchLabels": {"app": "client"}}})
    assert "ip daddr { 10.0.0.2 } jump to_pods" in table
    assert "return" not in table


def test_peers_are_taken_from_the_namespaces_that_are_selected() -> None:
    team = {"matchExpressions": [{"key": "team", "operator": "In", "values": ["blue"]}]}
    table = rules({"podSelector": {}, "ingress": [{"from": [{"namespaceSelector": team}]}]})
    assert "ip daddr 10.0.0.1 ip saddr 10.0.0.3 return" in table
    assert "ip saddr 10.0.0.2 return" not in table


def test_ports_may_have_names_and_ranges() -> None:
    ports = [{"port": "http"}, {"port": 100, "endPort": 200, "protocol": "UDP"}, {"port": "unknown"}]
    table = rules({"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"ports": ports}]})
    assert "ip daddr 10.0.0.1 tcp dport 8080 return" in table
    assert "ip daddr 10.0.0.1 udp dport 100-200 return" in table
    assert table.count("return") == 2


def test_blocks_may_have_holes() -> None:
    block = {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}
    table = rules({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": block}]}]})
    assert "ip saddr 10.0.0.1 ip daddr 0.0.0.0/0 ip daddr != { 169.254.0.0/16 } return" in table


@pytest.mark.parametrize(
    ("operator", "values", "labels", "taken"),
    [
        ("In", ["x"], {"k": "x"}, True),
        ("In", ["x"], {}, False),
        ("NotIn", ["x"], {}, True),
        ("Exists", [], {"k": ""}, True),
        ("DoesNotExist", [], {"k": ""}, False),
    ],
)
def test_selectors(operator: str, values: list[str], labels: dict[str, str], taken: bool) -> None:
    assert selects({"matchExpressions": [{"key": "k", "operator": operator, "values": values}]}, labels) is taken
