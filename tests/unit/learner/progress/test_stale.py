"""Groups that grow too old while they run: given up and counted, or waited for; either way the trained mix is the
sampled mix."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import pytest
from tests.unit.learner.conftest import Stage, write_rows
from tests.unit.learner.fakes import DECOUPLED, running

from kestrl._shared.plan.settings.common import DataSettings
from kestrl_learner.run import LearnerRun
from kestrl_learner.store.run_record import RunRecord

pytestmark = pytest.mark.usefixtures("quick")
STEPS = 8


def slow_first(stage: Stage, held: asyncio.Event) -> list[str]:
    """Has the first training group wait for an event; returns its id once it is known."""
    first: list[str] = []
    worker = stage.workers[0]
    inner = worker.RunGroup

    async def straggling(request: Any, context: Any) -> Any:
        if request.purpose == "train" and not first:
            first.append(request.group_id)
            await held.wait()
        async for answer in inner(request, context):
            yield answer

    worker.RunGroup = straggling
    return first


def overlapping(stage: Stage, staleness: int, *, stale_groups: str = "release", **changes: Any) -> Any:
    algorithm = {"max_staleness": staleness, "stale_groups": stale_groups, "correction": DECOUPLED}
    return stage.but(algorithm=algorithm, **changes)


async def test_a_group_given_up_is_counted_by_age_and_length(staged: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with staged() as stage:
        slow_first(stage, asyncio.Event())
        async with running(overlapping(stage, 1)) as (run, _):
            pass
        stale = stage.summary["stale"]
        assert (stale["groups"], stale["by_age"], stale["tokens"]) == (1, {"2": 1}, 0)
        assert stale["seconds"] > 0
        restored = RunRecord.from_json({"stale": stale}, "").stale
        assert restored.facts() == stale == run.progress.state.history.stale.facts()
        steps = [stage.read(f"metrics/{step:06d}.json")["stale"]["groups"] for step in range(1, 7)]
        assert sum(steps) == 1
        assert "its group was 2 steps old" in caplog.text


async def test_counts_of_groups_given_up_outlive_a_resume(staged: Any) -> None:
    async with staged() as stage:
        slow_first(stage, asyncio.Event())
        async with running(overlapping(stage, 1, max_steps=4)):
            pass
        before = stage.summary["stale"]
        await LearnerRun(overlapping(stage, 1)).main()
        assert stage.summary["stale"] == before
        assert before["groups"] == 1


async def test_a_step_waits_for_a_group_that_it_would_make_too_old(staged: Any) -> None:
    async with staged() as stage:
        held = asyncio.Event()
        first = slow_first(stage, held)
        async with running(overlapping(stage, 1, stale_groups="wait")) as (run, _):
            async with asyncio.timeout(20):
                # Step 0 takes what is there; step 1 would make the group 2 steps old and waits, with enough groups at
                # hand.
                while run.progress.state.steps.done != 1 or run.progress.state.gauges.groups_ready < 2:
                    await run.progress.changed()
            held.set()
        assert stage.summary["stale"]["groups"] == 0
        trained = [group.id for group in stage.groups(2)]
        assert first[0] in trained
        staleness = [stage.read(f"metrics/{step:06d}.json")["staleness"] for step in range(1, 7)]
        assert max(staleness) == staleness[1] == 1


async def test_a_drain_does_not_wait_for_a_straggler(staged: Any) -> None:
    async with staged() as stage:
        slow_first(stage, asyncio.Event())
        run = LearnerRun(overlapping(stage, 1, stale_groups="wait"))
        task = asyncio.create_task(run.main())
        async with asyncio.timeout(20):
            while run.progress.state.steps.done != 1 or run.progress.state.gauges.groups_ready < 2:
                await run.progress.changed()
            run.drain()
            await task
        assert (run.progress.state.activity.phase, stage.summary["steps"]) == ("suspended", 1)


@pytest.mark.parametrize("kind", ["wait", "release", "continue"])
@pytest.mark.parametrize("staleness", [1, 3])
async def test_the_trained_mix_is_the_sampled_mix(staged: Any, tmp_path: Any, staleness: int, kind: str) -> None:
    """One scenario in four is slow in every attempt; none is trained on less often for it, whatever is given up
    meanwhile."""
    data = DataSettings(path=str(write_rows(tmp_path / "mix.jsonl", 2 * STEPS)))
    async with staged(data=data, epochs=1) as stage:
        for agent in stage.agents:
            agent.slots = staleness + 2
        worker, chance = stage.workers[0], random.Random(staleness)
        inner = worker.RunGroup

        async def uneven(request: Any, context: Any) -> Any:
            if request.purpose == "train":
                slow = request.scenario.ordinal % 4 == 0
                await asyncio.sleep(chance.uniform(0.3, 0.6) if slow else chance.uniform(0.0, 0.02))
            async for answer in inner(request, context):
                yield answer

        worker.RunGroup = uneven
        async with running(overlapping(stage, staleness, stale_groups=kind)):
            pass
        groups = [group for step in range(STEPS) for group in stage.groups(step + 1)]
        sampled = Counter(request.scenario.ordinal for request in stage.asked())
        assert Counter(group.scenario.ordinal for group in groups) == Counter(range(2 * STEPS))
        assert sampled.keys() == set(range(2 * STEPS))
        # A group may be given up before its request is sent.
        assert sampled.total() - len(groups) <= stage.summary["stale"]["groups"]
        if kind != "release":
            assert sampled.total() == len(groups)
            assert stage.summary["stale"]["groups"] == 0
        late = [stage.read(f"metrics/{step:06d}.json")["staleness"] for step in range(1, STEPS + 1)]
        assert max(late) <= (4 * staleness if kind == "continue" else staleness)
