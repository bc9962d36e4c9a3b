"""An SFTJob in a queue of Kueue: its pod runs when its Workload is admitted, its quota is free when that has ended."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.live.stage import JOB, NAMESPACE, Object, Stage
from tests.unit.operator.live.test_sft import BATCH, RESULT, apply, batch, begun, condition, pod, set_status

from .fake_kueue import GROUP, FakeKueue

LABELS = {f"{GROUP}/queue-name": "gpus"}
CLASS = f"{GROUP}/priority-class"
SHORT = "insufficient unused quota for pods in flavor default, 1 more needed"
SPOT = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}


@pytest.fixture
def sft(stage: Stage) -> FakeKueue:
    """Kueue, which answers the Workload of the SFTJob."""
    kueue = FakeKueue(stage.cluster, f"{JOB}-sftjob")
    kueue.add("resourceflavors", "ResourceFlavor", "default", spec={})
    kueue.add("resourceflavors", "ResourceFlavor", "spot", spec={"nodeLabels": {"pool": "spot"}, "tolerations": [SPOT]})
    return kueue


def queued(stage: Stage, **labels: str) -> Object:
    """Creates an SFTJob in a queue."""
    return apply(stage, labels={**LABELS, **labels})


def job_spec(stage: Stage) -> Object:
    spec: Object = (batch(stage) or {})["spec"]
    return spec


def notice(stage: Stage, *, suspended: bool, **status: Any) -> None:
    """Has Kubernetes notice that the Job is suspended or resumed."""
    text, reason = ("True", "JobSuspended") if suspended else ("False", "JobResumed")
    started = {} if suspended else {"startTime": "2026-01-01T00:00:00Z"}
    set_status(stage, conditions=[{"type": "Suspended", "status": text, "reason": reason}], **started, **status)


async def running(stage: Stage, kueue: FakeKueue, flavors: dict[str, str] | None = None) -> None:
    """Has the SFTJob admitted, and its pod run."""
    await begun(stage)
    notice(stage, suspended=True)
    await stage.until(kueue.workload, "it asks for quota")
    kueue.admit(flavors)
    await stage.until(lambda: not job_spec(stage)["suspend"], "its Job is resumed")
    pod(stage, {"running": {}})
    notice(stage, suspended=False, ready=1)
    await stage.until(lambda: condition(stage, "Ready")[0] == "True", "it trains")


async def drained(stage: Stage) -> None:
    """Has the Job suspended, and its pod end."""
    await stage.until(lambda: job_spec(stage).get("suspend"), "its Job is suspended")
    stage.cluster.delete("pods", NAMESPACE, "pod-1")
    notice(stage, suspended=True, ready=0)


def phase(stage: Stage) -> str:
    name: str = stage.cluster.get("sftjobs", NAMESPACE, JOB)["status"]["shown"]["phase"]
    return name


async def test_it_waits_without_a_pod_until_it_is_admitted(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage)
    await begun(stage)
    assert job_spec(stage)["suspend"]
    assert not LABELS.keys() & (batch(stage) or {})["metadata"]["labels"].keys(), "Kueue leaves the Job alone"
    workload = await stage.until(sft.workload, "it asks for quota")
    (pod_set,) = workload["spec"]["podSets"]
    assert (workload["spec"]["queueName"], pod_set["name"], pod_set["count"]) == ("gpus", "sft", 1)
    assert [item["name"] for item in pod_set["template"]["spec"]["containers"]] == ["sft"]
    notice(stage, suspended=True)
    sft.pend(SHORT)
    await stage.until(lambda: SHORT in condition(stage, "QuotaReserved")[2], "it waits, and says for what")
    assert condition(stage, "QuotaReserved")[:2] == ("False", "Waiting")
    assert (condition(stage, "Scheduled")[:2], phase(stage)) == (("False", "Released"), "Queued")
    sft.reserve("Pending", "a node is made")
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Checking", "an admission check is not done")
    assert job_spec(stage)["suspend"]
    await running(stage, sft)
    assert condition(stage, "QuotaReserved") == ("True", "Admitted", "by ClusterQueue everything")
    await stage.until(lambda: sft.condition("PodsReady")[0] == "True", "Kueue knows that it runs")


async def test_its_quota_is_given_back_when_its_pod_has_ended(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage)
    await running(stage, sft, {"cpu": "spot"})
    placed = job_spec(stage)["template"]["spec"]
    assert (placed["nodeSelector"], placed["tolerations"]) == ({"pool": "spot"}, [SPOT])

    sft.evict("Preempted", "for an urgent job")
    await stage.until(lambda: job_spec(stage).get("suspend"), "its pod is to end")
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Draining", "it ends")
    assert "Preempted: for an urgent job" in condition(stage, "QuotaReserved")[2]
    notice(stage, suspended=True, ready=0)
    await stage.settled()
    assert sft.condition("QuotaReserved")[0] == "True", "the pod is there, which Kubernetes knows to be ending"
    stage.cluster.delete("pods", NAMESPACE, "pod-1")
    notice(stage, suspended=True, ready=0, terminating=0)
    await stage.until(lambda: sft.condition("QuotaReserved") == ("False", "Pending"), "the quota is given back")
    await stage.until(lambda: phase(stage) == "Queued", "it waits again")
    assert sft.condition("Requeued") == ("True", "Preempted")

    # The next admission is for other nodes; the Job, with its number of failures, stays the same.
    uid = (batch(stage) or {})["metadata"]["uid"]
    sft.admit()
    await stage.until(lambda: not job_spec(stage)["suspend"], "its Job is resumed")
    spec = job_spec(stage)["template"]["spec"]
    assert (spec.get("nodeSelector") or {}, "tolerations" in spec) == ({}, False)
    pod(stage, {"terminated": {"exitCode": 0, "reason": "Completed", "message": RESULT}}, name="pod-2")
    set_status(stage, succeeded=1, conditions=[{"type": "Complete", "status": "True"}])
    await stage.until(lambda: condition(stage, "Succeeded")[1] == "Completed", "it has ended")
    await stage.settled()
    assert sft.condition("Finished")[0] == "", "the pod is there, of which the kubelet has not said that it has ended"
    ended = {"status": {"phase": "Succeeded"}}
    stage.cluster.edit("pods", NAMESPACE, "pod-2", ended, subresource="status")
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"annotations": {"look": "again"}}})
    await stage.until(lambda: sft.condition("Finished") == ("True", "Succeeded"), "it needs no quota any more")
    assert (batch(stage) or {})["metadata"]["uid"] == uid


async def test_quota_is_kept_until_kubernetes_has_noticed_that_no_pod_is_to_be_made(
    stage: Stage, sft: FakeKueue
) -> None:
    await stage.operator(kueue=True)
    queued(stage)
    await running(stage, sft)
    stage.cluster.delete("pods", NAMESPACE, "pod-1")
    sft.evict("Preempted", "for an urgent job")
    await stage.until(lambda: job_spec(stage).get("suspend"), "its Job is suspended")
    await stage.settled()
    assert sft.condition("QuotaReserved")[0] == "True"
    notice(stage, suspended=True, ready=0)
    await stage.until(lambda: sft.condition("QuotaReserved")[0] == "False", "the quota is given back")


async def test_a_priority_class_that_does_not_exist_is_refused(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage, **{CLASS: "urgent"})
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Refused", "there is no such class")
    assert "there is no WorkloadPriorityClass 'urgent'" in condition(stage, "QuotaReserved")[2]
    sft.add("workloadpriorityclasses", "WorkloadPriorityClass", "urgent", value=1000)
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"annotations": {"try": "again"}}})
    spec = (await stage.until(sft.workload, "it asks for quota"))["spec"]
    assert (spec["priority"], spec["priorityClassRef"]["name"]) == (1000, "urgent")


async def test_a_deactivated_workload_says_how_it_queues_again(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage)
    await running(stage, sft)
    stage.cluster.edit("workloads", NAMESPACE, sft.name, {"spec": {"active": False}})
    sft.evict("DeactivatedDueToAdmissionCheck", "no such node")
    await drained(stage)
    await stage.until(lambda: sft.condition("Requeued") == ("False", "Deactivated"), "it can be activated")
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Inactive", "it says why")
    assert condition(stage, "QuotaReserved")[2] == f"no such node: set spec.active of Workload {sft.name} to true"


async def test_it_follows_its_label_to_another_queue_and_to_none(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage)
    await running(stage, sft, {"cpu": "spot"})
    before = (sft.workload() or {})["metadata"]["uid"]
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"labels": {f"{GROUP}/queue-name": "others"}}})
    await drained(stage)
    await stage.until(lambda: (sft.workload() or {"metadata": {"uid": before}})["metadata"]["uid"] != before, "anew")
    assert (sft.workload() or {})["spec"]["queueName"] == "others"
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"labels": {f"{GROUP}/queue-name": None}}})
    await stage.until(lambda: sft.workload() is None, "it asks for nothing")
    await stage.until(lambda: not job_spec(stage)["suspend"], "and runs")
    assert (job_spec(stage)["template"]["spec"].get("nodeSelector") or {}) == {}, "anywhere"


async def test_a_running_job_that_gets_a_label_asks_for_quota_first(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True)
    apply(stage)
    await begun(stage)
    pod(stage, {"running": {}})
    notice(stage, suspended=False, ready=1)
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"labels": LABELS}})
    await drained(stage)
    await stage.until(sft.workload, "it asks for quota")
    sft.admit({"cpu": "spot"})
    await stage.until(lambda: not job_spec(stage)["suspend"], "it goes on")
    assert job_spec(stage)["template"]["spec"]["nodeSelector"] == {"pool": "spot"}


async def test_jobs_of_both_kinds_with_one_name_ask_by_themselves(stage: Stage, sft: FakeKueue) -> None:
    await stage.operator(kueue=True, audit_seconds=0.2)
    queued(stage)
    stage.job()
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"metadata": {"labels": LABELS}})
    await stage.until(lambda: len(stage.cluster.list("workloads")) == 2, "both ask")
    await stage.settled()
    stage.cluster.delete("sftjobs", NAMESPACE, JOB)
    await stage.until(lambda: sft.workload() is None, "Kubernetes deletes what it owned")
    await stage.settled()
    assert [item["metadata"]["name"] for item in stage.cluster.list("workloads")] == [f"{JOB}-agentrljob"]


async def test_a_job_that_began_in_kueues_own_integration_stays_there(stage: Stage, sft: FakeKueue) -> None:
    """As of an operator before it wrote Workloads for SFTJobs, or one without `kueue.enabled`."""
    before = await stage.operator("a")
    queued(stage)
    await begun(stage)
    assert (batch(stage) or {})["metadata"]["labels"].items() >= LABELS.items()
    assert "suspend" not in job_spec(stage), "Kueue's webhook decides that"
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"spec": {"suspend": True}}, manager="kueue")
    notice(stage, suspended=True)
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Waiting", "it waits")
    assert (batch(stage) or {})["metadata"]["uid"] in condition(stage, "QuotaReserved")[2], "where Kueue's answer is"
    await stage.stop(before)

    await stage.operator("b", kueue=True)
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"spec": {"suspend": False}}, manager="kueue")
    pod(stage, {"running": {}})
    notice(stage, suspended=False, ready=1)
    await stage.until(lambda: condition(stage, "QuotaReserved") == ("True", "Admitted", "by queue gpus"), "admitted")
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"spec": {"suspend": True}}, manager="kueue")
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Draining", "it is preempted")
    await stage.settled()
    assert (sft.workload(), job_spec(stage)["suspend"]) == (None, True), "it is counted once, by Kueue's own Workload"
    assert not any("jobs/" in write for write in stage.writes("b") if "sftjobs" not in write)
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"spec": {"suspend": False}}, manager="kueue")
    pod(stage, {"terminated": {"exitCode": 0, "reason": "Completed", "message": RESULT}}, name="pod-2")
    set_status(stage, succeeded=1, conditions=[{"type": "Complete", "status": "True"}])
    await stage.until(lambda: condition(stage, "Succeeded")[1] == "Completed", "it ends as it would have")


async def test_a_held_job_says_so_to_an_operator_without_kueue(stage: Stage, sft: FakeKueue) -> None:
    before = await stage.operator("a", kueue=True)
    queued(stage)
    await begun(stage)
    notice(stage, suspended=True)
    await stage.until(sft.workload, "it asks for quota")
    await stage.stop(before)
    await stage.operator("b")
    await stage.until(lambda: "kueue.enabled" in condition(stage, "QuotaReserved")[2], "it says what is missing")
    assert condition(stage, "QuotaReserved")[:2] == ("False", "Waiting")


async def test_a_label_that_is_added_later_is_no_silent_wish(stage: Stage) -> None:
    await stage.operator()
    apply(stage)
    await begun(stage)
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"labels": LABELS}})
    await stage.until(lambda: "counts for a new SFTJob only" in condition(stage, "QuotaReserved")[2], "it is said")
