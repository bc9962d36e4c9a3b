"""A job that makes no job: told with field and mend, nothing is made of it, and nobody else suffers."""

from __future__ import annotations

from typing import Any

import pytest

from .stage import JOB, NAMESPACE, VALUES, Stage

PATCHED = [{"role": "tools", "template": {"spec": {"serviceAccountName": "admin"}}}]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"learner": {"accelerator": {"profile": "abacus"}}}, ["abacus", "cpu", "nvidia"]),
        ({"patches": PATCHED}, ["spec.patches[0].template.spec.serviceAccountName", "remove it"]),
        ({"storage": {"uri": "file:///tmp/here"}}, ["spec.storage.uri", "s3://"]),
    ],
    ids=["unknown profile", "a patch that is not a job's", "storage of one machine"],
)
async def test_what_only_the_operator_can_refuse_is_refused_with_field_and_mend(
    stage: Stage, spec: dict[str, Any], words: list[str]
) -> None:
    await stage.operator()
    stage.job("bad", **spec)
    stage.job()
    await stage.until(lambda: stage.phase("bad") == "Rejected", "it is told")
    truth, reason, message = stage.condition("Accepted", "bad")
    assert (truth, reason) == ("False", "Invalid")
    for word in words:
        assert word in message
    await stage.applied()
    await stage.quiet()
    assert stage.condition("Accepted")[:2] == ("True", "Valid")
    assert stage.children("bad") == []
    assert len([item for item in stage.writes() if item.endswith("agentrljobs/status/bad")]) == 1


async def test_a_job_without_storage_on_a_cluster_without_a_default_is_told_what_to_name(stage: Stage) -> None:
    await stage.operator(values={"storage": {}})
    stage.job()
    stage.job("stored", storage={"uri": "s3://mine/runs"})
    await stage.until(lambda: stage.phase() == "Rejected", "it is told")
    assert "spec.storage.uri" in stage.condition("Accepted")[2]
    assert "s3://BUCKET/PREFIX" in stage.condition("Accepted")[2]
    await stage.applied("stored")
    assert stage.children() == []


async def test_a_build_that_the_chart_has_no_image_for_is_told(stage: Stage) -> None:
    images = {**VALUES["images"], "engine": {"cpu": "r/engine-cpu:1"}}
    await stage.operator(values={"images": images})
    stage.job(inference={"accelerator": {"profile": "nvidia", "count": 1}})
    await stage.until(lambda: stage.phase() == "Rejected", "it is told")
    assert "cuda" in stage.condition("Accepted")[2]
    assert stage.children() == []


async def test_a_job_that_is_mended_is_taken(stage: Stage) -> None:
    await stage.operator()
    stage.job(patches=PATCHED)
    await stage.until(lambda: stage.phase() == "Rejected", "it is told")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"patches": []}})
    await stage.applied()
    await stage.until(lambda: stage.condition("Accepted")[:2] == ("True", "Valid"), "it is taken")
    assert stage.status()["observedGeneration"] == 2


async def test_a_job_that_turns_bad_keeps_its_objects_and_says_so(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    before = stage.children()
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"patches": PATCHED}})
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is told")
    await stage.quiet()
    assert stage.children() == before


async def test_nodes_that_could_never_take_a_pod_are_told_of(stage: Stage) -> None:
    node = {"metadata": {"name": "n1", "labels": {}}, "status": {"allocatable": {"cpu": "8"}}}
    stage.cluster.create("nodes", node)
    await stage.operator()
    stage.job(inference={"accelerator": {"profile": "nvidia", "count": 1}, "replicas": 1})
    await stage.until(lambda: stage.condition("Scheduled")[1] == "Unsatisfiable", "it is told")
    assert "spec.inference.accelerator" in stage.condition("Scheduled")[2]
    assert "nvidia.com/gpu" in stage.condition("Scheduled")[2]
