"""Accelerator profiles: what pods request for their devices, and whether any node could ever provide them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from kestrl.errors import UserInputError
from kestrl_operator.state.accelerators import BUILT_IN, Node, Profile, profiles, quantity, unsatisfiable


def node(name: str = "n", **changes: Any) -> Node:
    values: dict[str, Any] = {"labels": {}, "taints": [], "allocatable": {"cpu": "8", "memory": "32Gi"}}
    return Node(name=name, **(values | changes))


GPUS = {"cpu": "64", "nvidia.com/gpu": "8"}
TAINT = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}


def test_each_profile_asks_for_its_own_resource() -> None:
    assert BUILT_IN["nvidia"].requests(4) == {"nvidia.com/gpu": "4"}
    assert BUILT_IN["ascend"].requests(8) == {"huawei.com/Ascend910": "8"}
    assert BUILT_IN["ascend-cce"].requests(1) == {"huawei.com/ascend-1980": "1"}
    assert BUILT_IN["cpu"].requests(1) == {}


def test_a_container_without_a_device_sees_none() -> None:
    assert {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"} in BUILT_IN["cpu"].environment()
    assert all(item["name"] != "NVIDIA_VISIBLE_DEVICES" for item in BUILT_IN["nvidia"].environment())


def test_npu_numbers_come_from_volcanos_annotation_or_the_device_plugin() -> None:
    assert BUILT_IN["ascend"].environment() == []
    (variable,) = BUILT_IN["ascend-volcano"].environment()
    assert variable["name"] == "ASCEND_VISIBLE_DEVICES"
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['huawei.com/Ascend910']"
    assert BUILT_IN["ascend-volcano"].scheduler == "volcano"


def test_ranks_of_several_pods_get_what_reaches_other_nodes() -> None:
    rdma = {
        "env": {"NCCL_IB_HCA": "mlx5"},
        "moreResources": {"rdma/hca_shared_devices_a": 1},
        "capabilities": ["IPC_LOCK"],
    }
    alone = profiles({"nvidia": {"acrossNodes": rdma, "env": {"NCCL_DEBUG": "INFO"}}})["nvidia"]
    assert (alone.requests(8), alone.capabilities) == ({"nvidia.com/gpu": "8"}, ())
    several = alone.of_several_pods()
    assert several.requests(8) == {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1"}
    assert several.capabilities == ("IPC_LOCK",)
    assert several.environment() == [
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "NCCL_IB_HCA", "value": "mlx5"},
    ]


def test_processes_of_a_profile_may_be_root() -> None:
    root = profiles({"ascend": {"podSecurity": {"runAsUser": 0, "runAsGroup": 0}}})["ascend"]
    assert root.pod_security.changes() == {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}


def test_values_change_a_profile_and_add_others() -> None:
    known = profiles(
        {
            "nvidia": {"runtimeClass": "nvidia", "nodeSelector": {"pool": "a100"}},
            "mig": {"resource": "nvidia.com/mig-1g.10gb", "image": "cuda"},
        }
    )
    assert (known["nvidia"].runtime_class, known["nvidia"].resource) == ("nvidia", "nvidia.com/gpu")
    assert known["nvidia"].tolerations == BUILT_IN["nvidia"].tolerations
    assert known["mig"].requests(1) == {"nvidia.com/mig-1g.10gb": "1"}
    assert known["cpu"] == BUILT_IN["cpu"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nvidia": {"runtimeclass": "x"}}, "accelerators.nvidia: runtimeclass: Extra inputs"),
        ({"mine": {"resource": "a/b"}}, "accelerators.mine: image: Field required"),
        ({"nvidia": 3}, "accelerators.nvidia: must be a map"),
        ({"mine": {"image": "rocm"}}, "accelerators.mine: image: String should match pattern"),
        ({"ascend": {"hostMounts": [{"path": "/d", "type": "Folder"}]}}, "hostMounts.0.type: Input should be"),
        ({"nvidia": {"tolerations": [{"effect": "x"}]}}, "accelerators.nvidia: tolerations.0.key: Field required"),
    ],
)
def test_an_invalid_profile_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        profiles(values)


@pytest.mark.parametrize(
    ("profile", "count", "nodes", "why"),
    [
        ("nvidia", 8, [node(allocatable=GPUS)], ""),
        ("nvidia", 8, [node(allocatable=GPUS, taints=[TAINT])], ""),
        ("nvidia", 1, [node(allocatable=GPUS, schedulable=False)], ""),  # cordoned for now only
        ("cpu", 1, [], ""),
        ("nvidia", 1, [], "the cluster has no node"),
        ("nvidia", 1, [node()], "no node offers nvidia.com/gpu (available extended resources: none)"),
        (
            "ascend",
            1,
            [node(allocatable={"huawei.com/ascend-1980": "8"})],
            "no node offers huawei.com/Ascend910 (available extended resources: huawei.com/ascend-1980)",
        ),
        ("nvidia", 16, [node(allocatable=GPUS)], "no node has 16 of nvidia.com/gpu; the most on one is 8"),
        (
            "nvidia",
            1,
            [node(allocatable=GPUS, taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}])],
            "every matching node has a taint that the profile does not tolerate (team:NoSchedule)",
        ),
    ],
)
def test_unsatisfiable_pods_are_reported(profile: str, count: int, nodes: list[Node], why: str) -> None:
    assert unsatisfiable(BUILT_IN[profile], count, nodes) == why


def test_a_selector_that_no_node_matches_is_reported() -> None:
    picky = Profile.model_validate({**BUILT_IN["nvidia"].model_dump(), "node_selector": {"pool": "h200"}})
    assert unsatisfiable(picky, 1, [node(allocatable=GPUS)]) == "no node has the labels pool=h200"
    assert unsatisfiable(picky, 1, [node(allocatable=GPUS, labels={"pool": "h200", "zone": "a"})]) == ""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8), ("0", 0), ("500m", Fraction(1, 2)), ("16Gi", 2**34), ("2k", 2000), ("1.5", Fraction(3, 2)),
        ("1e3", 1000),
        ("2E", 2 * 10**18), ("2E3", 2000), ("1Pi", 2**50), ("100n", Fraction(1, 10**7)), ("131992Ki", 131992 * 1024),
    ],
)  # fmt: skip
def test_quantities_are_read_as_kubernetes_writes_them(text: str, value: Fraction) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "many", "5X", "Gi", "1iK"])
def test_an_invalid_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Invalid literal|is not a quantity"):
        quantity(text)
