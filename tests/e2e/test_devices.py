"""Fake accelerators, offered by real device plugins: pods request them and get their environment."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from .cluster.client import Cluster
from .installation import Installation, condition, small

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240), pytest.mark.share]
IDLE = ["python", "-c", "import signal; signal.pause()"]


def idle(*roles: str) -> list[dict[str, Any]]:
    """Patches that keep containers idle: their programs need a real device."""
    named = {"inference": "engine"}
    quiet = {"command": IDLE, "args": [], "startupProbe": None, "readinessProbe": None, "livenessProbe": None}
    return [
        {"role": role, "template": {"spec": {"containers": [{"name": named.get(role, role), **quiet}]}}}
        for role in roles
    ]


@pytest.mark.parametrize(
    ("profile", "resource", "variable"),
    [
        ("nvidia", "nvidia.com/gpu", "NVIDIA_VISIBLE_DEVICES"),
        ("ascend", "huawei.com/Ascend910", "ASCEND_VISIBLE_DEVICES"),
    ],
)
def test_a_profile_asks_for_its_devices_and_gets_them(
    installation: Installation, fake_devices: Cluster, profile: str, resource: str, variable: str
) -> None:
    job = small(
        "devices",
        inference__accelerator={"profile": profile, "count": 2},
        learner__accelerator={"profile": profile, "count": 1},
        patches=idle("inference", "learner"),
    )
    with installation.place("devices") as namespace:
        installation.cluster.apply(job, namespace)
        for name, container, count in (("devices-inference-0", "engine", 2), ("devices-learner-0", "learner", 1)):
            pod = fake_devices.wait_for("pod", name, partial(running, container), namespace, seconds=120)
            spec = next(item for item in pod["spec"]["containers"] if item["name"] == container)
            assert spec["resources"]["limits"][resource] == str(count)
            given = fake_devices.exec(name, "sh", "-c", f"echo ${variable}", namespace=namespace, container=container)
            assert len(given.strip().split(",")) == count, given
        tools = installation.cluster.list("pods", namespace, "kestrl.dev/role=tools")[0]
        variables = {item["name"]: item.get("value") for item in tools["spec"]["containers"][0]["env"]}
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "void", "a pod that asks for no device sees none"


def running(container: str, pod: dict[str, Any]) -> bool:
    statuses = pod["status"].get("containerStatuses", ())
    return any(item["name"] == container and "running" in item["state"] for item in statuses)


def test_a_profile_that_no_node_can_satisfy_is_reported(installation: Installation, fake_devices: Cluster) -> None:
    job = small("greedy", inference__accelerator={"profile": "nvidia", "count": 64})
    with installation.place("devices") as namespace:
        installation.cluster.apply(job, namespace)
        message = "spec.inference.accelerator (profile nvidia): no node has 64 of nvidia.com/gpu"
        seen = fake_devices.wait_for(
            "agentrljob", "greedy", lambda found: message in condition(found, "Scheduled")[2], namespace, seconds=120
        )
        assert condition(seen, "Scheduled")[:2] == ("False", "Unsatisfiable")
