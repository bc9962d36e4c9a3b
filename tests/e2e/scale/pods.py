"""The running pods of jobs, where no controller, scheduler or kubelet makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from kestrl_operator.apiserver.client import MERGE, UNREAD, Api
from kestrl_operator.apiserver.kinds import DEPLOYMENT, POD, STATEFUL_SET, Kind, resource

Object = dict[str, Any]
AT_ONCE = 16


async def run_pods(api: Api, namespace: str, learners: Mapping[str, str]) -> None:
    """Creates the pods of all workloads of a namespace, running and ready.

    Args:
        api: The API server.
        namespace: The namespace.
        learners: Address of the learner's pod by job.
    """
    places = asyncio.Semaphore(AT_ONCE)

    async def run(pod: Object) -> None:
        labels = pod["metadata"]["labels"]
        address = learners[labels["kestrl.dev/job"]] if labels["kestrl.dev/role"] == "learner" else "10.0.0.1"
        async with places:
            created = await api.create(POD, pod)
            await _write_status(api, created, _running(created, address))

    kinds = (STATEFUL_SET, DEPLOYMENT)
    label = "app.kubernetes.io/managed-by=kestrl-operator"
    workloads = [(kind, item) for kind in kinds async for item in api.list(kind, namespace, labels=label)]
    await asyncio.gather(*(run(pod) for kind, item in workloads for pod in _pods(kind, item)))


def _pods(kind: Kind, workload: Object) -> Iterator[Object]:
    template, metadata = workload["spec"]["template"], workload["metadata"]
    name, uid = metadata["name"], metadata["uid"]
    owner = (kind.name, uid) if kind == STATEFUL_SET else ("ReplicaSet", f"{uid}-0")
    for index in range(workload["spec"]["replicas"]):
        labels = {**template["metadata"]["labels"], "apps.kubernetes.io/pod-index": str(index)}
        reference = {"apiVersion": "apps/v1", "kind": owner[0], "name": name, "uid": owner[1], "controller": True}
        claims = [
            {"name": claim["metadata"]["name"], "emptyDir": {}}
            for claim in workload["spec"].get("volumeClaimTemplates", ())
        ]
        spec = template["spec"]
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{index}",
                "namespace": metadata["namespace"],
                "labels": labels,
                "annotations": template["metadata"].get("annotations", {}),
                "ownerReferences": [reference],
            },
            "spec": {**spec, "nodeName": "node", "volumes": [*spec.get("volumes", ()), *claims]},
        }


def _running(pod: Object, address: str) -> Object:
    since = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    containers = [
        {
            "name": item["name"],
            "image": item["image"],
            "imageID": "",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": since}},
        }
        for item in pod["spec"]["containers"]
    ]
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": since}
        for kind in ("PodScheduled", "Initialized", "Ready")
    ]
    return {"phase": "Running", "podIP": address, "conditions": conditions, "containerStatuses": containers}


async def _write_status(api: Api, pod: Object, status: Object) -> None:
    client, metadata = await api._connected(), pod["metadata"]
    answer = await client.patch(
        resource(POD).status, {"status": status}, metadata["name"], metadata["namespace"], content_type=MERGE, **UNREAD
    )
    await answer.read()
