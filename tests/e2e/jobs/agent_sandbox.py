"""The controller of kubernetes-sigs/agent-sandbox, built from its Go module, beside a cluster; and an example of it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.cluster.client import Cluster, Object, has_condition
from tests.e2e.cluster.kit import agent_sandbox_folder, build_agent_sandbox
from tests.fakes.ports import free_port

EXAMPLE = Path(__file__).parents[3] / "examples/sandbox-claims/warm-pool.yaml"
POOL, RUNTIME_CLASS = "code", "kata"
"""Names in the example."""


@contextmanager
def running_agent_sandbox(cluster: Cluster, folder: Path) -> Generator[None]:
    """Its definitions, and its controller until the end of the block.

    Args:
        cluster: The cluster.
        folder: Where the controller's log is written.
    """
    for path in sorted(agent_sandbox_folder().glob("helm/crds/*.yaml")):
        cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))
        name = yaml.safe_load(path.read_text())["metadata"]["name"]
        cluster.wait_for("customresourcedefinition", name, lambda item: has_condition(item, "Established"))
    program = build_agent_sandbox()
    flags = [
        f"--kubeconfig={cluster.kubeconfig}",
        "--extensions",
        "--leader-elect=false",
        "--enable-webhook=false",
        "--manage-webhook-certs=false",
        "--metrics-bind-address=0",
        f"--health-probe-bind-address=127.0.0.1:{free_port()}",
    ]
    with (folder / "log").open("w") as output, subprocess.Popen([program, *flags], stderr=output) as controller:
        try:
            yield
        finally:
            controller.terminate()
            controller.wait(30)


def warm_pool(replicas: int) -> list[Any]:
    """The documents of the example, with a number of sandboxes in the pool."""
    documents = list(yaml.safe_load_all(EXAMPLE.read_text()))
    for item in documents:
        if item["kind"] == "SandboxWarmPool":
            item["spec"]["replicas"] = replicas
    return documents


def runtime_class(handler: str) -> Object:
    """The RuntimeClass that the example names."""
    metadata = {"name": RUNTIME_CLASS}
    return {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": metadata, "handler": handler}


def has_ready(count: int) -> Callable[[Object], bool]:
    """Whether a SandboxWarmPool has this many ready pods."""
    return lambda pool: pool.get("status", {}).get("readyReplicas", 0) >= count
