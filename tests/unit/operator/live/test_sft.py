"""SFTJobs with a real operator against the fake API server: created once, reported, and apart from their namesakes."""

from __future__ import annotations

import asyncio
from typing import Any

from .stage import JOB, NAMESPACE, Stage

RESULT = '{"version": "email-search.4.3f0c", "sha256": "3f0c", "uri": "s3://bucket/runs/x/adapters/000004-3f0c"}'
BATCH = f"{JOB}-sft"


def apply(stage: Stage, name: str = JOB, *, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    plain = {"model": {"base": "demo://tiny"}, "data": {"train": {"uri": "s3://data/train.jsonl"}}}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels or {}}
    return stage.cluster.create(
        "sftjobs",
        {"apiVersion": "kestrl.dev/v1alpha1", "kind": "SFTJob", "metadata": metadata, "spec": {**plain, **spec}},
    )


def condition(stage: Stage, kind: str, name: str = JOB) -> tuple[str, str, str]:
    found = stage.cluster.find("sftjobs", NAMESPACE, name) or {}
    items = {item["type"]: item for item in found.get("status", {}).get("conditions", ())}
    return (items[kind]["status"], items[kind]["reason"], items[kind]["message"]) if kind in items else ("", "", "")


def batch(stage: Stage) -> dict[str, Any] | None:
    return stage.cluster.find("jobs", NAMESPACE, BATCH)


def set_status(stage: Stage, **status: Any) -> None:
    stage.cluster.edit("jobs", NAMESPACE, BATCH, {"status": status}, manager="job-controller", subresource="status")


def pod(stage: Stage, state: dict[str, Any], *, name: str = "pod-1") -> None:
    """A pod of the Job whose program is in this state."""
    made = stage.cluster.get("jobs", NAMESPACE, BATCH)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": BATCH, "uid": made["metadata"]["uid"], "controller": True}
    labels = made["spec"]["template"]["metadata"]["labels"]
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels, "ownerReferences": [owner]}
    containers = [{"name": "sft", "ready": "running" in state, "restartCount": 0, "state": state}]
    stage.cluster.create(
        "pods",
        {"metadata": metadata, "spec": {"nodeName": "node-1"}, "status": {"containerStatuses": containers}},
    )


async def begun(stage: Stage) -> None:
    await stage.until(lambda: batch(stage), "the Job is created")


async def test_a_job_is_created_once_and_reports_the_adapter(stage: Stage) -> None:
    await stage.operator()
    apply(stage)
    await begun(stage)
    pod(stage, {"running": {}})
    set_status(stage, active=1, ready=1)
    await stage.until(lambda: condition(stage, "Ready")[:2] == ("True", "Training"), "it trains")
    stage.cluster.delete("pods", NAMESPACE, "pod-1")
    pod(stage, {"terminated": {"exitCode": 0, "reason": "Completed", "message": RESULT}}, name="pod-2")
    set_status(stage, succeeded=1, ready=0, conditions=[{"type": "Complete", "status": "True"}])
    await stage.until(lambda: condition(stage, "Succeeded")[1] == "Completed", "it has ended")
    status = stage.cluster.get("sftjobs", NAMESPACE, JOB)["status"]
    assert status["result"]["uri"] == "s3://bucket/runs/x/adapters/000004-3f0c"
    stage.cluster.delete("pods", NAMESPACE, "pod-2")
    await stage.settled()
    assert [item["regarding"]["kind"] for item in stage.events("Completed")] == ["SFTJob"]
    assert len([item for item in stage.writes() if item.startswith("create jobs/")]) == 1
    assert stage.cluster.get("sftjobs", NAMESPACE, JOB)["status"] == status, "an ended job stays as it is"


async def test_jobs_of_both_kinds_with_one_name_do_not_meet(stage: Stage) -> None:
    await stage.operator()
    apply(stage)
    stage.job()
    await begun(stage)
    await stage.applied()
    await stage.settled()

    def own() -> list[str]:
        return [child for child in stage.children() if "-sft" not in child]

    before = own()
    assert len(stage.children()) == len(before) + 3
    stage.cluster.delete("sftjobs", NAMESPACE, JOB)
    await stage.until(lambda: batch(stage) is None, "Kubernetes deletes what it owned")
    await stage.settled()
    assert stage.children() == before
    assert stage.condition("Accepted")[:2] == ("True", "Valid")
    apply(stage)
    await begun(stage)
    await stage.settled()
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    await stage.settled()
    assert batch(stage) is not None


async def test_a_wrong_manifest_names_the_field_and_creates_nothing(stage: Stage) -> None:
    await stage.operator()
    apply(stage, learner={"accelerator": {"profile": "abacus"}})
    await stage.until(lambda: condition(stage, "Accepted")[1] == "Invalid", "it is reported")
    assert "spec.learner.accelerator.profile: 'abacus'" in condition(stage, "Accepted")[2]
    await stage.settled()
    assert batch(stage) is None
    assert stage.cluster.find("configmaps", NAMESPACE, f"{JOB}-sftjob") is None


async def test_a_job_of_somebody_else_is_not_taken_over(stage: Stage) -> None:
    metadata = {"name": BATCH, "namespace": NAMESPACE}
    stage.cluster.create("jobs", {"metadata": metadata, "spec": {"template": {"metadata": {}, "spec": {}}}})
    await stage.operator()
    apply(stage)
    await stage.until(lambda: condition(stage, "Accepted")[1] == "Invalid", "it is reported")
    assert f"there is a Job {BATCH} that is not this job's" in condition(stage, "Accepted")[2]
    assert "ownerReferences" not in stage.cluster.get("jobs", NAMESPACE, BATCH)["metadata"]


async def test_a_refused_job_is_reported_and_a_failing_server_waited_for(stage: Stage) -> None:
    stage.cluster.fail("create", "jobs", status=503, times=1)
    stage.cluster.fail("create", "jobs", status=403, message="exceeded quota: count/jobs.batch", times=1)
    await stage.operator()
    apply(stage)
    await stage.until(lambda: condition(stage, "Accepted")[1] == "Invalid", "the refusal is reported")
    assert "exceeded quota: count/jobs.batch" in condition(stage, "Accepted")[2]
    assert batch(stage) is None


async def test_the_next_operator_finds_the_job_and_writes_nothing(stage: Stage) -> None:
    first = await stage.operator("a")
    apply(stage)
    await begun(stage)
    pod(stage, {"running": {}})
    set_status(stage, active=1, ready=1)
    await stage.until(lambda: condition(stage, "Ready")[0] == "True", "it trains")
    await stage.stop(first)
    await stage.operator("b")
    await stage.settled()
    assert [item for item in stage.writes("b") if "lease" not in item] == []


async def test_a_job_that_was_deleted_by_hand_is_created_again(stage: Stage) -> None:
    await stage.operator()
    apply(stage)
    await begun(stage)
    before = stage.cluster.get("jobs", NAMESPACE, BATCH)["metadata"]["uid"]
    stage.cluster.delete("jobs", NAMESPACE, BATCH)
    await stage.until(lambda: (batch(stage) or {"metadata": {"uid": before}})["metadata"]["uid"] != before, "a new one")


async def test_a_late_answer_does_not_bring_a_deleted_job_back(stage: Stage) -> None:
    held = asyncio.Event()
    stage.cluster.fail("create", "jobs", held=held, late=True, times=1)
    operator = await stage.operator()
    apply(stage)
    await begun(stage)
    stage.cluster.delete("jobs", NAMESPACE, BATCH)
    await stage.until(lambda: operator.has_delivered(stage.cluster), "the deletion is delivered before the answer")
    held.set()
    await stage.until(lambda: batch(stage), "a new one")
    await stage.settled()
    assert len([item for item in stage.writes() if item.startswith("create jobs/")]) == 2


async def test_a_late_answer_does_not_bring_a_deleted_sftjob_back(stage: Stage) -> None:
    held = asyncio.Event()
    operator = await stage.operator()
    late = stage.cluster.fail("patch", "sftjobs/status", held=held, late=True, times=1)
    apply(stage)
    await stage.until(lambda: late.hits, "its first status is written")
    stage.cluster.delete("sftjobs", NAMESPACE, JOB)
    await stage.until(lambda: operator.has_delivered(stage.cluster), "the deletion is delivered before the answer")
    held.set()
    await stage.settled()
    assert operator.sft_jobs() == set()


async def test_what_the_streams_missed_is_found_by_the_list(stage: Stage) -> None:
    await stage.operator(audit_seconds=0.2)
    stage.cluster.freeze("sftjobs")
    apply(stage)
    await begun(stage)
