"""Leader election: one operator writes at a time, whatever happens to its requests and clocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
from tests.fakes.kubernetes import Controllers

from .stage import NAMESPACE, Stage

PLACE = ("leases", "kestrl-system", "kestrl-operator")
SECONDS = 1.0
"""Duration of the lease, where a test does not set another."""


@pytest.fixture(autouse=True)
def short(stage: Stage) -> None:
    stage.lease_seconds = SECONDS


@asynccontextmanager
async def stirring(stage: Stage, controllers: Controllers) -> AsyncGenerator[None]:
    """Changes that the leader must write about, all the time."""

    async def stir() -> None:
        for number in count():
            for pod in stage.pods("learner"):
                controllers.unschedulable(pod, f"look {number}")
            await asyncio.sleep(0.02)

    task = asyncio.create_task(stir())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def taken(stage: Stage, user: str) -> float | None:
    """When a user's first successful write of the lease was requested."""
    writes = [
        item for item in stage.cluster.requests(resource="leases", user=user) if item.verb in {"create", "update"}
    ]
    return next((item.at for item in writes if item.status in {200, 201}), None)


async def test_two_operators_watch_and_one_writes(stage: Stage) -> None:
    first, second = await stage.operator("a", lease_seconds=10.0), await stage.operator("b", lease_seconds=10.0)
    leader = stage.holder()
    stage.job()
    await stage.applied()
    await stage.settled()
    other = {"a": "b", "b": "a"}[leader]
    assert stage.cluster.writes(user=leader)
    assert stage.cluster.writes(user=other) == []
    for running in (first, second):
        assert await running.asked("healthz") == (200, "ok")
        assert await running.asked("readyz") == (200, "ok")


@pytest.mark.parametrize(
    ("seconds", "trouble"),
    [
        (1.0, [{"status": 500}]),
        (1.0, [{"drop": True}]),
        (1.0, [{"delay": 60.0, "late": True}]),
        (2.0, [{"status": 500, "times": 2}, {"delay": 60.0}]),
    ],
    ids=["refused", "cut", "answered too late", "refused and then not answered"],
)
async def test_a_leader_that_cannot_renew_stops_before_another_begins(
    stage: Stage, seconds: float, trouble: list[dict[str, Any]]
) -> None:
    controllers = Controllers(stage.cluster)
    await stage.operator("a", lease_seconds=seconds)
    await stage.operator("b", lease_seconds=seconds)
    stage.job()
    await stage.applied()
    async with stirring(stage, controllers):
        await stage.until(lambda: stage.pods("learner"), "there is something to write about")
        for fault in trouble:
            stage.cluster.fail(resource="leases", user="a", **fault)
        await stage.until(lambda: stage.holder() == "b", "b leads")
        await stage.until(lambda: stage.cluster.writes(user="b"), "b writes")
    since = taken(stage, "b")
    assert since is not None
    last = max(item.at for item in stage.cluster.writes(user="a"))
    assert last < since, f"a wrote {last - since:.3f} s after b had begun"


async def test_a_leader_that_stops_hands_over_at_once(stage: Stage) -> None:
    first = await stage.operator("a", lease_seconds=20.0)
    await stage.operator("b", lease_seconds=20.0)
    began = asyncio.get_running_loop().time()
    await stage.stop(first)
    assert stage.holder() in {"", "b"}
    await stage.until(lambda: stage.holder() == "b", "b leads")
    assert asyncio.get_running_loop().time() - began < 15.0, "waited for the lease to run out"
    stage.job()
    await stage.applied()
    assert {item.user for item in stage.cluster.writes()} == {"b"}


async def test_a_failed_release_of_the_lease_does_not_wait_long(stage: Stage) -> None:
    running = await stage.operator("a")
    stage.cluster.fail(resource="leases", delay=60.0)
    began = asyncio.get_running_loop().time()
    await stage.stop(running)
    assert asyncio.get_running_loop().time() - began < 20.0, "the kubelet would have killed it"


async def test_the_clocks_of_two_machines_are_never_compared(stage: Stage) -> None:
    past, future = "1999-01-01T00:00:0{}.000000Z", "2099-01-01T00:00:0{}.000000Z"
    spec = {"holderIdentity": "ghost", "leaseDurationSeconds": 2, "renewTime": past.format(9), "leaseTransitions": 3}
    stage.cluster.create("leases", {"metadata": {"name": PLACE[2], "namespace": PLACE[1]}, "spec": spec})
    stage.begin("a")
    await stage.until(lambda: stage.cluster.requests("get", "leases"), "it is looked at")
    looks, renewed = 0, 0.0
    for number in range(8):
        # Renewed, by a clock with another time: it is held.
        looks, renewed = len(stage.cluster.requests("get", "leases")), asyncio.get_running_loop().time()
        stage.cluster.edit(*PLACE, {"spec": {"renewTime": (past, future)[number % 2].format(number)}})
        await stage.until(lambda seen=looks: len(stage.cluster.requests("get", "leases")) > seen, "it is looked at")
        assert stage.holder() == "ghost"
    # Expired, although it is valid for decades by that clock.
    await stage.until(lambda: stage.holder() == "a", "the lease has run out")
    assert asyncio.get_running_loop().time() - renewed > 2.0
    assert stage.cluster.get(*PLACE)["spec"]["leaseTransitions"] == 4


async def test_a_leader_that_loses_its_lease_stops_and_leads_again_when_it_is_free(stage: Stage) -> None:
    controllers = Controllers(stage.cluster)
    await stage.operator("a")
    stage.job()
    await stage.applied()
    async with stirring(stage, controllers):
        stage.cluster.edit(*PLACE, {"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 1}})
        seen = len(stage.cluster.requests("get", "leases"))
        await stage.until(lambda: len(stage.cluster.requests("get", "leases")) > seen + 1, "a has seen it")
        stopped = asyncio.get_running_loop().time()
        await stage.until(lambda: stage.holder() == "a", "a leads again")
        again = max(item.at for item in stage.cluster.requests("update", "leases") if item.status == 200)
        await stage.until(lambda: stage.cluster.writes()[-1].at > again, "a writes again")
    between = [item for item in stage.cluster.writes() if stopped < item.at < again]
    assert between == [], "a wrote though another held the lease"
    assert stage.cluster.list("pods", NAMESPACE)
