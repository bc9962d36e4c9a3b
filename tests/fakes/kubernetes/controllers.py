"""The controllers behind the API, as far as pods show their work."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

from tests.fakes.kubernetes.fake import FakeKubernetes
from tests.fakes.kubernetes.fields import now
from tests.fakes.kubernetes.resources import Change, Object


class Controllers:
    """The controllers of StatefulSets and Deployments, the scheduler and the kubelets, as far as pods show their work.

    Pods follow their workloads automatically: created, replaced when the template changes, deleted when there are too
    many. A new pod is Pending, unless `started` changes that; its further states are set by the test.
    """

    def __init__(
        self, cluster: FakeKubernetes, *, started: Callable[[Controllers, Object], None] | None = None
    ) -> None:
        """Follows workloads from now on.

        Args:
            cluster: The server.
            started: Called with every new pod, as `lambda controllers, pod: controllers.run(pod)`.
        """
        self._cluster, self._started = cluster, started
        self._addresses = 0
        self._due = False
        cluster.objects.listeners.append(self._seen)

    def _seen(self, change: Change) -> None:
        if change.resource.plural in {"statefulsets", "deployments", "pods"} and not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.sync)

    def stop(self) -> None:
        """Follows no workload any more: pods stay as they are."""
        self._cluster.objects.listeners.remove(self._seen)

    def sync(self) -> None:
        """Creates and deletes pods to match the workloads."""
        self._due = False
        for plural in ("statefulsets", "deployments"):
            for workload in self._cluster.objects.list(self._cluster.objects.resource(plural)):
                self._sync(plural, workload)

    def pods(self, namespace: str, workload: str) -> list[Object]:
        """The pods of a workload by its name, as copies."""
        return copy.deepcopy(self._pods(namespace, workload))

    def _pods(self, namespace: str, workload: str) -> list[Object]:
        objects = self._cluster.objects
        return [
            pod
            for pod in objects.list(objects.resource("pods"), namespace)
            if any(owner["name"] == workload for owner in pod["metadata"].get("ownerReferences", []))
        ]

    def _sync(self, plural: str, workload: Object) -> None:
        metadata, spec = workload["metadata"], workload["spec"]
        namespace, name = metadata["namespace"], metadata["name"]
        mark = hashlib.sha256(json.dumps(spec["template"], sort_keys=True).encode()).hexdigest()[:8]
        prefix = name if plural == "statefulsets" else f"{name}-{mark}"
        wanted = [f"{prefix}-{index}" for index in range(spec.get("replicas", 1))]
        for pod in self._pods(namespace, name):
            fits = pod["metadata"]["name"] in wanted and pod["metadata"]["labels"].get("pod-template-hash") == mark
            if not fits and "deletionTimestamp" not in pod["metadata"]:
                self._cluster.delete("pods", namespace, pod["metadata"]["name"])
        for index, pod_name in enumerate(wanted):
            if self._cluster.find("pods", namespace, pod_name) is None:
                self._make(workload, pod_name, index, mark)
        ready = len([pod for pod in self._pods(namespace, name) if _is_ready(pod)])
        status = {"replicas": len(wanted), "readyReplicas": ready, "observedGeneration": metadata["generation"]}
        self._cluster.edit(
            plural, namespace, name, {"status": status}, manager="kube-controller-manager", subresource="status"
        )

    def _make(self, workload: Object, name: str, index: int, mark: str) -> None:
        template = workload["spec"]["template"]
        labels = {
            **template["metadata"].get("labels", {}),
            "pod-template-hash": mark,
            "apps.kubernetes.io/pod-index": str(index),
        }
        owner = {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": workload["metadata"]["name"],
            "uid": workload["metadata"]["uid"],
            "controller": True,
        }
        pod = self._cluster.create(
            "pods",
            {
                "metadata": {
                    "name": name,
                    "namespace": workload["metadata"]["namespace"],
                    "labels": labels,
                    "annotations": template["metadata"].get("annotations", {}),
                    "ownerReferences": [owner],
                },
                "spec": template["spec"],
                "status": {"phase": "Pending"},
            },
            manager="kube-controller-manager",
        )
        if self._started is not None:
            self._started(self, pod)

    def run(self, pod: Object, *, address: str | None = None, ready: bool = True, fresh: bool = False) -> None:
        """Gives a pod a node and an address, and runs its containers; a fresh one says that it is ready since now."""
        self._addresses += 1
        containers = [
            {"name": item["name"], "ready": ready, "restartCount": 0, "state": {"running": {"startedAt": now()}}}
            for item in pod["spec"]["containers"]
        ]
        self._place(pod)
        self._set_status(
            pod,
            phase="Running",
            podIP=address or f"10.244.0.{self._addresses}",
            containerStatuses=containers,
            initContainerStatuses=[],
            conditions=[
                _condition("PodScheduled"),
                {
                    **_condition("Ready", "True" if ready else "False"),
                    **({"lastTransitionTime": now()} if fresh else {}),
                },
            ],
        )

    def unschedulable(self, pod: Object, message: str) -> None:
        """Marks a pod as unschedulable."""
        condition = _condition("PodScheduled", "False", reason="Unschedulable", message=message)
        self._set_status(pod, phase="Pending", conditions=[condition])

    def image_missing(self, pod: Object, message: str, *, container: str | None = None) -> None:
        """Marks a pod as waiting for an image that cannot be pulled."""
        waiting = {"reason": "ImagePullBackOff", "message": message}
        name = container or pod["spec"]["containers"][0]["name"]
        self._place(pod)
        self._set_status(
            pod,
            phase="Pending",
            conditions=[_condition("PodScheduled"), _condition("Ready", "False")],
            containerStatuses=[{"name": name, "ready": False, "restartCount": 0, "state": {"waiting": waiting}}],
        )

    def init_failed(self, pod: Object, message: str, *, container: str | None = None, code: int = 2) -> None:
        """Ends an init container with a failure and a termination message."""
        name = container or pod["spec"]["initContainers"][0]["name"]
        self._place(pod)
        self._set_status(
            pod,
            phase="Pending",
            conditions=[_condition("PodScheduled"), _condition("Ready", "False")],
            initContainerStatuses=[_ended(name, "Error", code, message, restarts=0)],
        )

    def crashed(
        self,
        pod: Object,
        message: str,
        *,
        container: str | None = None,
        reason: str = "Error",
        code: int = 1,
        restarts: int = 0,
    ) -> None:
        """Ends a container with a failure; the reason is Kubernetes', such as OOMKilled."""
        name = container or pod["spec"]["containers"][0]["name"]
        self._place(pod)
        self._set_status(
            pod,
            phase="Running",
            conditions=[_condition("PodScheduled"), _condition("Ready", "False")],
            containerStatuses=[_ended(name, reason, code, message, restarts=restarts)],
        )

    def gone(self, pod: Object) -> None:
        """Removes a pod that was kept after its deletion, as the kubelet does once its containers have ended."""
        metadata = pod["metadata"]
        self._cluster.objects.remove(self._cluster.objects.resource("pods"), metadata["namespace"], metadata["name"])

    def _place(self, pod: Object) -> None:
        metadata = pod["metadata"]
        changes = {"spec": {"nodeName": "node-1"}}
        self._cluster.edit("pods", metadata["namespace"], metadata["name"], changes, manager="kube-scheduler")

    def _set_status(self, pod: Object, **status: Any) -> None:
        metadata = pod["metadata"]
        self._cluster.edit(
            "pods", metadata["namespace"], metadata["name"], {"status": status}, manager="kubelet", subresource="status"
        )


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _condition(kind: str, status: str = "True", *, reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def _ended(name: str, reason: str, code: int, message: str, *, restarts: int) -> Object:
    last = {"terminated": {"reason": reason, "exitCode": code, "message": message}}
    return {"name": name, "ready": False, "restartCount": restarts, "state": last}
