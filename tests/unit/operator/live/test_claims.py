"""Names that are taken: what is there under a name of the job's and is not the job's is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from .stage import JOB, NAMESPACE, Stage

NAME = f"{JOB}-agentrljob"
TAKEN: dict[str, dict[str, Any]] = {
    "ConfigMap": {"data": {"theirs": "kept"}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "Secret": {"type": "Opaque", "data": {"password": "c2VjcmV0"}},
}
PLURALS = {"ConfigMap": "configmaps", "ServiceAccount": "serviceaccounts", "Secret": "secrets"}


def put(stage: Stage, kind: str, **metadata: Any) -> dict[str, Any]:
    objects = stage.cluster.objects
    content = {"metadata": {"name": NAME, "namespace": NAMESPACE, **metadata}, **TAKEN[kind]}
    return objects.create(objects.resource(PLURALS[kind]), NAMESPACE, content, "kubectl")


@pytest.mark.parametrize("kind", list(TAKEN))
async def test_an_object_of_a_user_is_refused_by_name_and_left_alone(stage: Stage, kind: str) -> None:
    theirs = put(stage, kind)
    await stage.operator()
    stage.job()
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is refused")
    message = stage.condition("Accepted")[2]
    assert f"{kind} {NAMESPACE}/{NAME} is there and is not this job's" in message
    assert stage.cluster.get(PLURALS[kind], NAMESPACE, NAME) == theirs
    assert stage.children() == [], "nothing is written before every name is free"
    assert stage.cluster.requests("get", "secrets") == [], "the operator has no right to read any"

    stage.cluster.objects.delete(stage.cluster.objects.resource(PLURALS[kind]), NAMESPACE, NAME)
    await stage.applied()
    made = stage.cluster.get(PLURALS[kind], NAMESPACE, NAME)
    assert made is not None
    assert made["metadata"]["ownerReferences"][0]["name"] == JOB


async def test_an_object_that_takes_the_name_of_a_deleted_one_is_left_alone(stage: Stage) -> None:
    await stage.operator()
    stage.job()
    await stage.applied()
    stage.cluster.objects.delete(stage.cluster.objects.resource("secrets"), NAMESPACE, NAME)
    theirs = put(stage, "Secret")
    stage.cluster.edit("agentrljobs", NAMESPACE, JOB, {"spec": {"rollout": {"replicas": 3}}})
    await stage.until(lambda: stage.condition("Accepted")[1] == "Invalid", "it is refused")
    assert stage.cluster.get("secrets", NAMESPACE, NAME) == theirs
