"""A thousand jobs on a real control plane without kubelets: the time until every object of each exists, and their cost
at rest.

Twice. With Kubernetes' own controllers stopped, only the API server, its etcd and the operator run, and the operator is
measured. With them running, most of the time on few cores is theirs, for the pods, slices and events that they create.
The limit in the same run is a loop that knows all these objects and applies them, with the same concurrency, to as many
jobs. KubeRay publishes 258 s for a thousand clusters.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster.client import Cluster

from kestrl_operator.apiserver.client import Api
from kestrl_operator.apiserver.kinds import JOB, POD
from kestrl_operator.config import OperatorConfig, read_config
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.state.jobs import Key
from kestrl_operator.status.lifecycle import Decision, Stage

from .operating import COUNT, PODS, Object, fill, held, jobs, operating, places, report

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(2400)]
GOAL_MIB, GOAL_REQUESTS = 400, 40
REST_SECONDS = 330.0 if COUNT >= 1000 else 90.0
"""With a thousand jobs a whole round of audits, of which the fifth lists everything; the shorter test has no time for
that."""


async def fill_barely(namespace: str, config: OperatorConfig) -> float:
    """Applies the rendered objects of as many jobs in a plain loop; returns the seconds."""
    api, manifests = Api(), Manifests(config.jobs, config.key())
    began = time.monotonic()

    async def one(job: Object) -> None:
        async with slots:
            made = await api.create(JOB, job)
            key, uid = Key(namespace, job["metadata"]["name"]), made["metadata"]["uid"]
            running = Decision(stage=Stage.RUNNING, parked=False)
            for item in manifests.objects(key, uid, manifests.read(key, made), running):
                await api.apply(item)

    slots = asyncio.Semaphore(config.workers)
    try:
        await asyncio.gather(*(one(job) for job in jobs(namespace)))
        return time.monotonic() - began
    finally:
        await api.close()


async def settled(namespace: str) -> None:
    """Waits until every pod is created and every status is written."""
    api = Api()
    try:
        while True:
            pods = len([item async for item in api.list(POD, namespace, labels="kestrl.dev/job")])
            listed = [item async for item in api.list(JOB, namespace)]
            if pods == COUNT * PODS and all(item.get("status", {}).get("observedGeneration") for item in listed):
                return
            await asyncio.sleep(2)  # as above
    finally:
        await api.close()


def compared(seconds: float, bare: float, cpu: float, requests: int) -> dict[str, Any]:
    """The results measured in both situations."""
    return {
        "jobs": COUNT,
        "seconds": round(seconds, 1),
        "bare_seconds": round(bare, 1),
        "ratio": round(seconds / bare, 2),
        "operator_cpu_seconds": round(cpu, 1),
        "requests_per_job": round(requests / COUNT, 1),
    }


def test_many_jobs_are_created_quickly(by_token: Cluster, tmp_path: Path) -> None:
    if by_token.own is None:
        pytest.skip("the controllers of a cluster that is not the harness's own cannot be held")
    with places(by_token, "alone", "alone-bare"), held(by_token):
        with operating(tmp_path) as operator:
            before = operator.cpu(), operator.requests()
            seconds = asyncio.run(fill("alone"))
            busy, asked = operator.cpu() - before[0], operator.requests() - before[1]
            peak = operator.peak()
        bare = asyncio.run(fill_barely("alone-bare", read_config(tmp_path / "operator.yaml")))
    measured = {**compared(seconds, bare, busy, asked), "operator_peak_mib": peak}
    report("controllers_held", measured)
    assert measured["operator_peak_mib"] <= GOAL_MIB
    assert measured["requests_per_job"] <= GOAL_REQUESTS


def test_many_jobs_cost_next_to_nothing_at_rest(by_token: Cluster, tmp_path: Path) -> None:
    with places(by_token, "scale", "scale-bare"):
        with operating(tmp_path) as operator:
            before = operator.cpu(), operator.requests()
            seconds = asyncio.run(fill("scale"))
            busy, asked = operator.cpu() - before[0], operator.requests() - before[1]
            asyncio.run(settled("scale"))
            operator.rest()
            resting = operator.cpu()
            time.sleep(REST_SECONDS)  # there is no event to await for nothing happening
            idle = (operator.cpu() - resting) / REST_SECONDS
            peak = operator.peak()
        bare = asyncio.run(fill_barely("scale-bare", read_config(tmp_path / "operator.yaml")))
    measured = {
        **compared(seconds, bare, busy, asked),
        "operator_peak_mib": peak,
        "idle_share_of_a_core": round(idle, 4),
    }
    report("controllers_running", measured)
    assert measured["operator_peak_mib"] <= GOAL_MIB
    assert measured["requests_per_job"] <= GOAL_REQUESTS
