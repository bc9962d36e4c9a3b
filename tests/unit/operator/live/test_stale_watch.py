"""Streams that freeze, break, miss events or end: nothing is missed for long, and a stale watch is reported."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from tests.fakes.kubernetes import Controllers

from kestrl_operator.watch.streams import WatchEnded, WatchThread

from .stage import JOB, NAMESPACE, Stage, ready

CHILDREN = ("deployments", "services", "networkpolicies")
OFTEN = 0.2
"""Seconds between two audits."""
RARELY = 30.0
"""The same where a test is over before the second audit, unless that is earlier than the others."""


def audits(stage: Stage) -> int:
    """Number of audits, each of which lists nodes last."""
    return len(stage.cluster.requests("list", "nodes"))


async def audited(stage: Stage, times: int = 1) -> None:
    before = audits(stage)
    await stage.until(lambda: audits(stage) >= before + times, f"{times} audits")


async def test_a_frozen_stream_is_found_by_the_audit_and_fails_healthz(stage: Stage) -> None:
    running = await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    await audited(stage, 3)
    assert await running.asked() == (200, "ok")
    stage.cluster.freeze("agentrljobs")
    stage.job("unheard")
    await stage.applied("unheard")
    assert f"{NAMESPACE}/unheard" in await stage.until_asked(running, 503)
    stage.cluster.thaw("agentrljobs")
    await stage.until_asked(running, 200)


async def test_a_missed_deletion_is_found_by_the_audit(stage: Stage) -> None:
    running = await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    stage.cluster.lose("agentrljobs")
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    await stage.until(lambda: not running.jobs(), "the job is forgotten")
    await stage.settled()
    assert stage.children() == []
    assert await running.asked() == (200, "ok")


async def test_objects_of_a_job_whose_deletion_was_missed_are_not_recreated(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    await stage.settled()
    before, written = len(stage.cluster.writes()), stage.writes()
    stage.cluster.freeze("agentrljobs")
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    await stage.until(lambda: len(stage.cluster.writes()) > before, "the operator has seen that objects are gone")
    await stage.settled()
    asked = stage.cluster.writes()[before:]
    assert {(item.resource, item.status) for item in asked} == {("agentrljobs/status", 404)}
    assert stage.writes() == written
    assert stage.children() == []


async def test_a_stream_that_ends_with_410_lists_again(stage: Stage) -> None:
    await stage.operator()
    stage.job("before")
    await stage.applied("before")
    await stage.settled()
    stage.cluster.freeze("agentrljobs")
    stage.job("between")
    stage.cluster.compact()
    stage.cluster.thaw("agentrljobs")
    await stage.applied("between")
    stage.cluster.end_streams(error=410)
    stage.job("after")
    await stage.applied("after")


async def test_streams_that_are_cut_resume_where_they_were(stage: Stage) -> None:
    await stage.operator()
    stage.job("before")
    await stage.applied("before")
    lists = len(stage.cluster.requests("list", "agentrljobs"))
    stage.cluster.end_streams()
    stage.job("after")
    await stage.applied("after")
    assert len(stage.cluster.requests("list", "agentrljobs")) == lists, "listed though nothing was missed"


async def test_an_api_server_outage_is_survived(stage: Stage) -> None:
    running = await stage.operator()
    stage.job("before")
    await stage.applied("before")
    await stage.cluster.stop()
    stage.job("between")
    await asyncio.sleep(0.5)
    assert await running.asked() == (200, "ok"), "a new process would not find it either"
    await stage.cluster.start()
    await stage.applied("between")


async def test_a_child_whose_deletion_was_missed_is_created_by_the_audit(stage: Stage) -> None:
    await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    for plural in CHILDREN:
        await stage.settled()
        stage.cluster.lose(plural)
        stage.cluster.delete(plural, NAMESPACE, f"{JOB}-rollout")
        await stage.until(partial(stage.cluster.find, plural, NAMESPACE, f"{JOB}-rollout"), f"{plural} are back")


async def test_a_change_of_a_child_that_the_watch_missed_is_reverted_by_the_audit(stage: Stage) -> None:
    await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    await stage.settled()
    stage.cluster.lose("deployments")
    stage.cluster.edit("deployments", NAMESPACE, f"{JOB}-rollout", {"spec": {"replicas": 9}}, subresource="scale")
    await stage.until(
        lambda: stage.cluster.get("deployments", NAMESPACE, f"{JOB}-rollout")["spec"]["replicas"] == 1, "scaled back"
    )


async def test_a_child_deleted_while_no_operator_ran_is_created_by_the_next(stage: Stage) -> None:
    running = await stage.operator("a")
    stage.job()
    await stage.applied()
    for user, plural in zip("bcd", CHILDREN, strict=True):
        await stage.stop(running)
        stage.cluster.delete(plural, NAMESPACE, f"{JOB}-rollout")
        running = await stage.operator(user)
        await stage.until(partial(stage.cluster.find, plural, NAMESPACE, f"{JOB}-rollout"), f"{plural} are back")
        await stage.settled()


async def test_a_pod_whose_deletion_was_missed_does_not_block_a_suspension(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    await stage.until(lambda: stage.condition("EnginesReady")[0] == "True", "pods run")
    await stage.settled()
    stage.cluster.lose("pods", 6)  # all deletions
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
    await stage.until(lambda: not stage.cluster.list("pods"), "pods are gone")
    await stage.until(lambda: stage.condition("Suspended")[:2] == ("True", "Released"), "the suspension completes")


async def test_a_pod_that_goes_before_the_streams_begin_is_forgotten(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    running = await stage.operator("a")
    stage.job()
    await stage.until(lambda: stage.status().get("rolloutReplicas") == 1, "a pod of a rollout worker runs")
    await stage.settled()
    await stage.stop(running)
    streams_begin, run = asyncio.Event(), WatchThread.run

    async def begin_late(watch: WatchThread) -> None:
        await streams_begin.wait()
        await run(watch)

    stage.patch.setattr(WatchThread, "run", begin_late)
    before = audits(stage)
    running = stage.begin("b", audit_seconds=RARELY)
    await stage.until(lambda: audits(stage) > before, "the first audit has listed the pods")
    await stage.until(lambda: stage.holder() == "b", "b leads")
    controllers.stop()  # so that no pod takes the place of the one that goes
    (pod,) = stage.pods("rollout")
    stage.cluster.delete("pods", NAMESPACE, pod["metadata"]["name"])
    streams_begin.set()
    await stage.until(lambda: stage.watches("b"), "the streams begin")
    assert not running.has_delivered(stage.cluster), "the pod is known, and no stream mentions it"
    await stage.until(lambda: stage.status()["rolloutReplicas"] == 0, "the pod is forgotten", seconds=RARELY / 2)
    await stage.settled()


async def test_a_job_created_during_an_audit_is_not_removed(stage: Stage) -> None:
    running = await stage.operator(audit_seconds=OFTEN)
    held = asyncio.Event()
    late = stage.cluster.fail("list", "agentrljobs", held=held, late=True, times=1)
    await stage.until(lambda: late.hits, "a list is on its way")
    stage.job()
    await stage.applied()
    before = audits(stage)
    stage.cluster.fail("list", "agentrljobs", delay=60.0)  # so that no further audit delivers it
    held.set()
    await stage.until(lambda: audits(stage) > before, "the late list has come")
    assert running.jobs() == {JOB}


async def test_a_job_created_during_an_audit_counts_as_delivered(stage: Stage) -> None:
    running = await stage.operator(audit_seconds=OFTEN)
    stage.cluster.fail("patch", "agentrljobs/status", status=503)  # nothing changes it, so no event follows
    held = asyncio.Event()
    late = stage.cluster.fail("list", "agentrljobs", held=held, late=True, times=1)
    await stage.until(lambda: late.hits, "a list is on its way")
    stage.job()
    await stage.until(running.jobs, "the stream has delivered the job")
    held.set()
    for _ in range(4):
        await audited(stage)
        assert await running.asked() == (200, "ok")


async def test_an_audit_without_changes_lists_names_only(stage: Stage) -> None:
    await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    await stage.settled()
    before = len(stage.cluster.requests("list"))
    await audited(stage, 2)
    asked = [item.accepts for item in stage.cluster.requests("list")[before:] if item.resource != "nodes"]
    assert asked
    assert all("PartialObjectMetadataList" in accepts for accepts in asked)


async def test_an_answer_that_is_not_a_list_is_not_an_empty_list(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    running = await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    await stage.settled()
    written = len(stage.writes())
    nonsense = stage.cluster.fail("list", "agentrljobs", status=200)
    await stage.until(lambda: nonsense.hits >= 3, "some audits have asked")
    nonsense.end()
    await audited(stage, 2)
    assert "list agentrljobs: ValidationError" in caplog.text
    assert running.jobs() == {JOB}
    assert stage.writes()[written:] == []


async def test_a_job_that_is_deleted_while_an_audit_lists_does_not_come_back(stage: Stage) -> None:
    running = await stage.operator(audit_seconds=OFTEN)
    stage.job()
    await stage.applied()
    held = asyncio.Event()
    late = stage.cluster.fail("list", "agentrljobs", held=held, late=True, times=1)
    await stage.until(lambda: late.hits, "a list is on its way")
    stage.cluster.delete("agentrljobs", NAMESPACE, JOB)
    await stage.until(lambda: not running.jobs(), "the job is forgotten")
    written = len(stage.writes())
    held.set()
    await audited(stage)  # with the content of the delayed list
    await stage.settled()
    assert not running.jobs()
    assert stage.writes()[written:] == []
    assert stage.children() == []


@pytest.mark.slow
async def test_a_broken_stream_ends_the_operator_and_releases_the_lease(
    stage: Stage,
) -> None:
    running = await stage.operator(lease_seconds=30.0)
    stage.running.remove(running)
    stage.cluster.end_streams("pods", error=500)
    async with asyncio.timeout(9.0):  # kopf waits 5 s for its other streams; after 10 it kills the process
        with pytest.raises(WatchEnded, match=r"cannot go on: .*watch-stream"):
            await running.task
    await running.api.close()
    assert stage.holder() == ""
