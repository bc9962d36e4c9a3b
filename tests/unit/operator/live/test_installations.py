"""Two installations of the operator over one namespace: each job is reconciled by one, until that one is dead."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fakes.kubernetes import Controllers

from kestrl_operator import metrics
from kestrl_operator.config import LeaseSettings

from .stage import JOB, NAMESPACE, VALUES, Running, Stage, ready

FIRST, SECOND = "kestrl-system/kestrl-operator", "kestrl-system/ml-kestrl-operator"
SECONDS = 1.0
"""Duration of the Leases."""
OTHER_VALUES = {"images": {**VALUES["images"], "pullPolicy": "Always"}}
"""A setting that changes every pod of a job."""


@pytest.fixture(autouse=True)
def short(stage: Stage) -> None:
    stage.lease_seconds = SECONDS


async def second(stage: Stage, values: dict[str, Any] | None = None) -> Running:
    """Starts an operator of another release, which elects its leader with a Lease of its own."""
    lease = LeaseSettings(name="ml-kestrl-operator", namespace="kestrl-system", seconds=SECONDS)
    running = stage.begin("b", values, lease=lease)
    await stage.until(lambda: stage.watches("b"), "b watches")
    await stage.until(lambda: stage.cluster.find("leases", "kestrl-system", "ml-kestrl-operator"), "b leads")
    return running


def installation(stage: Stage, name: str = JOB) -> str:
    return stage.status(name).get("installation", "")


def foreign_jobs(running: Running) -> int:
    """The metric kestrl_operator_foreign_jobs."""
    operator = running.operator
    return metrics.foreign(operator._controllers, operator._installations)


def generations(stage: Stage) -> dict[str, int]:
    """The generation of every workload, which grows with each change of its spec."""
    return {
        item["metadata"]["name"]: item["metadata"]["generation"]
        for plural in ("statefulsets", "deployments")
        for item in stage.cluster.list(plural, NAMESPACE)
    }


async def test_a_second_installation_leaves_the_jobs_of_the_first_alone(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator("a")
    uid = stage.job()["metadata"]["uid"]
    await stage.applied()
    await stage.settled()
    before = generations(stage)
    other = await second(stage, OTHER_VALUES)
    await stage.until(lambda: stage.events("OtherInstallation"), "b says so")
    looks = len(stage.cluster.requests("get", "leases", user="b"))
    await stage.until(lambda: len(stage.cluster.requests("get", "leases", user="b")) > looks + 10, "b looks again")
    assert generations(stage) == before
    assert installation(stage) == FIRST
    assert [item for item in stage.writes("b") if "leases" not in item and "events" not in item] == []
    (event,) = stage.events("OtherInstallation")
    assert event["regarding"]["uid"] == uid
    assert (FIRST in event["note"], SECOND in event["note"], "series" in event) == (True, True, False)
    assert [foreign_jobs(running) for running in (other, stage.running[0])] == [1, 0]


async def test_of_two_installations_that_meet_a_new_job_one_takes_it(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    await stage.operator("a")
    await second(stage, OTHER_VALUES)
    names = [f"job-{number}" for number in range(6)]
    for name in names:
        stage.job(name)
    for name in names:
        await stage.applied(name)
    for name in names:
        await stage.until(lambda name=name: stage.condition("EnginesReady", name)[1] == "AllReady", "it is ready")
    before = generations(stage)
    looks = len(stage.cluster.requests("get", "leases"))
    await stage.until(lambda: len(stage.cluster.requests("get", "leases")) > looks + 20, "both look again")
    assert generations(stage) == before
    assert set(before.values()) == {1}, "two wrote the same objects"


async def test_a_dead_installation_s_jobs_are_taken_over_and_no_pod_is_rolled(stage: Stage) -> None:
    Controllers(stage.cluster, started=ready)
    first = await stage.operator("a")
    stage.job()
    await stage.applied()
    await stage.until(lambda: stage.condition("EnginesReady")[1] == "AllReady", "it runs")
    pods = {item["metadata"]["uid"] for item in stage.cluster.list("pods", NAMESPACE)}
    before = generations(stage)
    await stage.stop(first)
    await second(stage)
    await stage.until(lambda: installation(stage) == SECOND, "it is taken over")
    await stage.until(lambda: stage.events("TakenOver"), "and that is said")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 3}}})
    await stage.until(lambda: len(stage.pods("rollout")) == 3, "b reconciles it")
    assert pods <= {item["metadata"]["uid"] for item in stage.cluster.list("pods", NAMESPACE)}
    changed = {name for name, number in generations(stage).items() if number != before[name]}
    assert changed == {f"{JOB}-rollout"}, "only what the new spec changes"


async def test_a_lease_that_is_not_there_is_waited_for_and_then_taken_for_dead(stage: Stage) -> None:
    stage.job()
    named = {"status": {"installation": "gone/old-operator"}}
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, named, subresource="status")
    began = asyncio.get_running_loop().time()
    await stage.operator("a")
    await stage.until(lambda: installation(stage) == FIRST, "it is taken over")
    assert asyncio.get_running_loop().time() - began >= SECONDS, "its installation may have been about to make it"
    await stage.applied()


async def test_a_lease_that_may_not_be_read_is_taken_for_alive(stage: Stage) -> None:
    stage.job()
    named = {"status": {"installation": "gone/old-operator"}}
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, named, subresource="status")
    refused = stage.cluster.fail("get", "leases", name="old-operator", status=403)
    await stage.operator("a")
    await stage.until(lambda: refused.hits > 10, "it has looked for longer than a Lease lasts")
    assert installation(stage) == "gone/old-operator"
    assert stage.learner() is None
    (event,) = stage.events("OtherInstallation")
    assert "get Lease old-operator" in event["note"]
    refused.end()
    await stage.applied()
