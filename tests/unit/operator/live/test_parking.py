"""Two jobs that each hold what the other waits for: the younger gives its pods back, the elder gets them."""

from __future__ import annotations

import pytest
from tests.fakes.kubernetes.controllers import Controllers

from kestrl_operator.controllers import observer
from kestrl_operator.status import waiting

from .stage import NAMESPACE, Object, Stage, ready

NO_NODE = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."


def short(controllers: Controllers, pod: Object) -> None:
    """Runs all pods but engines, for which there is no node."""
    if pod["metadata"]["labels"]["kestrl.dev/role"] == "inference":
        controllers.unschedulable(pod, NO_NODE)
    else:
        ready(controllers, pod)


def made_at(stage: Stage, name: str) -> str:
    made: str = stage.cluster.get("agentrljobs", NAMESPACE, name)["metadata"]["creationTimestamp"]
    return made


async def test_the_younger_of_two_jobs_that_wait_for_each_other_gives_its_pods_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "PARTLY_SECONDS", 2.0)
    monkeypatch.setattr(observer, "PARTLY_SECONDS", 2.0)
    controllers = Controllers(stage.cluster, started=short)
    await stage.operator()
    names = ("one", "two")
    for name in names:
        stage.job(name)
    # Both are made within one second, or one after the other.
    elder, younger = sorted(names, key=lambda name: (made_at(stage, name), stage.uid(name)))
    await stage.until(lambda: stage.condition("Scheduled", younger)[1] == "Parked", "the younger gives way")
    assert NO_NODE in stage.condition("Scheduled", younger)[2]
    await stage.until(lambda: not stage.pods("tools", younger), "its pods are gone")
    assert stage.condition("Scheduled", elder)[1] == "Pending"
    assert stage.pods("tools", elder), "the elder keeps its own"
    for pod in stage.pods("inference", elder):
        controllers.run(pod)
    await stage.until(lambda: stage.condition("EnginesReady", elder)[0] == "True", "and gets what it waited for")
    assert stage.condition("Stalled", younger)[0] == "False"


async def test_the_next_operator_lets_a_job_rest_as_long(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "BLOCKED_SECONDS", 1.0)
    controllers = Controllers(stage.cluster, started=lambda made, pod: made.image_missing(pod, "no such image"))
    running = await stage.operator()
    stage.job()
    await stage.until(lambda: stage.condition("Scheduled")[1] == "Parked", "it rests")
    rest = stage.status()["rest"]
    assert (rest["times"], rest["generation"]) == (1, 1)
    assert "no such image" in rest["why"]
    await stage.until(lambda: not stage.cluster.list("pods"), "its pods are gone")
    await stage.settled()
    await stage.stop(running)
    await stage.operator("b")
    await stage.settled()
    assert stage.status()["rest"] == rest
    assert stage.condition("Scheduled")[1] == "Parked"
    assert stage.cluster.list("pods") == []
    del controllers
