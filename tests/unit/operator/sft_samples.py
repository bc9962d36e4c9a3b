"""An SFTJob, its Job and its pods, as tests need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.unit.operator.rendering import VALUES

from kestrl_operator.controllers.sft_manifests import NO_LABELS, SFTManifests
from kestrl_operator.render.pods import Object
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.jobs import Key

NAME, NAMESPACE, UID = "warm-up", "team-a", "5f000000-0000-4000-8000-000000000001"
RESULT = '{"version": "warm-up.40.3f0c", "sha256": "3f0c", "uri": "s3://bucket/warm-up-5f000000/adapters/000040-3f0c"}'


HELD = '{"metadata": {}, "spec": {}}'
"""What a Job remembers that the operator holds for quota."""


def sft_job(**spec: Any) -> Object:
    """The object of an SFTJob, with changed fields of its spec."""
    plain: Object = {
        "model": {"base": "hf://org/model", "adapter": {"rank": 16, "alpha": 32}},
        "data": {"train": {"uri": "s3://data/train.parquet"}, "validation": {"uri": "pvc://sets/held-out.jsonl"}},
    }
    return {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "SFTJob",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "uid": UID},
        "spec": {**plain, **spec},
    }


def sft_rendered(
    values: Object | None = None, *, begun_in: str = "", labels: Mapping[str, str] = NO_LABELS, **spec: Any
) -> list[Object]:
    """The objects of an SFTJob on a cluster with a default storage."""
    given = {**VALUES, "storage": {"uri": "s3://bucket", "secret": "bucket-key"}, **(values or {})}
    manifests, key = SFTManifests(read_cluster(given)), Key(NAMESPACE, NAME)
    return manifests.objects(key, UID, manifests.read(key, sft_job(**spec)), labels=labels, storage=begun_in)


def container_state(name: str, state: Object) -> Object:
    return {"name": name, "ready": "running" in state, "restartCount": 0, "state": state}


def ended_with(code: int, message: str = "", reason: str = "Error") -> Object:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def sft_pod(*statuses: Object, node: str = "node-1", made: str = "2026-01-01T00:00:00Z", **status: Any) -> Object:
    """A pod: the states of its containers, the init container's first."""
    return {
        "metadata": {"name": f"{NAME}-sft-{made[14:16]}", "creationTimestamp": made},
        "spec": {"nodeName": node} if node else {},
        "status": {
            "initContainerStatuses": list(statuses[:1]),
            "containerStatuses": list(statuses[1:]),
            **status,
        },
    }


def batch_job(
    outcome: str = "", reason: str = "", *, queue: str = "", suspend: bool = False, held: bool = False, **status: Any
) -> Object:
    """The Job of the SFTJob, ended with this condition, in a queue and suspended or not, by Kueue or by the operator,
    which remembers its PodTemplate.
    """
    ended = {"type": outcome, "status": "True", "reason": reason, "message": "as Kubernetes says"}
    conditions = [{**ended, "lastTransitionTime": "2026-01-01T01:00:00Z"}] if outcome else []
    return {
        "metadata": {
            "name": f"{NAME}-sft",
            "uid": "b-1",
            "labels": {"kueue.x-k8s.io/queue-name": queue} if queue else {},
            "annotations": {"kestrl.dev/storage": "s3://first", "kestrl.dev/unplaced": HELD if held else ""},
        },
        "spec": {"suspend": suspend},
        "status": {"startTime": "2026-01-01T00:00:00Z", "conditions": conditions, **status},
    }
