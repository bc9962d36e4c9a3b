"""Metrics of each job, from what the streams delivered."""

from __future__ import annotations

from tests.fakes.kubernetes import Controllers

from kestrl_operator import job_metrics

from .stage import JOB, NAMESPACE, Stage, ready


async def test_a_jobs_state_and_its_devices_are_exported(stage: Stage) -> None:
    devices = {"profile": "nvidia", "count": 2}
    stage.job(inference={"replicas": 2, "accelerator": devices}, learner={"accelerator": {"profile": "nvidia"}})
    controllers = Controllers(stage.cluster, started=ready)
    running = await stage.operator()
    store = running.operator._store
    await stage.applied()
    await stage.until(lambda: len(stage.cluster.list("pods")) == 6, "pods are there")
    await stage.settled()
    phase = stage.phase()
    ((labels, value),) = job_metrics.info(store).items()
    assert (labels, value) == ((NAMESPACE, JOB, phase, stage.condition("Ready")[1]), 1.0)
    conditions = job_metrics.conditions(store)
    assert conditions[NAMESPACE, JOB, "Accepted"] == 1.0
    assert conditions[NAMESPACE, JOB, "Succeeded"] == 0.0
    assert (NAMESPACE, JOB, "Learned") not in conditions, "it is unknown"
    assert job_metrics.devices(store) == {(NAMESPACE, JOB, "nvidia"): 4.0}, "the learner has no node"
    controllers.run(stage.pods("learner")[0])
    await stage.settled()
    assert job_metrics.devices(store) == {(NAMESPACE, JOB, "nvidia"): 5.0}
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"suspend": True}})
    await stage.until(lambda: stage.cluster.list("pods") == [], "its pods end")
    await stage.settled()
    assert job_metrics.devices(store) == {}
