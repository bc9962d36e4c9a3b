"""Metrics of each job, from the objects in the store. Only the leader exports them, so that each is there once. Pure.

Their labels are those by which the series of a job's pods are found, too: `namespace` and `kestrl_dev_job`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.store import Store

Object = Mapping[str, Any]
DEVICE_PARTS: Mapping[Role, str] = {Role.INFERENCE: "inference", Role.LEARNER: "learner", Role.RANKS: "learner"}
"""Part of the spec that says which devices the pods of a role have."""
VALUES = {"True": 1.0, "False": 0.0}


def info(store: Store) -> dict[tuple[str, ...], float]:
    """1 for each job: with its phase, and the reason of its condition Ready."""
    rows: dict[tuple[str, ...], float] = {}
    for key, job in list(store.jobs.items()):
        status = job.get("status", {})
        reasons = {item["type"]: item["reason"] for item in status.get("conditions", ())}
        phase = status.get("shown", {}).get("phase") or "New"
        rows[key.namespace, key.name, phase, reasons.get("Ready", "")] = 1.0
    return rows


def conditions(store: Store) -> dict[tuple[str, ...], float]:
    """1 for each condition that is true, 0 for each that is false; those that are unknown have no series."""
    return {
        (key.namespace, key.name, item["type"]): VALUES[item["status"]]
        for key, job in list(store.jobs.items())
        for item in job.get("status", {}).get("conditions", ())
        if item["status"] in VALUES
    }


def devices(store: Store) -> dict[tuple[str, ...], float]:
    """Devices that each job holds now, by accelerator profile: those of its pods that have a node."""
    rows: Counter[tuple[str, ...]] = Counter()
    for key, job in list(store.jobs.items()):
        for profile, count in _held(store, key, job):
            rows[key.namespace, key.name, profile] += count
    return {labels: float(count) for labels, count in rows.items()}


def _held(store: Store, key: Key, job: Object) -> list[tuple[str, int]]:
    pods = [pod for pod in store.pods(key, job["metadata"]["uid"]) if pod.scheduled and pod.role in DEVICE_PARTS]
    accelerators = {part: _accelerator(job, part) for part in DEVICE_PARTS.values()}
    return [
        accelerators[DEVICE_PARTS[pod.role]]
        for pod in pods
        if pod.phase not in {"Succeeded", "Failed"} and accelerators[DEVICE_PARTS[pod.role]][0] != "cpu"
    ]


def _accelerator(job: Object, part: str) -> tuple[str, int]:
    """Profile and devices of a pod, as the manifest names them."""
    spec: Object = job.get("spec") or {}
    fields: Object = spec.get(part) or {}
    accelerator: Object = fields.get("accelerator") or {}
    return str(accelerator.get("profile", "cpu")), int(accelerator.get("count", 1))
