"""Proofs of engines over time, and what running groups learn of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.learner.fakes import running, until

from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.episode import PolicyVersion
from kestrl_learner.engines.proofs import Proofs

V1, V2, V3 = (PolicyVersion(job="job", step=step, sha256=f"{step}" * 64) for step in (1, 2, 3))


def test_a_proof_counts_for_the_time_in_which_it_held() -> None:
    proofs = Proofs()
    proofs.add(V1)
    proofs.add(V2)
    proofs.observe({"engine-0": {V1.name}, "engine-1": {V1.name}}, now=1.0)
    proofs.observe({"engine-0": {V1.name, V2.name}}, now=5.0)
    assert proofs.since(V1, 4.0) == {V1: {"engine-0", "engine-1"}}
    assert proofs.since(V1, 5.5) == {V1: {"engine-0"}}
    assert proofs.since(V2, 0.0) == {V2: {"engine-0"}}
    proofs.observe({"engine-1": {V1.name}}, now=6.0)
    assert proofs.since(V1, 7.0) == {V1: {"engine-1"}}


def test_proofs_of_a_retired_version_last_as_long_as_a_running_group_may_name_it() -> None:
    proofs = Proofs()
    for number, version in enumerate((V1, V2, V3)):
        proofs.add(version)
        proofs.observe({"engine-0": {version.name}}, now=float(number))
    assert proofs.since(V1, 0.5, newer=True) == {V1: {"engine-0"}, V2: {"engine-0"}, V3: {"engine-0"}}
    assert proofs.since(V1, 1.5, newer=True) == {V1: frozenset(), V2: {"engine-0"}, V3: {"engine-0"}}
    assert proofs.since(V2, 0.5, newer=True) == {V2: {"engine-0"}, V3: {"engine-0"}}
    proofs.forget({V3.name}, before=1)
    assert proofs.since(V1, 0.5) == {V1: {"engine-0"}}
    proofs.forget({V1.name, V3.name}, before=3)
    assert proofs.since(V1, 0.5, newer=True) == {V1: {"engine-0"}, V3: {"engine-0"}}
    proofs.forget({V3.name}, before=3)
    assert proofs.since(V1, 0.5, newer=True) == {V1: frozenset(), V3: {"engine-0"}}


@pytest.mark.usefixtures("quick")
async def test_a_running_group_learns_of_an_engine_that_goes_and_its_turns_are_accepted(staged: Any) -> None:
    async with staged(validation=None, max_steps=2) as stage:
        worker, agent = stage.workers[0], stage.agents[1]
        worker.gate = asyncio.Event()
        async with running(stage.settings):
            await until(lambda: worker.running == 6)
            first = stage.asked()[0]
            assert {engine.name for engine in first.engines} == {"engine-0", "engine-1"}
            agent.state = ipb.ENGINE_STATE_DOWN
            agent.held.clear()
            await until(lambda: worker.updates)
            (update,) = worker.updates
            assert [engine.name for engine in update.engines] == ["engine-0"]
            assert update.engines_revision > first.engines_revision
            assert update.policy == first.policy
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert {turn.engine for group in stage.groups(1) for each in group.episodes for turn in each.turns} == {
            "engine-0",
            "engine-1",
        }


@pytest.mark.usefixtures("quick")
async def test_a_turn_of_an_engine_without_a_proof_is_refused(staged: Any) -> None:
    async with staged(validation=None, max_steps=1) as stage:
        strangers = iter(["engine-7"])

        def of_a_stranger(request: Any, group: Any) -> Any:
            stranger = next(strangers, None)
            if stranger is None:
                return group
            first, *others = group.episodes
            turns = [replace(turn, engine=stranger) for turn in first.turns]
            return replace(group, episodes=[replace(first, turns=turns), *others])

        stage.workers[0].script = of_a_stranger
        async with running(stage.settings):
            pass
        assert stage.summary["failures"] == {"engine/unproved_engine": 1}
