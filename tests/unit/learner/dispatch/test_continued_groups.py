"""Groups that continue over updates: each token is of the version that its turn names, and too old ones are context."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.learner.conftest import Stage
from tests.unit.learner.dispatch.test_acceptance import episode
from tests.unit.learner.fakes import ANSWER, DECOUPLED, running, until

from kestrl.episode import Group, PolicyVersion, Row, Scenario
from kestrl_learner.dispatch.group_queue import GroupQueue, ReadyGroup
from kestrl_learner.ledger import Lease
from kestrl_learner.run import LearnerRun

VERSIONS = [PolicyVersion(job="job", step=step, sha256=f"{step:02d}" * 32) for step in range(8)]


def continuing(stage: Stage, staleness: int = 1, **changes: Any) -> Any:
    algorithm = {"max_staleness": staleness, "stale_groups": "continue", "correction": DECOUPLED}
    return stage.but(algorithm=algorithm, **changes)


def hold_first(stage: Stage, held: asyncio.Event) -> list[str]:
    """Has the second turns of the first training group wait for an event; returns its id once it is known."""
    first: list[str] = []
    worker = stage.workers[0]
    inner = worker.RunGroup

    async def straggling(request: Any, context: Any) -> Any:
        if request.purpose == "train" and not first:
            first.append(request.group_id)
            worker.requests.append(request)
            await held.wait()
        async for answer in inner(request, context):
            yield answer

    worker.RunGroup = straggling
    return first


async def run_with_straggler(stage: Stage, until_step: int, **changes: Any) -> str:
    """Runs to the end; the first group ends after a step. Returns its id."""
    held = asyncio.Event()
    first = hold_first(stage, held)
    async with running(continuing(stage, **changes)) as (run, _):
        async with asyncio.timeout(20):
            while run.progress.state.steps.done < until_step:
                await run.progress.changed()
            newest = run.progress.state.policy.version
            assert newest is not None
            await until(lambda: stage.workers[0].newest is not None and stage.workers[0].newest[1].step >= until_step)
        held.set()
    return first[0]


def steps_of(group: Group) -> set[tuple[int, ...]]:
    """The steps of the versions of the turns of a group's episodes."""
    return {tuple(int(turn.policy.split(".")[1]) for turn in each.turns) for each in group.episodes}


@pytest.mark.usefixtures("quick")
async def test_a_group_that_an_update_makes_too_old_goes_on_with_the_newer_version(staged: Any) -> None:
    async with staged() as stage:
        first = await run_with_straggler(stage, 3)
        trained = {group.id: step for step in range(1, 7) for group in stage.groups(step)}
        step = trained[first]
        (group,) = [group for group in stage.groups(step) if group.id == first]
        assert steps_of(group) == {(0, 3)}, "the first version has been retired meanwhile"
        assert stage.agents[0].retired[0].startswith("test.0.")
        assert max(agent.most_held for agent in stage.agents) <= 3
        record = stage.read(f"metrics/{step:06d}.json")
        age = step - 1
        assert (record["staleness"], record["tokens_by_staleness"][str(age)]) == (age, 3 * ANSWER)
        assert record["tokens_by_staleness"][str(age - 3)] >= 3 * (ANSWER + 1)
        assert sum(record["tokens_by_staleness"].values()) == record["sampled_tokens"]
        own_gap = record["gap"]["own"]
        assert own_gap["max"] < 1e-3, "each token is compared with its own version"
        names = [f"{turn.engine} on {turn.policy}" for each in group.episodes for turn in each.turns]
        assert set(names) <= set(record["gap"]["engines"])
        assert stage.summary["stale"] == {"groups": 0, "by_age": {}, "seconds": 0.0, "tokens": 0, "masked": 0}
        assert stage.states == {"trained": 12}


@pytest.mark.usefixtures("quick")
async def test_tokens_older_than_the_bound_are_context_and_counted(staged: Any) -> None:
    async with staged() as stage:
        first = await run_with_straggler(stage, 5)
        (group,) = [group for group in stage.groups(6) if group.id == first]
        assert steps_of(group) == {(0, 5)}
        for each in group.episodes:
            (row,), (old, new) = each.rows, each.turns
            assert not any(row.mask[old.start : old.end])
            assert not any(row.logprobs[old.start : old.end])
            assert all(row.mask[new.start : new.end])
        record = stage.read("metrics/000006.json")
        assert record["stale"]["masked"] == stage.summary["stale"]["masked"] == 3 * ANSWER
        assert record["staleness"] <= 4
        assert stage.states == {"trained": 12}


@pytest.mark.usefixtures("quick")
async def test_a_learner_that_resumes_attempts_a_continuing_group_again(staged: Any) -> None:
    async with staged() as stage:
        hold_first(stage, asyncio.Event())
        run = LearnerRun(continuing(stage))
        task = asyncio.create_task(run.main())
        async with asyncio.timeout(20):
            while run.progress.state.steps.done < 2:
                await run.progress.changed()
            run.drain()
            await task
        assert 2 <= stage.summary["steps"] < 6
        await LearnerRun(continuing(stage)).main()
        trained = [group.scenario.ordinal for step in range(1, 7) for group in stage.groups(step)]
        assert sorted(trained) == sorted(list(range(6)) * 2)
        assert stage.states == {"trained": 12}


@pytest.mark.usefixtures("quick")
async def test_the_handling_of_stale_groups_may_change_under_a_run(staged: Any) -> None:
    async with staged() as stage:
        algorithm = {"max_staleness": 1, "stale_groups": "release", "correction": DECOUPLED}
        await LearnerRun(stage.but(algorithm=algorithm, max_steps=3)).main()
        await LearnerRun(continuing(stage)).main()
        assert stage.summary["steps"] == 6


def ready(position: int, versions: Sequence[int]) -> ReadyGroup:
    """A group of one episode with a turn of two tokens of each version, behind a token of context each."""
    begun = episode(0)
    (turn,) = begun.turns
    turns = [
        replace(turn, index=place, start=3 * place + 1, end=3 * place + 3, policy=VERSIONS[version].name)
        for place, version in enumerate(versions)
    ]
    mask = b"\0\1\1" * len(versions)
    row = Row(
        token_ids=array("i", [1] * len(mask)),
        mask=mask,
        logprobs=array("f", [-1.5 if on else 0.0 for on in mask]),
        policies=[turn.policy for turn in turns],
    )
    scenario = Scenario(id="s", ordinal=position, messages=[])
    group = Group(id=f"g-{position}", scenario=scenario, episodes=[replace(begun, rows=[row], turns=turns)])
    steps = {version.name: version.step for version in VERSIONS}
    return ReadyGroup(Lease(position, 0, position, 0), group, VERSIONS[versions[0]], steps, whole=group)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 8))
def test_the_tokens_of_older_versions_are_context(versions: list[int], first_step: int) -> None:
    group = ready(0, versions)
    masked, count = group.without_older(first_step)
    assert count == 2 * sum(version < first_step for version in versions)
    assert masked.whole == masked.group
    (before,), (after,) = group.group.episodes[0].rows, masked.group.episodes[0].rows
    assert (before.token_ids, before.policies) == (after.token_ids, after.policies)
    assert before.mask == b"\0\1\1" * len(versions), "what was sampled is not changed"
    for place, version in enumerate(versions):
        on, logprob = (0, 0.0) if version < first_step else (1, -1.5)
        start = 3 * place
        assert list(after.mask[start : start + 3]) == [0, on, on]
        assert list(after.logprobs[start : start + 3]) == [0.0, logprob, logprob]
    assert sum(masked.ages(8).values()) == sum(after.mask)
    assert all(age <= 8 - first_step for age in masked.ages(8))


def test_a_group_is_too_old_when_all_its_tokens_are() -> None:
    queue = GroupQueue(3)
    for position, versions in enumerate(([0, 3], [0, 5], [1, 1])):
        queue.put(ready(position, versions))
    assert [each.lease.position for each in queue.take_older(4)] == [0, 2]
    assert [each.newest for each in queue.take(2)] == [5]
