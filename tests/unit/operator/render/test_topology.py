"""Where pods with devices are wanted, and what ranks of several nodes reach each other by: a job for a node of eight
H100s, and one whose learner has two such nodes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.rendering import VALUES, of_kind, rendered

ONE_NODE = (
    "inference.replicas=4",
    "inference.accelerator={profile: nvidia, count: 1}",
    "learner.accelerator={profile: nvidia, count: 4}",
)
TWO_NODES = (
    "inference.replicas=8",
    "inference.accelerator={profile: nvidia, count: 1}",
    "learner.accelerator={profile: nvidia, count: 8}",
    "learner.replicas=2",
)
RDMA = {
    "accelerators": {
        "nvidia": {
            "topologyKeys": ["kubernetes.io/hostname", "topology.kubernetes.io/rack"],
            "acrossNodes": {
                "moreResources": {"rdma/hca_shared_devices_a": 1},
                "capabilities": ["IPC_LOCK"],
                "env": {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"},
            },
        }
    }
}
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def pods(*overrides: str, values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """The pod specs of a job by role."""
    objects = of_kind(rendered(*overrides, values=values), "StatefulSet", "Deployment")
    return {name.rpartition("-")[2]: item["spec"]["template"]["spec"] for name, item in objects.items()}


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in container["env"]}


def test_pods_with_devices_are_wanted_on_the_node_of_the_others() -> None:
    by_role = pods(*ONE_NODE)
    for role in ("inference", "learner"):
        (term,) = by_role[role]["affinity"]["podAffinity"][PREFERRED]
        assert term["weight"] == 100
        assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
        selector = term["podAffinityTerm"]["labelSelector"]
        assert selector["matchLabels"] == {"kestrl.dev/job": "email-search"}
        assert selector["matchExpressions"][0]["values"] == ["inference", "learner", "ranks"]
    assert all("affinity" not in by_role[role] for role in ("rollout", "tools", "judge")), "they follow nothing"
    limits = [by_role[role]["containers"][0]["resources"]["limits"] for role in ("inference", "learner")]
    devices = [amounts["nvidia.com/gpu"] for amounts in limits]
    assert devices == ["1", "4"], "four engines and the learner fill one node"


def test_a_learner_of_one_pod_has_nothing_of_other_nodes() -> None:
    learner = pods(*ONE_NODE, values=RDMA)["learner"]["containers"][0]
    assert "rdma/hca_shared_devices_a" not in learner["resources"]["limits"]
    assert "add" not in learner["securityContext"]["capabilities"]
    assert "NCCL_SOCKET_IFNAME" not in variables(learner)


@pytest.mark.parametrize("role", ["learner", "ranks"])
def test_ranks_of_two_nodes_have_rdma_devices_and_the_interface_of_nccl(role: str) -> None:
    pod = pods(*TWO_NODES, values=RDMA)[role]
    rank = pod["containers"][0]
    for kind in ("requests", "limits"):
        amounts = rank["resources"][kind]
        assert (amounts["nvidia.com/gpu"], amounts["rdma/hca_shared_devices_a"]) == ("8", "1")
    assert rank["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert variables(rank).items() >= {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5"}.items()
    terms = pod["affinity"]["podAffinity"][PREFERRED]
    wanted = [(term["weight"], term["podAffinityTerm"]["topologyKey"]) for term in terms]
    assert wanted == [(100, "kubernetes.io/hostname"), (50, "topology.kubernetes.io/rack")]
    engine = pods(*TWO_NODES, values=RDMA)["inference"]["containers"][0]
    assert "rdma/hca_shared_devices_a" not in engine["resources"]["limits"]


def test_without_values_ranks_of_two_nodes_use_the_pods_interface() -> None:
    rank = pods(*TWO_NODES)["ranks"]["containers"][0]
    assert variables(rank)["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "add" not in rank["securityContext"]["capabilities"]
    assert VALUES["images"]["learner"]["cuda"] == rank["image"]
