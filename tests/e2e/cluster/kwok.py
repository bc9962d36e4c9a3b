"""Nodes and pods that exist only in the API, by kwok, for tests with large numbers, such as scheduling and the
operator's speed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .kit import Kit, module_folder
from .layout import Layout

Object = dict[str, Any]
MODULE = "sigs.k8s.io/kwok"
STAGES = (
    "node/fast/node-initialize.yaml",
    "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml",
    "pod/fast/pod-ready.yaml",
    "pod/fast/pod-complete.yaml",
    "pod/fast/pod-delete.yaml",
)
"""The lifecycle of a fake node and its pods. kwok has none built in, and does nothing without one."""
ANNOTATION = "kwok.x-k8s.io/node"
LABELS = {"type": "kwok"}
RESOURCES = {"cpu": "32", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": "8"}


def stages(kit: Kit) -> Path:
    """The file of stages, generated once and kept with the programs."""
    path = kit.folder / "kwok-stages.yaml"
    if not path.exists():
        folder = module_folder(MODULE) / "kustomize" / "stage"
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text("\n---\n".join((folder / name).read_text() for name in STAGES))
        unfinished.rename(path)
    return path


def command_line(layout: Layout, kit: Kit) -> list[str]:
    return [
        kit.program("kwok"),
        f"--kubeconfig={layout.kubeconfig()}",
        f"--config={stages(kit)}",
        "--manage-all-nodes=false",
        f"--manage-nodes-with-annotation-selector={ANNOTATION}=fake",
        "--node-lease-duration-seconds=40",
        "--server-address=127.0.0.1:0",
    ]


def fake_node(index: int, *, tainted: bool) -> Object:
    """A node for kwok. With a taint, only pods meant for it are scheduled there."""
    taints = [{"key": ANNOTATION, "value": "fake", "effect": "NoSchedule"}] if tainted else []
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": f"fake-{index}", "labels": LABELS, "annotations": {ANNOTATION: "fake"}},
        "spec": {"taints": taints},
        "status": {"allocatable": RESOURCES, "capacity": RESOURCES},
    }
