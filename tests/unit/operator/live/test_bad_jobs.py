"""Invalid jobs: the field and the fix are reported, no object is created, and other jobs are not affected."""

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
        (
            {"data": {"train": {"uri": "train.jsonl"}}},
            ["spec.data.train.uri", "'train.jsonl' is a local path", "s3://"],
        ),
        ({"model": {"base": "my-model"}}, ["spec.model.base", "'my-model' is a local path", "hf://ORG/NAME"]),
    ],
    ids=[
        "unknown profile",
        "a patch of a reserved field",
        "storage of one machine",
        "data of one machine",
        "a model of one machine",
    ],
)
async def test_errors_found_by_the_operator_name_the_field_and_the_fix(
    stage: Stage, spec: dict[str, Any], words: list[str]
) -> None:
    await stage.operator()
    stage.job("bad", **spec)
    stage.job()
    await stage.until(lambda: stage.phase("bad") == "Rejected", "it is reported")
    status, reason, message = stage.condition("Accepted", "bad")
    assert (status, reason) == ("False", "Invalid")
    for word in words:
        assert word in message
    await stage.applied()
    await stage.settled()
    assert stage.condition("Accepted")[:2] == ("True", "Valid")
    assert stage.children("bad") == []
    written = [item for item in stage.writes() if item.endswith("agentrljobs/status/bad")]
    assert len(written) == 2, "the installation, and the error once"


async def test_a_job_without_storage_or_a_default_is_rejected_with_the_fix(stage: Stage) -> None:
    await stage.operator(values={"storage": {}})
    stage.job()
    stage.job("stored", storage={"uri": "s3://mine/runs"})
    await stage.until(lambda: stage.phase() == "Rejected", "it is reported")
    assert "spec.storage.uri" in stage.condition("Accepted")[2]
    assert "s3://BUCKET/PREFIX" in stage.condition("Accepted")[2]
    await stage.applied("stored")
    assert stage.children() == []


async def test_a_build_without_an_image_in_the_chart_is_reported(stage: Stage) -> None:
    images = {**VALUES["images"], "engine": {"cpu": "r/engine-cpu:1"}}
    await stage.operator(values={"images": images})
    stage.job(inference={"accelerator": {"profile": "nvidia", "count": 1}})
    await stage.until(lambda: stage.phase() == "Rejected", "it is reported")
    assert "cuda" in stage.condition("Accepted")[2]
    assert stage.children() == []


async def test_an_engine_without_an_image_for_the_device_is_reported(stage: Stage) -> None:
    await stage.operator(values={"images": VALUES["images"] | {"sglang": {"cuda": "r/sglang-cuda:1"}}})
    stage.job(inference={"engine": "sglang"})
    await stage.until(lambda: stage.phase() == "Rejected", "it is reported")
    message = stage.condition("Accepted")[2]
    assert "spec.inference.accelerator.profile: 'cpu' runs the build 'cpu'" in message
    assert "no image with sglang (the chart's jobs.images.sglang.cpu); there are: cuda" in message


async def test_a_fixed_job_is_accepted(stage: Stage) -> None:
    await stage.operator()
    stage.job(patches=PATCHED)
    await stage.until(lambda: stage.phase() == "Rejected", "it is reported")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"patches": []}})
    await stage.applied()
    await stage.until(lambda: stage.condition("Accepted")[:2] == ("True", "Valid"), "it is accepted")
    assert stage.status()["observedGeneration"] == 2


async def test_a_job_with_a_newly_invalid_spec_keeps_its_objects(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    before = stage.children()
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"patches": PATCHED}})
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is reported")
    await stage.settled()
    assert stage.children() == before


async def test_nodes_that_can_never_run_a_pod_are_reported(stage: Stage) -> None:
    node = {"metadata": {"name": "n1", "labels": {}}, "status": {"allocatable": {"cpu": "8"}}}
    stage.cluster.create("nodes", node)
    await stage.operator()
    stage.job(inference={"accelerator": {"profile": "nvidia", "count": 1}, "replicas": 1})
    await stage.until(lambda: stage.condition("Scheduled")[1] == "Unsatisfiable", "it is reported")
    assert "spec.inference.accelerator" in stage.condition("Scheduled")[2]
    assert "nvidia.com/gpu" in stage.condition("Scheduled")[2]
