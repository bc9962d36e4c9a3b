"""The declared fields of pods and workloads: a typo in a field is refused, as the API server refuses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

WORKLOAD = {
    "StatefulSet": frozenset(
        {"minReadySeconds", "ordinals", "persistentVolumeClaimRetentionPolicy", "podManagementPolicy", "replicas",
         "revisionHistoryLimit", "selector", "serviceName", "template", "updateStrategy", "volumeClaimTemplates"}
    ),
    "Deployment": frozenset(
        {"minReadySeconds", "paused", "progressDeadlineSeconds", "replicas", "revisionHistoryLimit", "selector",
         "strategy", "template"}
    ),
}  # fmt: skip
POD = frozenset(
    {"activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy",
     "enableServiceLinks", "ephemeralContainers", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostUsers",
     "hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName", "nodeSelector", "os",
     "overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates", "resourceClaims", "resources",
     "restartPolicy", "runtimeClassName", "schedulerName", "schedulingGates", "securityContext", "serviceAccount",
     "serviceAccountName", "setHostnameAsFQDN", "shareProcessNamespace", "subdomain", "terminationGracePeriodSeconds",
     "tolerations", "topologySpreadConstraints", "volumes", "workloadRef"}
)  # fmt: skip
CONTAINER = frozenset(
    {"args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports",
     "readinessProbe", "resizePolicy", "resources", "restartPolicy", "restartPolicyRules", "securityContext",
     "startupProbe", "stdin", "stdinOnce", "terminationMessagePath", "terminationMessagePolicy", "tty", "volumeDevices",
     "volumeMounts", "workingDir"}
)  # fmt: skip


def undeclared(kind: str, given: Mapping[str, Any]) -> Iterator[str]:
    """Paths of fields that a workload's kind does not declare, down to those of containers."""
    if kind not in WORKLOAD:
        return
    spec = _map(given.get("spec"))
    yield from _beyond(".spec", spec, WORKLOAD[kind])
    pod, place = _map(_map(spec.get("template")).get("spec")), ".spec.template.spec"
    yield from _beyond(place, pod, POD)
    for name in ("initContainers", "containers"):
        for item in cast("list[object]", pod.get(name) or []):
            container = _map(item)
            yield from _beyond(f'{place}.{name}[name="{container.get("name")}"]', container, CONTAINER)


def _beyond(place: str, given: Mapping[str, Any], declared: frozenset[str]) -> Iterator[str]:
    yield from (f"{place}.{name}" for name in given if name not in declared)


def _map(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
