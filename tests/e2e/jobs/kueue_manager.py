"""Kueue in a cluster, by its own manifests: its manager in a pod with its own rights, its webhooks and definitions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import yaml
from tests.e2e.cluster.client import Cluster, Object
from tests.e2e.cluster.commands import CommandFailed
from tests.e2e.cluster.kit import build_kueue, kueue_folder

SYSTEM = "kueue-system"
DEPLOYMENT, CONFIGURATION = "kueue-controller-manager", "kueue-manager-config"
USER = 65532
"""The user of Kueue's image."""
START_SECONDS = 300.0
"""Its certificates come as a Secret, which the kubelet may bring two minutes later."""
RESTART_SECONDS = 90.0


def manifests(cluster: Cluster, program: str) -> list[Object]:
    """The objects of Kueue's default installation, with the program of this machine in any image.

    Its visibility API is left out, an aggregated one that only people ask.
    """
    text = cluster.kubectl("kustomize", str(kueue_folder() / "config" / "default"))
    objects = [item for item in yaml.safe_load_all(text) if item["kind"] != "APIService"]
    (deployment,) = (item for item in objects if item["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (manager,) = pod["containers"]
    manager |= {"image": cluster.image, "imagePullPolicy": "Never"}
    manager["args"].append("--feature-gates=VisibilityOnDemand=false")
    manager["volumeMounts"].append({"name": "program", "mountPath": manager["command"][0]})
    pod["volumes"].append({"name": "program", "hostPath": {"path": program, "type": "File"}})
    pod["securityContext"]["runAsUser"] = USER
    return objects


@contextmanager
def running_kueue(cluster: Cluster) -> Generator[None]:
    """Kueue, until the end of the block; all its queues and Workloads have to be gone by then."""
    objects = manifests(cluster, str(build_kueue()))
    hooks = [item for item in objects if item["kind"].endswith("WebhookConfiguration")]
    others = [item for item in objects if item not in hooks]
    try:
        cluster.apply([item for item in others if item["kind"] in {"Namespace", "CustomResourceDefinition"}])
        # Webhooks last, since those for pods would refuse all until their server runs.
        cluster.apply([item for item in others if item["kind"] not in {"Namespace", "CustomResourceDefinition"}])
        cluster.apply(hooks)
        cluster.wait_for("deployment", DEPLOYMENT, _is_available, SYSTEM, seconds=START_SECONDS)
        yield
    finally:
        for item in (*hooks, *reversed(others)):
            _delete(cluster, item)


@contextmanager
def fair_sharing(cluster: Cluster) -> Generator[None]:
    """Running Kueue with fair sharing between the queues of a cohort, until the end of the block."""
    before: dict[str, str] = cluster.get("configmap", CONFIGURATION, SYSTEM)["data"]
    ((name, text),) = before.items()
    settings = {"fairSharing": {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]}}
    _configure(cluster, {name: yaml.safe_dump({**yaml.safe_load(text), **settings})})
    try:
        yield
    finally:
        _configure(cluster, before)


def _configure(cluster: Cluster, content: dict[str, str]) -> None:
    """Restarts the manager with another configuration.

    Raises:
        AssertionError: It does not become ready: its log says what is wrong with the configuration.
    """
    cluster.patch("configmap", CONFIGURATION, {"data": content}, SYSTEM)
    place = (f"deployment/{DEPLOYMENT}", f"--namespace={SYSTEM}")
    cluster.kubectl("rollout", "restart", *place)
    try:
        cluster.kubectl("rollout", "status", *place, f"--timeout={RESTART_SECONDS:.0f}s", seconds=RESTART_SECONDS + 10)
    except CommandFailed as error:
        raise AssertionError(f"{error}\n{cluster.describe(SYSTEM)}") from error


def _is_available(deployment: Object) -> bool:
    return deployment.get("status", {}).get("availableReplicas", 0) > 0


def _delete(cluster: Cluster, item: Object) -> None:
    cluster.delete(item["kind"], item["metadata"]["name"], item["metadata"].get("namespace", "default"), wait=False)
