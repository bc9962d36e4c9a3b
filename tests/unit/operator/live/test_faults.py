"""An API server that fails, refuses, is slow or loses answers: everything is done in the end, at a bounded rate of
calls."""

from __future__ import annotations

import asyncio
from math import log2
from typing import Any

import pytest
from tests.fakes.kubernetes import Controllers

from kestrl._shared.backoff import Backoff
from kestrl_operator.apiserver import client as api_module
from kestrl_operator.apiserver.client import Api, ApiProblem
from kestrl_operator.apiserver.kinds import JOB as JOB_KIND
from kestrl_operator.controllers import applier, manifests, missing_pods, workers
from kestrl_operator.state.jobs import Key
from kestrl_operator.work import workqueue

from .stage import CHILDREN, JOB, NAMESPACE, UNSEEN, WORKLOADS, Stage, ready

OBJECTS = (*CHILDREN, *WORKLOADS)


def applies(stage: Stage) -> int:
    return len([item for item in stage.cluster.writes() if item.resource in OBJECTS and item.verb == "patch"])


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 409},
        {"status": 429, "retry_after": 1.0},
        {"status": 500},
        {"status": 503},
        {"status": 500, "late": True},
        {"drop": True},
    ],
    ids=["conflict", "too many requests", "error", "unavailable", "done but answered with an error", "cut"],
)
async def test_failed_calls_are_retried_until_they_succeed(stage: Stage, fault: dict[str, Any]) -> None:
    await stage.operator()
    troubles = [
        stage.cluster.fail("patch", resource, times=1, **fault)
        for resource in ("secrets", "statefulsets", "agentrljobs/status")
    ]
    stage.job()
    await stage.applied()
    await stage.settled()
    await stage.until(lambda: stage.condition("Ready")[1] == "NotReady", "it is reported")
    assert all(trouble.hits for trouble in troubles)
    assert stage.condition("Accepted")[:2] == ("True", "Valid")
    assert len({item.partition("/")[0] for item in stage.children()}) == len(OBJECTS)
    # Three passes failed.
    assert applies(stage) <= 4 * len(stage.children())


async def test_failures_are_retried_with_backoff(stage: Stage) -> None:
    await stage.operator()
    trouble = stage.cluster.fail("patch", "agentrljobs/status", status=503)
    stage.job()
    await stage.until(lambda: trouble.hits >= 6, "it has failed several times")
    trouble.end()
    first, *_, last = [item.at for item in stage.cluster.requests("patch", "agentrljobs/status")][:6]
    # 0.1, 0.2, 0.4 s between two passes; from the third on, a pass writes twice.
    assert last - first >= 7 * workqueue.BACKOFF.first
    await stage.applied()


async def test_watch_events_do_not_reset_the_backoff(stage: Stage) -> None:
    controllers = Controllers(stage.cluster)
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.until(lambda: stage.pods("learner"), "there is a learner")
    await stage.settled()
    trouble = stage.cluster.fail("patch", "agentrljobs/status", status=503)
    began = asyncio.get_running_loop().time()
    for number in range(60):
        controllers.unschedulable(stage.pods("learner")[0], f"look {number}")
        await asyncio.sleep(0.02)
    took = asyncio.get_running_loop().time() - began
    # Each wait is twice the one before; from the third pass on, a pass writes twice.
    assert trouble.hits <= 2 * (1 + log2(1 + took / workqueue.BACKOFF.first)), "tried again at every event"
    trouble.end()
    await stage.until(lambda: "look 59" in stage.condition("Scheduled")[2], "the last is reported")


async def test_a_status_is_never_written_to_another_job_of_the_name(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.until(lambda: stage.condition("EnginesReady")[0] == "True", "pods run")
    await stage.settled()
    stage.cluster.freeze("agentrljobs")  # no event reports that the job is another one now
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    pod = stage.cluster.create(
        "pods",
        {
            "metadata": {"name": "of-the-old", "namespace": NAMESPACE, "labels": labels("rollout")},
            "spec": {"containers": [{"name": "rollout"}]},
        },
    )
    stage.job()
    controllers.image_missing(pod, "no such image")
    await stage.settled()
    assert stage.status() == UNSEEN, "the old job's status was written to the new one"
    stage.cluster.thaw("agentrljobs")
    await stage.applied()
    assert (
        stage.status()["startedAt"] >= stage.cluster.get("agentrljobs", NAMESPACE, JOB)["metadata"]["creationTimestamp"]
    )


def labels(role: str) -> dict[str, str]:
    return {"kestrl.dev/job": JOB, "kestrl.dev/role": role}


async def test_repeated_api_failures_are_reported_until_a_pass_succeeds(stage: Stage) -> None:
    await stage.operator()
    trouble = stage.cluster.fail("patch", "statefulsets", status=503, message="etcdserver: leader changed")
    stage.job()
    await stage.until(lambda: stage.condition("Ready")[1] == "OperatorFailed", "it is reported")
    assert trouble.hits >= workers.REPORT_AFTER_FAILURES, "a transient failure is reported"
    assert "etcdserver: leader changed" in stage.condition("Ready")[2]
    await stage.until(lambda: stage.events("OperatorFailed"), "people hear of it")
    written, hits = stage.cluster.get("agentrljobs", NAMESPACE, JOB), trouble.hits
    await stage.until(lambda: trouble.hits > hits, "it is tried again")
    assert stage.cluster.get("agentrljobs", NAMESPACE, JOB) == written, "written again and again"
    trouble.end()
    await stage.until(lambda: stage.condition("Ready")[1] == "NotReady", "it works")
    assert len(stage.events("OperatorFailed")) == 1


async def test_a_bug_with_one_job_is_in_its_status_and_stops_no_other_job(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await stage.operator()
    drawn = manifests.Manifests.objects

    def buggy(self: Any, key: Key, *given: Any, **more: Any) -> Any:
        if key.name == "bad":
            raise KeyError("an unforeseen error")
        return drawn(self, key, *given, **more)

    monkeypatch.setattr(manifests.Manifests, "objects", buggy)
    stage.job("bad")
    stage.job()
    await stage.cluster.until(lambda: stage.condition("Ready", "bad")[1] == "OperatorFailed", "it is reported")
    assert stage.condition("Ready", "bad")[2] == ("a bug in the operator, see its log: KeyError: 'an unforeseen error'")
    await stage.cluster.until(stage.learner, "the other is applied")
    monkeypatch.undo()
    running.operator._workers.passes["bug"] = 0
    await stage.applied("bad")
    await stage.until(lambda: stage.condition("Ready", "bad")[1] == "NotReady", "it works again")


async def test_a_conflict_of_the_status_is_retried_and_is_no_failure(stage: Stage) -> None:
    running = await stage.operator()
    conflict = stage.cluster.fail("patch", "agentrljobs/status", status=409, times=1)
    stage.job()
    await stage.applied()
    assert conflict.hits
    assert running.operator._workers.passes["failed"] == 0


async def test_an_unwatched_object_is_created_again_when_a_pod_needs_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_pods, "REAPPLY_SECONDS", 2.0)
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.settled()
    secret = f"{JOB}-agentrljob"
    stage.cluster.delete("secrets", NAMESPACE, secret)
    controllers.image_missing(stage.pods("tools")[0], f'secret "{secret}" not found')
    before = applies(stage)
    await stage.until(lambda: stage.cluster.find("secrets", NAMESPACE, secret), "it is created again")
    await stage.settled()
    # One more: the Secret is created empty before it is applied.
    assert applies(stage) - before <= len(stage.children()) + 1, "made more than once"


async def test_a_deletion_is_bound_to_the_uid(stage: Stage) -> None:
    old = stage.job()["metadata"]["uid"]
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    stage.job()
    stage.patch.setenv("KUBECONFIG", str(stage.cluster.write_kubeconfig(stage.folder, user="a")))
    api = Api()
    try:
        await api.delete(JOB_KIND, NAMESPACE, JOB, uid=old)
        assert stage.cluster.find("agentrljobs", NAMESPACE, JOB) is not None
        await api.delete(JOB_KIND, NAMESPACE, JOB, uid=stage.uid())
        assert stage.cluster.find("agentrljobs", NAMESPACE, JOB) is None
        await api.delete(JOB_KIND, NAMESPACE, JOB, uid=old)
    finally:
        await api.close()


async def test_a_slow_api_server_is_waited_for(stage: Stage) -> None:
    await stage.operator()
    stage.cluster.fail("patch", "*", delay=0.05)
    stage.job()
    await stage.applied()
    await stage.settled()
    assert applies(stage) == len(stage.children())


async def test_a_failing_job_delays_no_other(stage: Stage) -> None:
    await stage.operator(workers=2)
    held = stage.cluster.fail("patch", "statefulsets", name="bad-inference", delay=30.0)
    stage.job("bad")
    await stage.until(lambda: held.hits, "the bad one is worked on")
    stage.job()
    await stage.applied()
    assert stage.learner("bad") is None


@pytest.mark.parametrize("code", [422, 403])
async def test_a_refused_object_is_reported_and_retried(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(applier, "BACKOFF", Backoff(0.5, 120))
    await stage.operator()
    words = 'StatefulSet.apps "email-search-inference" is invalid: spec.template: Invalid value: "cpus": no such thing'
    trouble = stage.cluster.fail("patch", "statefulsets", status=code, message=words)
    stage.job()
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is reported")
    status, _, message = stage.condition("Accepted")
    assert status == "False"
    assert words in message
    assert stage.phase() == "Rejected"
    await stage.until(lambda: [item["reason"] for item in stage.events()] == ["Invalid"], "people hear of it")
    written, hits = stage.cluster.get("agentrljobs", NAMESPACE, JOB), trouble.hits
    await stage.until(lambda: trouble.hits >= hits + 2, "it is tried again")
    assert stage.cluster.get("agentrljobs", NAMESPACE, JOB) == written, "written again and again"
    trouble.end()
    await stage.until(lambda: stage.condition("Accepted")[1] == "Valid", "it is taken now")
    assert stage.learner() is not None


async def test_a_changed_manifest_resets_the_backoff(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workqueue, "BACKOFF", Backoff(60, 120))
    await stage.operator()
    stage.cluster.fail("patch", "statefulsets", status=422, times=1)
    stage.job()
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is reported")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 2}}})
    await stage.until(lambda: stage.condition("Accepted")[1] == "Valid", "it is taken now")


async def test_a_change_of_an_immutable_field_is_reported(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    # As after an upgrade with another size of volumes: the claims of a StatefulSet are immutable.
    stage.cluster.objects.get(stage.cluster.objects.resource("statefulsets"), NAMESPACE, f"{JOB}-learner")["spec"][
        "volumeClaimTemplates"
    ][0]["spec"]["resources"]["requests"]["storage"] = "7Gi"
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 2}}})
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is reported")
    assert "spec.volumeClaimTemplates: Invalid value: field is immutable" in stage.condition("Accepted")[2]


async def test_an_answer_that_is_late_is_not_a_second_write(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.cluster.fail("patch", "agentrljobs/status", delay=0.3, late=True)
    stage.job()
    await stage.applied()
    await stage.settled()
    statuses = [item.body["status"] for item in stage.cluster.requests("patch", "agentrljobs/status")]
    for number, status in enumerate(statuses):
        assert status not in statuses[:number], "written twice"


async def test_a_write_is_known_before_the_watch_delivers_it(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.until(lambda: stage.condition("EnginesReady")[0] == "True", "pods run")
    await stage.settled()
    stage.cluster.freeze("agentrljobs")  # the stream is later than the write
    before = len(stage.events())
    for number in range(5):
        controllers.crashed(stage.pods("tools")[0], "no such file", restarts=number)
        await stage.settled()
    await stage.until(lambda: stage.condition("RolloutsFlowing")[1] == "Failing", "it is reported")
    await stage.settled()
    since = {item["lastTransitionTime"] for item in stage.status()["conditions"] if item["type"] == "RolloutsFlowing"}
    assert len(since) == 1
    failing = stage.events("Failing")
    assert len(failing) == 1
    assert "series" not in failing[0], "published more than once"
    assert len(stage.events()) == before + 1


async def test_names_are_listed_page_by_page_and_none_at_all_is_no_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "PAGE", 2)
    monkeypatch.setenv("KUBECONFIG", str(stage.cluster.write_kubeconfig(stage.folder, user="reader")))
    api = Api()
    try:
        assert [mark async for mark in api.marks(JOB_KIND, None)] == []
        names = [f"job-{number}" for number in range(5)]
        for name in names:
            stage.job(name)
        marks = [mark async for mark in api.marks(JOB_KIND, NAMESPACE)]
        stage.cluster.fail("list", "agentrljobs", status=503, user="reader")
        with pytest.raises(ApiProblem, match="list agentrljobs"):
            _ = [mark async for mark in api.marks(JOB_KIND, None)]
    finally:
        await api.close()
    assert sorted(mark.name for mark in marks) == names
    assert {mark.uid: mark.version for mark in marks} == {
        item["metadata"]["uid"]: int(item["metadata"]["resourceVersion"]) for item in stage.cluster.list("agentrljobs")
    }
