"""A job in a queue of Kueue: it runs when its Workload is admitted, and gives its quota back by a drain."""

from __future__ import annotations

import pytest
from tests.fakes.kubernetes import Controllers
from tests.unit.operator.live.stage import (
    JOB,
    NAMESPACE,
    Object,
    Stage,
    learner_token,
    learning,
    ready,
    report,
)

from kestrl.errors import UserInputError
from kestrl_operator.apiserver.client import Api
from kestrl_operator.preflight import preflight

from .fake_kueue import FakeKueue

LABELS = {"kueue.x-k8s.io/queue-name": "gpus"}
SHORT = "insufficient unused quota for nvidia.com/gpu in flavor default, 4 more needed"


def queued_job(stage: Stage, **labels: str) -> str:
    """Creates a job in a queue; returns its uid."""
    uid: str = stage.job()["metadata"]["uid"]
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"metadata": {"labels": {**LABELS, **labels}}})
    return uid


def replicas(stage: Stage) -> set[int]:
    """The replica counts of all workloads."""
    workloads = [*stage.cluster.list("statefulsets"), *stage.cluster.list("deployments")]
    return {item["spec"]["replicas"] for item in workloads}


async def test_a_job_runs_when_the_whole_of_it_is_admitted(stage: Stage, kueue: FakeKueue) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    queued_job(stage)
    await stage.operator(kueue=True)
    workload = await stage.until(kueue.workload, "it asks for quota")
    assert workload["spec"]["queueName"] == "gpus"
    pods = {item["name"]: item["count"] for item in workload["spec"]["podSets"]}
    assert pods == {"inference": 2, "rollout": 1, "tools": 1, "judge": 1, "learner": 1}
    await stage.until(lambda: stage.phase() == "Queued", "it waits")
    kueue.pend(SHORT)
    await stage.until(lambda: SHORT in stage.condition("QuotaReserved")[2], "it says for what")
    assert stage.condition("QuotaReserved")[:2] == ("False", "Waiting")
    assert (replicas(stage), stage.cluster.list("pods"), "startedAt" in stage.status()) == ({0}, [], False)
    kueue.admit()
    await stage.until(lambda: stage.condition("QuotaReserved")[:2] == ("True", "Admitted"), "it is admitted")
    await stage.until(lambda: stage.pods("learner"), "its pods are made")
    assert "startedAt" in stage.status()
    labelled = [*stage.cluster.list("statefulsets"), *stage.cluster.list("deployments")]
    assert not any("kueue.x-k8s.io/queue-name" in item["metadata"]["labels"] for item in labelled)
    assert not stage.cluster.get("agentrljobs", NAMESPACE, JOB)["spec"]["suspend"]
    del controllers


async def test_an_evicted_job_drains_and_then_gives_its_quota_back(stage: Stage, kueue: FakeKueue) -> None:
    uid = queued_job(stage)
    async with learning(stage, learner_token(uid), report("training", 5)) as learner:

        def started(controllers: Controllers, pod: Object) -> None:
            ready(controllers, pod)
            if pod["metadata"]["labels"]["kestrl.dev/role"] == "learner":
                controllers.run(pod, address=learner.address)

        controllers = Controllers(stage.cluster, started=started)
        await stage.operator(kueue=True)
        await stage.until(kueue.workload, "it asks for quota")
        kueue.admit()
        await stage.until(lambda: stage.phase() == "Running", "it runs")
        await stage.until(lambda: kueue.condition("PodsReady")[0] == "True", "Kueue knows that it does")
        kueue.evict("Preempted", "for a job of a higher priority")
        await stage.until(lambda: learner.drains, "the learner is asked to drain")
        assert kueue.condition("QuotaReserved")[0] == "True", "the quota is not free yet"
        await stage.until(lambda: stage.condition("QuotaReserved")[1] == "Draining", "it says why")
        assert "higher priority" in stage.condition("QuotaReserved")[2]
        learner.report(report("suspended", step=6, checkpoint_step=6))
        await stage.until(lambda: kueue.condition("QuotaReserved") == ("False", "Pending"), "the quota is given back")
        assert stage.cluster.list("pods") == []
        assert (kueue.condition("Admitted")[0], kueue.condition("Requeued")) == ("False", ("True", "Preempted"))
        assert (kueue.workload() or {})["status"].get("admission") is None
        await stage.until(lambda: stage.phase() == "Queued", "it waits again")
        assert not stage.cluster.get("agentrljobs", NAMESPACE, JOB)["spec"]["suspend"]
        learner.report(report("training", step=6))
        kueue.admit()
        await stage.until(lambda: stage.phase() == "Running", "it goes on")
        learner.report(report("succeeded", step=26))
        await stage.until(lambda: kueue.condition("Finished") == ("True", "Succeeded"), "it needs no quota any more")
        del controllers


async def test_a_suspended_job_asks_for_nothing(stage: Stage, kueue: FakeKueue) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    queued_job(stage)
    await stage.operator(kueue=True)
    await stage.until(kueue.workload, "it asks for quota")
    kueue.admit()
    await stage.until(lambda: stage.pods("tools"), "it runs")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
    await stage.until(lambda: kueue.workload() is None, "it asks for nothing")
    assert stage.cluster.list("pods") == []
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": False}})
    await stage.until(kueue.workload, "it asks again")
    assert kueue.condition("Admitted") == ("", "")
    await stage.until(lambda: stage.phase() == "Queued", "and waits")
    del controllers


async def test_a_job_that_needs_more_than_it_was_given_asks_again(stage: Stage, kueue: FakeKueue) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    queued_job(stage)
    await stage.operator(kueue=True)
    before = (await stage.until(kueue.workload, "it asks for quota"))["metadata"]["uid"]
    kueue.admit()
    await stage.until(lambda: len(stage.pods("inference")) == 2, "it runs")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 3}}})
    await stage.until(lambda: (kueue.workload() or {"metadata": {"uid": before}})["metadata"]["uid"] != before, "anew")
    counts = {item["name"]: item["count"] for item in (kueue.workload() or {})["spec"]["podSets"]}
    assert (counts["rollout"], stage.cluster.list("pods")) == (3, [])
    del controllers


async def test_pods_run_on_the_nodes_that_their_quota_is_for(stage: Stage, kueue: FakeKueue) -> None:
    toleration = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
    spot = {"nodeLabels": {"pool": "spot"}, "tolerations": [toleration]}
    kueue.add("resourceflavors", "ResourceFlavor", "spot", spec=spot)
    controllers = Controllers(stage.cluster, started=ready)
    queued_job(stage)
    await stage.operator(kueue=True)
    await stage.until(kueue.workload, "it asks for quota")
    kueue.admit({"cpu": "spot", "memory": "spot"})
    for pod in await stage.until(lambda: stage.pods("inference"), "its pods are made"):
        assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == ({"pool": "spot"}, [toleration])
    del controllers


async def test_pods_get_all_of_what_several_flavors_and_an_admission_check_say(stage: Stage, kueue: FakeKueue) -> None:
    tolerations = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in ("spot", "gpu", "reserved")]
    for name, labels, toleration in (
        ("spot", {"pool": "spot"}, tolerations[0]),
        ("h100", {"gpu": "h100"}, tolerations[1]),
    ):
        spec = {"nodeLabels": labels, "tolerations": [toleration]}
        kueue.add("resourceflavors", "ResourceFlavor", name, spec=spec)
    request = {"autoscaling.x-k8s.io/consume-provisioning-request": "request-1"}
    update = {
        "name": "inference",
        "labels": {"reservation": "r-1", "kestrl.dev/role": "none of theirs"},
        "annotations": request,
        "nodeSelector": {"node-group": "made-for-it"},
        "tolerations": [tolerations[2]],
    }
    controllers = Controllers(stage.cluster, started=ready)
    queued_job(stage)
    await stage.operator(kueue=True)
    await stage.until(kueue.workload, "it asks for quota")
    kueue.admit({"cpu": "spot", "memory": "spot", "nvidia.com/gpu": "h100"}, updates=[update])
    place = {"pool": "spot", "gpu": "h100"}
    for pod in await stage.until(lambda: stage.pods("inference"), "engines are made"):
        assert pod["spec"]["nodeSelector"] == {**place, "node-group": "made-for-it"}
        assert sorted(item["key"] for item in pod["spec"]["tolerations"]) == ["gpu", "reserved", "spot"]
        assert pod["metadata"]["annotations"].items() >= request.items()
        assert (pod["metadata"]["labels"]["reservation"], pod["metadata"]["labels"]["kestrl.dev/role"]) == (
            "r-1", "inference",
        )  # fmt: skip
    for pod in await stage.until(lambda: stage.pods("learner"), "the learner is made"):
        assert pod["spec"]["nodeSelector"] == place, "the check has added nothing for it"
        assert not request.keys() & pod["metadata"]["annotations"].keys()
    del controllers


async def test_a_job_says_which_admission_check_it_waits_for(stage: Stage, kueue: FakeKueue) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    queued_job(stage)
    await stage.operator(kueue=True)
    await stage.until(kueue.workload, "it asks for quota")
    kueue.reserve("Pending", "two nodes are made")
    await stage.until(lambda: "two nodes are made" in stage.condition("QuotaReserved")[2], "it says for which")
    assert stage.condition("QuotaReserved") == (
        "True", "Checking",
        "ClusterQueue everything has reserved it; admission check provisioned is Pending: two nodes are made",
    )  # fmt: skip
    assert (stage.phase(), stage.cluster.list("pods"), "startedAt" in stage.status()) == ("Queued", [], False)
    assert stage.status()["shown"]["reason"].startswith("Checking: ClusterQueue everything")
    kueue.admit()
    await stage.until(lambda: stage.pods("learner"), "its pods are made")
    del controllers


async def test_its_priority_is_that_of_its_class(stage: Stage, kueue: FakeKueue) -> None:
    queued_job(stage, **{"kueue.x-k8s.io/priority-class": "urgent"})
    await stage.operator(kueue=True)
    await stage.until(lambda: stage.condition("QuotaReserved")[1] == "Refused", "there is no such class")
    assert "there is no WorkloadPriorityClass 'urgent'" in stage.condition("QuotaReserved")[2]
    assert (kueue.workload(), stage.phase()) == (None, "Queued")
    kueue.add("workloadpriorityclasses", "WorkloadPriorityClass", "urgent", value=1000)
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"metadata": {"annotations": {"try": "again"}}})
    spec = (await stage.until(kueue.workload, "it asks for quota"))["spec"]
    reference = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "urgent"}
    assert (spec["priority"], spec["priorityClassRef"]) == (1000, reference)


async def test_a_workload_of_somebody_else_is_left_alone(stage: Stage, kueue: FakeKueue) -> None:
    name = f"{JOB}-agentrljob"
    foreign = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "Workload",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"queueName": "others"},
    }
    stage.cluster.create("workloads", foreign)
    queued_job(stage)
    await stage.operator(kueue=True)
    await stage.until(lambda: stage.condition("QuotaReserved")[1] == "Refused", "it is refused")
    assert f"Workload {NAMESPACE}/{name} is there and is not this job's" in stage.condition("QuotaReserved")[2]
    assert (kueue.workload() or {})["spec"] == {"queueName": "others"}


async def test_a_job_without_a_queue_runs_at_once(stage: Stage, kueue: FakeKueue) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    stage.job()
    await stage.operator(kueue=True)
    await stage.until(lambda: stage.pods("learner"), "it runs")
    assert kueue.workload() is None
    del controllers


async def test_an_operator_that_is_to_use_kueue_needs_it(stage: Stage) -> None:
    stage.patch.setenv("KUBECONFIG", str(stage.cluster.write_kubeconfig(stage.folder)))
    config, api = stage.config(kueue=True), Api()
    try:
        with pytest.raises(UserInputError, match="install Kueue"):
            await preflight(api, config)
    finally:
        await api.close()
