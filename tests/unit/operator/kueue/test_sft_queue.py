"""An SFTJob in a queue of Kueue, whose own integration of Jobs suspends and resumes the Job that it becomes."""

from __future__ import annotations

from typing import Any

from tests.unit.operator.live.stage import JOB, NAMESPACE, Object, Stage
from tests.unit.operator.live.test_sft import BATCH, apply, batch, begun, condition, pod

from .fake_kueue import GROUP, VERSION, FakeKueue
from .fake_kueue import condition as workload_condition

LABELS = {f"{GROUP}/queue-name": "gpus"}
SHORT = "insufficient unused quota for pods in flavor default, 1 more needed"
WORKLOAD = f"job-{BATCH}-1"


def queued(stage: Stage, **labels: str) -> None:
    """Creates an SFTJob in a queue."""
    apply(stage, labels={**LABELS, **labels})


def suspend(stage: Stage, *, suspended: bool, **status: Any) -> None:
    """Suspends or resumes the Job, as Kueue does, with the status that Kubernetes gives it."""
    text, reason = ("True", "JobSuspended") if suspended else ("False", "JobResumed")
    conditions = [{"type": "Suspended", "status": text, "reason": reason}]
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"spec": {"suspend": suspended}}, manager="kueue")
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"status": {"conditions": conditions, **status}}, subresource="status")


def answer(stage: Stage, *conditions: Object) -> None:
    """Makes Kueue's Workload for the Job, with conditions."""
    uid = stage.cluster.get("jobs", NAMESPACE, BATCH)["metadata"]["uid"]
    metadata = {"name": WORKLOAD, "namespace": NAMESPACE, "labels": {f"{GROUP}/job-uid": uid}}
    if stage.cluster.find("workloads", NAMESPACE, WORKLOAD) is None:
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "Workload", "metadata": metadata, "spec": {}}
        stage.cluster.create("workloads", body)
    status = {"status": {"conditions": list(conditions)}}
    stage.cluster.edit("workloads", NAMESPACE, WORKLOAD, status, subresource="status")


async def test_kueue_holds_admits_and_preempts_the_job_of_an_sftjob(stage: Stage, kueue: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage)
    await begun(stage)
    assert (batch(stage) or {})["metadata"]["labels"].items() >= LABELS.items()
    assert "suspend" not in (batch(stage) or {})["spec"], "Kueue's webhook decides that"
    answer(stage, workload_condition("QuotaReserved", "False", "Pending", SHORT))
    suspend(stage, suspended=True)
    await stage.until(lambda: SHORT in condition(stage, "QuotaReserved")[2], "it waits, and says for what")
    assert condition(stage, "QuotaReserved")[:2] == ("False", "Waiting")
    assert condition(stage, "Scheduled")[:2] == ("False", "Released")
    assert stage.cluster.get("sftjobs", NAMESPACE, JOB)["status"]["shown"]["phase"] == "Queued"

    pod(stage, {"running": {}})
    suspend(stage, suspended=False, ready=1)
    await stage.until(lambda: condition(stage, "Ready")[0] == "True", "it trains")
    assert condition(stage, "QuotaReserved") == ("True", "Admitted", "by queue gpus")

    answer(stage, workload_condition("Evicted", "True", "Preempted", "for an urgent job"))
    suspend(stage, suspended=True, ready=1)
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Draining", "the pod ends")
    assert "Preempted: for an urgent job" in condition(stage, "QuotaReserved")[2]
    stage.cluster.delete("pods", NAMESPACE, "pod-1")
    suspend(stage, suspended=True, ready=0)
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Waiting", "it waits again")
    await stage.settled()
    changes = [item for item in stage.writes() if " jobs/" in item]
    assert changes == ["create jobs/"], "admission is in the Job, which the operator does not change"


async def test_a_priority_class_that_does_not_exist_is_refused(stage: Stage, kueue: FakeKueue) -> None:
    await stage.operator(kueue=True)
    queued(stage, **{f"{GROUP}/priority-class": "urgent"})
    await begun(stage)
    suspend(stage, suspended=True)
    await stage.until(lambda: condition(stage, "QuotaReserved")[1] == "Refused", "Kueue makes no Workload")
    assert "there is no WorkloadPriorityClass 'urgent'" in condition(stage, "QuotaReserved")[2]


async def test_without_rights_on_workloads_it_says_where_the_answer_is(stage: Stage) -> None:
    await stage.operator()
    queued(stage)
    await begun(stage)
    suspend(stage, suspended=True)
    uid = (batch(stage) or {})["metadata"]["uid"]
    await stage.until(lambda: uid in condition(stage, "QuotaReserved")[2], "it names the Workload's label")
    assert condition(stage, "QuotaReserved")[:2] == ("False", "Waiting")


async def test_a_label_that_is_added_later_is_no_silent_wish(stage: Stage) -> None:
    await stage.operator()
    apply(stage)
    await begun(stage)
    stage.cluster.edit("sftjobs", NAMESPACE, JOB, {"metadata": {"labels": LABELS}})
    await stage.until(lambda: "counts for a new SFTJob only" in condition(stage, "QuotaReserved")[2], "it is said")
