"""How many episodes may run at once: what engines say of themselves decides."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.learner.fakes import DECOUPLED, running, until

from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl_learner.engines import engines
from kestrl_learner.engines.admission import EngineLoad, EpisodeLimit
from kestrl_learner.run import LearnerRun

CALM = EngineLoad(kv_usage=0.3, running=4)
FULL = EngineLoad(kv_usage=0.97, running=4)
QUEUED = EngineLoad(kv_usage=0.5, running=4, waiting=5)


def test_without_trouble_there_is_no_limit() -> None:
    admission = EpisodeLimit(8)
    for _ in range(5):
        admission.update({"a": CALM, "b": CALM}, running=64, ceiling=64)
    assert admission.limit is None
    assert admission.groups(64) is None


def test_a_preemption_lowers_the_limit_and_calm_raises_it_again() -> None:
    admission = EpisodeLimit(8)
    admission.update({"a": EngineLoad(preemptions=1)}, running=64, ceiling=64)
    assert admission.limit == 44
    assert admission.groups(40) == 0
    assert admission.groups(20) == 3
    limits = []
    for _ in range(3):
        admission.update({"a": EngineLoad(preemptions=1)}, running=40, ceiling=64)
        limits.append(admission.limit)
    assert limits == [52, 60, None]


def test_full_engines_get_no_more_than_they_have() -> None:
    admission = EpisodeLimit(8)
    admission.update({"a": FULL, "b": QUEUED}, running=32, ceiling=64)
    assert admission.limit == 32
    admission.update({"a": FULL, "b": CALM}, running=32, ceiling=64)
    assert admission.limit == 40


def test_an_engine_that_was_restarted_counts_from_nothing() -> None:
    admission = EpisodeLimit(8)
    admission.update({"a": EngineLoad(preemptions=9)}, running=64, ceiling=64)
    before = admission.limit
    admission.update({"a": EngineLoad(preemptions=0)}, running=32, ceiling=64)
    assert before is not None
    assert admission.limit == before + 8


def test_old_preemptions_do_not_count_again_when_an_agent_returns() -> None:
    admission = EpisodeLimit(8)
    admission.update({"a": EngineLoad(preemptions=9)}, running=64, ceiling=64)
    admission.update({}, running=32, ceiling=64)
    before = admission.limit
    admission.update({"a": EngineLoad(preemptions=9)}, running=32, ceiling=64)
    assert before is not None
    assert admission.limit is None or admission.limit > before


LOADS = st.builds(
    EngineLoad,
    kv_usage=st.floats(0, 1),
    running=st.integers(0, 100),
    waiting=st.integers(0, 100),
    preemptions=st.integers(0, 5),
)


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("ab"), LOADS), st.integers(0, 200))), st.integers(1, 16))
def test_whatever_engines_say_a_group_may_always_run(looks: list[tuple[dict[str, Any], int]], size: int) -> None:
    admission = EpisodeLimit(size)
    for loads, busy in looks:
        admission.update(loads, running=busy, ceiling=128)
        assert admission.limit is None or size <= admission.limit
        allowed = admission.groups(0)
        assert allowed is None or allowed >= 1


@pytest.mark.parametrize(("concurrency", "stragglers", "at_once"), [(3, 0, 2), (3, 2, 2), (3, 3, 1)])
async def test_a_group_holds_as_many_slots_as_it_has_episodes_that_run(
    staged: Any, concurrency: int, stragglers: int, at_once: int
) -> None:
    """One that is judged holds none, one with a straggler one; where one is free the next group begins."""
    async with staged() as stage:
        worker = stage.workers[0]
        worker.concurrency, worker.stragglers = concurrency, stragglers
        worker.judging = asyncio.Event()
        async with running(stage.but(validation=None, max_steps=1)):
            await until(lambda: len(stage.asked()) == at_once)
            if at_once == 1:
                worker.judging.set()
                await until(lambda: len(stage.asked()) == 2)
                assert worker.most_running == 3
            worker.judging.set()
        assert stage.summary["status"] == "succeeded"


async def test_what_the_engines_allow_is_a_number_of_episodes_that_run(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "POLL_SECONDS", 0.005)
    async with staged() as stage:
        worker = stage.workers[0]
        worker.concurrency, worker.gate, worker.judging = 15, asyncio.Event(), asyncio.Event()
        wanted = {"groups_per_step": 3, "max_staleness": 2, "correction": DECOUPLED}
        async with running(stage.but(validation=None, max_steps=2, algorithm=wanted)):
            await until(lambda: worker.running == 15)  # five groups of three
            for agent in stage.agents:
                agent.load = ipb.EngineLoad(kv_usage=1.0, running=3, preemptions=1)
            targets = [agent.looks + 2 for agent in stage.agents]
            await until(lambda: all(agent.looks >= look for agent, look in zip(stage.agents, targets, strict=True)))
            worker.gate.set()
            await until(lambda: len(stage.asked()) == 6)  # five are being judged, and none of them counts
            worker.judging.set()
        assert stage.summary["status"] == "succeeded"


async def test_a_run_starts_fewer_groups_when_its_engines_are_short_of_cache(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "POLL_SECONDS", 0.005)
    async with staged() as stage:
        worker, running = stage.workers[0], list[int]()
        worker.gate = asyncio.Event()
        worker.script = lambda request, group: running.append(worker.running) or group
        run = asyncio.create_task(
            LearnerRun(stage.but(validation=None, max_steps=3, algorithm={"groups_per_step": 3})).main()
        )
        async with asyncio.timeout(20):
            while worker.running < 9:  # noqa: ASYNC110 - the fake only has a count; three groups run at once
                await asyncio.sleep(0.005)
            for agent in stage.agents:
                agent.load = ipb.EngineLoad(kv_usage=1.0, running=3, preemptions=1)
            targets = [agent.looks + 2 for agent in stage.agents]
            while any(agent.looks < look for agent, look in zip(stage.agents, targets, strict=True)):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.005)
            worker.gate.set()
            await run
        assert stage.summary["status"] == "succeeded"
        assert len(running) == 9
        assert max(running[3:]) <= 6  # seven tenths of nine, in whole groups
