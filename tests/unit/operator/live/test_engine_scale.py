"""A job with a range of engines: others say how many there are, and the operator keeps the number within the range."""

from __future__ import annotations

from typing import Any

from tests.fakes.kubernetes.controllers import Controllers

from .stage import JOB, NAMESPACE, Stage, ready

ENGINES = f"{JOB}-inference"
INFERENCE = {"engine": "vllm", "accelerator": {"profile": "cpu"}, "contextLength": 2048}
RANGE = {"min": 2, "max": 4}
LEASE_SECONDS = 600.0
"""Longer than a machine that is busy with others takes to renew it."""


def engines(stage: Stage) -> int:
    return int(stage.cluster.get("statefulsets", NAMESPACE, ENGINES)["spec"].get("replicas", 1))


def scale(stage: Stage, number: int) -> None:
    """As `kubectl scale` or an autoscaler does."""
    stage.cluster.edit(
        "statefulsets", NAMESPACE, ENGINES, {"spec": {"replicas": number}}, manager="hpa", subresource="scale"
    )


def edit(stage: Stage, **spec: Any) -> None:
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": spec})


def notes(stage: Stage) -> list[str]:
    return [item["note"] for item in stage.events("EnginesOutOfRange")]


async def test_engines_are_scaled_within_their_range(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    stage.lease_seconds = LEASE_SECONDS
    await stage.operator()
    stage.job(inference={**INFERENCE, "replicas": RANGE})
    await stage.until(lambda: stage.cluster.find("statefulsets", NAMESPACE, ENGINES), "it is made")
    await stage.until(lambda: engines(stage) == 2, "it starts with the least")
    await stage.settled()
    assert notes(stage) == []

    scale(stage, 3)
    await stage.settled()
    assert engines(stage) == 3
    assert stage.condition("EnginesReady")[2] == "3/3"
    assert notes(stage) == []

    scale(stage, 9)
    await stage.until(lambda: engines(stage) == 4, "no more than the most")
    await stage.settled()
    assert notes(stage) == [f"{ENGINES} had 9 engines and is set to 4: spec.inference.replicas allows 2 to 4"]
    scale(stage, 3)
    await stage.settled()
    assert engines(stage) == 3, "others may still move it"
    del controllers


async def test_a_number_that_becomes_a_range_stays_until_it_is_moved(stage: Stage) -> None:
    controllers = Controllers(stage.cluster, started=ready)
    stage.lease_seconds = LEASE_SECONDS
    await stage.operator()
    stage.job(inference={**INFERENCE, "replicas": 3})
    await stage.until(lambda: stage.condition("EnginesReady")[0] == "True", "all are ready")
    pods = {pod["metadata"]["uid"] for pod in stage.pods("inference")}

    edit(stage, inference={"replicas": RANGE})
    await stage.settled()
    assert engines(stage) == 3
    assert {pod["metadata"]["uid"] for pod in stage.pods("inference")} == pods, "none was ended for a moment"

    edit(stage, suspend=True)
    await stage.until(lambda: engines(stage) == 0, "it is suspended")
    edit(stage, suspend=False)
    await stage.until(lambda: engines(stage) == 2, "it starts again with the least")
    await stage.settled()
    assert notes(stage) == []

    edit(stage, inference={"replicas": 1})
    await stage.until(lambda: engines(stage) == 1, "a number is the manifest's")
    scale(stage, 3)
    await stage.until(lambda: engines(stage) == 1, "and nobody else's")
    del controllers
