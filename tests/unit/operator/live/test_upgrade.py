"""An operator of today takes over a job that an older release runs: tests/data/objects_of_cf80a83.json has the objects
that the operator of that commit rendered for the quickstart of its time."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes.kubernetes import Controllers

from .stage import JOB, NAMESPACE, ROOT, FakeLearner, Object, Stage, learner_token, learning, ready, report

OLDER = (ROOT / "tests" / "data" / "objects_of_cf80a83.json").read_text()
IMMUTABLE = ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates")
"""Fields of a StatefulSet that Kubernetes does not let anybody change."""
STEP = 9


@asynccontextmanager
async def older_job(stage: Stage) -> AsyncGenerator[FakeLearner]:
    """A job that trains at a step, with the objects and the status of the older release, and no operator."""
    spec = json.loads(OLDER)["spec"]
    metadata = {"name": JOB, "namespace": NAMESPACE}
    kind = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob"}
    uid = stage.cluster.create("agentrljobs", {**kind, "metadata": metadata, "spec": spec})["metadata"]["uid"]
    status = {"startedAt": "2026-11-26T10:00:00Z", "progress": {"step": STEP, "totalSteps": 26}, "restarts": 0}
    stage.cluster.edit(
        "agentrljobs", NAMESPACE, JOB, {"status": status}, manager="kestrl-operator", subresource="status"
    )
    async with learning(stage, learner_token(uid), report(step=STEP)) as learner:

        def started(controllers: Controllers, pod: Object) -> None:
            ready(controllers, pod)
            if pod["metadata"]["labels"]["kestrl.dev/role"] == "learner":
                controllers.run(pod, address=learner.address)

        Controllers(stage.cluster, started=started)
        for item in json.loads(OLDER.replace("UID-OF-THE-JOB", uid))["objects"]:
            stage.cluster.create(plural(item), item, manager="kestrl-operator")
        await stage.until(lambda: len(stage.cluster.list("pods")) == 6, "its pods run")
        yield learner


def plural(item: Object) -> str:
    name: str = item["kind"].lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def workloads(stage: Stage) -> dict[str, Any]:
    listed = [*stage.cluster.list("statefulsets"), *stage.cluster.list("deployments")]
    return {item["metadata"]["name"]: item for item in listed}


async def test_each_workload_of_an_older_release_is_rolled_once(stage: Stage) -> None:
    async with older_job(stage) as learner:
        before = workloads(stage)
        pods = {pod["metadata"]["uid"] for pod in stage.pods("learner")}
        running = await stage.operator()
        await stage.until(lambda: pods.isdisjoint(pod["metadata"]["uid"] for pod in stage.pods("learner")), "it rolls")
        await stage.until(lambda: stage.phase() == "Running", "it trains on")
        await stage.settled()
        after = workloads(stage)
        assert after.keys() == before.keys()
        for name, item in after.items():
            assert item["metadata"]["generation"] == before[name]["metadata"]["generation"] + 1, name
            assert {key: item["spec"].get(key) for key in IMMUTABLE} == {
                key: before[name]["spec"].get(key) for key in IMMUTABLE
            }, name
        assert learner.drains == 0, "the pod's end is the learner's one drain"
        kept = ("attempts", "restarts", "forgiven", "storage", "learner-state")
        old, new = (each[f"{JOB}-learner"]["metadata"]["annotations"] for each in (before, after))
        assert {name: new[f"kestrl.dev/{name}"] for name in kept} == {name: old[f"kestrl.dev/{name}"] for name in kept}
        status = stage.status()
        assert (status["progress"]["step"], status["restarts"]) == (STEP, 0)
        assert status["startedAt"] == "2026-11-26T10:00:00Z", "its deadlines go on"
        await stage.stop(running)
        status = stage.status()
        await stage.operator("b")
        await stage.settled()
        again = [line for line in stage.writes("b") if not line.split(" ")[1].startswith("leases/")]
        assert again == [], f"{status} before, {[item.body for item in stage.cluster.writes(user='b')]}"
