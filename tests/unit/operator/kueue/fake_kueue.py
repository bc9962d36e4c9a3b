"""Kueue as its API: the kinds that the operator uses, and the statuses that Kueue's controller writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.fakes.kubernetes import FakeKubernetes
from tests.unit.operator.live.stage import JOB, NAMESPACE, Object

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
NAME = f"{JOB}-agentrljob"
AT = "2026-01-01T00:00:00Z"
ANYTHING: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def definition(kind: str, plural: str, *, namespaced: bool = True) -> Object:
    """A CustomResourceDefinition of Kueue's, without the fields' own checks."""
    schema: Object = {"type": "object", "properties": dict.fromkeys(("spec", "status"), ANYTHING)}
    schema["properties"]["value"] = {"type": "integer"}
    version = {"name": VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced" if namespaced else "Cluster",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{**version, "subresources": {"status": {}}}],
        },
    }


class FakeKueue:
    """Kueue in a fake cluster; a test says what it admits."""

    def __init__(self, cluster: FakeKubernetes, name: str = NAME) -> None:
        self._cluster, self.name = cluster, name
        cluster.create("customresourcedefinitions", definition("Workload", "workloads"))
        cluster.create("customresourcedefinitions", definition("ResourceFlavor", "resourceflavors", namespaced=False))
        classes = definition("WorkloadPriorityClass", "workloadpriorityclasses", namespaced=False)
        cluster.create("customresourcedefinitions", classes)

    def add(self, plural: str, kind: str, name: str, **content: Any) -> None:
        """Adds an object that is not in a namespace."""
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": kind, "metadata": {"name": name}, **content}
        self._cluster.create(plural, body)

    def workload(self) -> Object | None:
        return self._cluster.find("workloads", NAMESPACE, self.name)

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of a condition of the Workload."""
        conditions = (self.workload() or {}).get("status", {}).get("conditions") or ()
        return next(((item["status"], item["reason"]) for item in conditions if item["type"] == kind), ("", ""))

    def pend(self, message: str) -> None:
        """Finds no quota for it."""
        self._write({"conditions": [condition("QuotaReserved", "False", "Pending", message)]})

    def reserve(self, state: str, message: str) -> None:
        """Reserves quota, with an admission check in this state."""
        check = {"name": "provisioned", "state": state, "lastTransitionTime": AT, "message": message}
        granted: Object = {"clusterQueue": "everything", "podSetAssignments": []}
        conditions = [condition("QuotaReserved", "True", "QuotaReserved", "")]
        self._write({"admission": granted, "conditions": conditions, "admissionChecks": [check]})

    def admit(self, flavors: Mapping[str, str] | None = None, *, updates: Sequence[Object] = ()) -> None:
        """Admits it, every pod set with these flavors by resource; an admission check has added these updates."""
        names: Sequence[str] = [pods["name"] for pods in (self.workload() or {})["spec"]["podSets"]]
        assignments = [{"name": name, "flavors": flavors or {"cpu": "default"}} for name in names]
        conditions = [condition(kind, "True", kind, "") for kind in ("QuotaReserved", "Admitted")]
        conditions.append(condition("Evicted", "False", "QuotaReserved", ""))
        granted = {"clusterQueue": "everything", "podSetAssignments": assignments}
        check = {"name": "provisioned", "state": "Ready", "lastTransitionTime": AT, "message": ""}
        checks = [{**check, "podSetUpdates": list(updates)}] if updates else []
        self._write({"admission": granted, "conditions": conditions, "admissionChecks": checks})

    def evict(self, reason: str, message: str) -> None:
        """Takes the quota back; it is free when the operator says so."""
        conditions = [condition(kind, "True", kind, "") for kind in ("QuotaReserved", "Admitted")]
        self._write({"conditions": [*conditions, condition("Evicted", "True", reason, message)]})

    def _write(self, status: Object) -> None:
        self._cluster.edit("workloads", NAMESPACE, self.name, {"status": status}, subresource="status")


def condition(kind: str, status: str, reason: str, message: str) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": AT}
