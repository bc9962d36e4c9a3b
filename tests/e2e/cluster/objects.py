"""The objects of a fresh cluster: the checkout in its pods, and volumes for claims.

A mutating admission policy mounts the checkout, its virtual environment and the engine's, read-only and at their own
paths, into every pod of a labelled namespace, so that chart and operator under test need not know about it. Pod
Security "restricted" forbids such volumes: these namespaces do not enforce it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .layout import Layout

Object = dict[str, Any]
LABEL = "kestrl.dev/e2e"
"""The label of namespaces whose pods have the checkout mounted: "true"."""
NAMESPACE = "e2e"
"""A namespace with the label that exists from the beginning."""
STORAGE_CLASS = "e2e"
VOLUMES = 24
"""Number of claims that can be bound at a time; `Cluster.renew_volumes` makes used volumes available again."""
VOLUME_SIZE = "1Gi"


def mounted(layout: Layout) -> list[Path]:
    """Folders of the host that pods see."""
    environments = (layout.environment, layout.engine)
    return [layout.checkout, *(path for path in environments if not path.is_relative_to(layout.checkout))]


def injection(layout: Layout, *further: Path) -> list[Object]:
    """The policy that mounts the checkout and further folders, and its binding."""
    name = "mount-checkout"
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    folders = dict.fromkeys([*mounted(layout), *further])
    mutation = {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": _expression(list(folders))}}
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {
                "namespaceSelector": {"matchLabels": {LABEL: "true"}},
                "resourceRules": [pods],
            },
            "mutations": [mutation],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name},
    }
    return [policy, binding]


def volume_name(index: int) -> str:
    return f"checkout-{index}"


def _expression(folders: list[Path]) -> str:
    """The policy in CEL: the volumes, and their mounts in every container and init container."""
    quoted = {volume_name(index): json.dumps(str(folder)) for index, folder in enumerate(folders)}
    volumes = ", ".join(
        f'Object.spec.volumes{{name: "{name}", '
        f'hostPath: Object.spec.volumes.hostPath{{path: {path}, type: "Directory"}}}}'
        for name, path in quoted.items()
    )

    def containers(kind: str) -> str:
        mounts = ", ".join(
            f'Object.spec.{kind}.volumeMounts{{name: "{name}", mountPath: {path}, readOnly: true}}'
            for name, path in quoted.items()
        )
        each = f"Object.spec.{kind}{{name: container.name, volumeMounts: [{mounts}]}}"
        return f"has(object.spec.{kind}) ? object.spec.{kind}.map(container, {each}) : []"

    parts = [f"{kind}: {containers(kind)}" for kind in ("containers", "initContainers")]
    return f"Object{{spec: Object.spec{{volumes: [{volumes}], {', '.join(parts)}}}}}"


def probe(namespace: str) -> Object:
    """A pod for dry runs."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {"containers": [{"name": "probe", "image": "probe"}]},
    }


def storage_class() -> Object:
    """The default class, bound by the scheduler to existing volumes."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
        "reclaimPolicy": "Retain",
    }


def volumes(layout: Layout) -> list[Object]:
    return [volume(layout, f"volume-{index}") for index in range(VOLUMES)]


def volume(layout: Layout, name: str) -> Object:
    """A volume, and an empty folder for it.

    Any user may write there: Kubernetes does not give a hostPath to a pod's group.
    """
    folder = layout.volumes / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": STORAGE_CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
