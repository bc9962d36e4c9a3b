"""The queue between source and step, and a source of groups that are not rolled out."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kestrl.algorithms import Algorithm
from kestrl.episode import Episode, Group, PolicyVersion, Purpose, Scenario, StopReason
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeStore, ObjectEpisodeStore, StoredGroup
from kestrl_learner import run as run_module
from kestrl_learner.dispatch import testing
from kestrl_learner.dispatch.group_queue import GroupQueue, ReadyGroup
from kestrl_learner.dispatch.group_source import GroupSource
from kestrl_learner.dispatch.running_groups import RunningGroup, RunningGroups
from kestrl_learner.dispatch.testing import CheckedSource
from kestrl_learner.ledger import Lease, Ledger
from kestrl_learner.run import LearnerRun
from kestrl_learner.run_resources import RunResources


def policy(step: int) -> PolicyVersion:
    return PolicyVersion(job="job", step=step, sha256="ab" * 32)


def ready(position: int, step: int) -> ReadyGroup:
    scenario = Scenario(id=str(position), ordinal=position, messages=[])
    group = Group(id=f"g-{position}", scenario=scenario, episodes=[])
    return ReadyGroup(Lease(position, 0, position, 0), group, policy(step), {policy(step).name: step})


def positions(groups: list[ReadyGroup]) -> list[int]:
    return [item.lease.position for item in groups]


def test_groups_of_the_oldest_policy_are_taken_first_then_by_position() -> None:
    queue = GroupQueue(9)
    for position, step in ((5, 2), (1, 3), (4, 2), (3, 1)):
        queue.put(ready(position, step))
    assert sorted(queue.versions()) == [1, 2, 2, 3]
    assert positions(queue.take_older(2)) == [3]
    assert positions(queue.take(2)) == [4, 5]
    assert positions(queue.take(2)) == [1]
    assert len(queue) == 0


def test_a_queue_holds_no_more_than_the_staleness_bound_lets_start() -> None:
    queue = GroupQueue(1)
    queue.put(ready(0, 0))
    with pytest.raises(AssertionError, match="more than 1 groups"):
        queue.put(ready(1, 0))


async def test_a_waiting_step_is_woken_by_groups_and_by_changes_at_the_source() -> None:
    queue, over = GroupQueue(9), array("b")
    waiting = asyncio.create_task(queue.wait_for(lambda: len(queue) >= 2 or bool(over)))
    for position in range(2):
        assert not waiting.done()
        queue.put(ready(position, 0))
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        await waiting
    queue.take(2)
    waiting = asyncio.create_task(queue.wait_for(lambda: len(queue) >= 2 or bool(over)))
    await asyncio.sleep(0)
    assert not waiting.done()
    over.append(1)
    queue.notify()
    async with asyncio.timeout(20):
        await waiting


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_running_groups_that_are_given_up_are_counted_apart() -> None:
    running, tasks = RunningGroups(), list[asyncio.Task[None]]()
    for position, step in ((2, 0), (1, 1), (3, 2)):
        task = asyncio.create_task(for_ever())
        running.add(task, RunningGroup(position, policy(step), 4, 0.0, begun=position != 1))
        tasks.append(task)
    running.end_older(1)
    assert (len(running), running.wanted(), running.episodes()) == (3, 2, 12)
    assert running.is_outdated(tasks[0])
    assert running.versions_in_use() == {policy(1).name, policy(2).name}
    late = running.first(1)
    assert late == [tasks[1]], "the first by position that is not too old"
    running.end_late(late)
    assert running.versions() == [2]
    await asyncio.sleep(0)
    assert [task.cancelled() for task in tasks] == [True, False, False], "one that has not begun is not cancelled"
    for task in tasks:
        running.remove(task)
        task.cancel()
    await asyncio.wait(tasks)
    assert len(running) == 0


class Replay(GroupSource):
    """Groups of an earlier run, from its stored episodes."""

    def __init__(self, ledger: Ledger, episodes: EpisodeStore) -> None:
        self._ledger, self._episodes = ledger, episodes
        self.began: list[tuple[str, int]] = []

    def begin(self, policy: PolicyVersion, step: int) -> None:
        self.began.append((policy.name, step))

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def take(self, step: int) -> list[ReadyGroup]:
        taken: list[ReadyGroup] = []
        for group in (each.trained for each in self._episodes.read(Purpose.TRAIN, step + 1).stored):
            lease, made_by = self._ledger.lease(step), group.episodes[0].policy
            assert lease is not None
            assert made_by is not None
            self._ledger.finish(lease)
            taken.append(ReadyGroup(lease, group, made_by, {made_by.name: made_by.step}))
        return taken

    def take_ended(self) -> list[StoredGroup]:
        return []

    def advance(self, policy: PolicyVersion) -> None:
        pass

    def versions_in_use(self) -> set[str]:
        return set()

    def accepted_from(self) -> int:
        return 0

    def drain(self) -> None:
        pass


async def test_training_takes_groups_from_any_source(
    staged: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = run_module._rollouts

    def checked(resources: RunResources, vocabulary: int, ledger: Ledger, algorithm: Algorithm) -> GroupSource:
        return CheckedSource(rollouts(resources, vocabulary, ledger, algorithm), ledger)

    async with staged() as stage:
        monkeypatch.setattr(run_module, "_rollouts", checked)
        await LearnerRun(stage.but(max_steps=2, validation=None)).main()
        asked, trained = len(stage.asked()), stage.adapter_bytes(2)
        recorded = ObjectEpisodeStore(open_store(stage.settings.storage))
        made: list[Replay] = []

        def replay(_: RunResources, __: int, ledger: Ledger, ___: Algorithm) -> GroupSource:
            made.append(Replay(ledger, recorded))
            return CheckedSource(made[-1], ledger)

        monkeypatch.setattr(run_module, "_rollouts", replay)
        other = tmp_path / "other"
        other.mkdir()
        again = {"storage": (other / "store").as_uri(), "database": f"sqlite:///{other}/ledger.db"}
        await LearnerRun(stage.but(max_steps=2, validation=None, **again)).main()
        assert len(stage.asked()) == asked, "no group is rolled out"
        (folder,) = (other / "store" / "adapters").glob("000002-*")
        assert (folder / "adapter_model.safetensors").read_bytes() == trained
        assert [step for _, step in made[0].began] == [0]


class Scripted(GroupSource):
    """A source of the groups that a test gives it."""

    def __init__(self, *groups: ReadyGroup) -> None:
        self.groups = list(groups)
        self.versions: set[str] = set()

    def begin(self, policy: PolicyVersion, step: int) -> None:
        pass

    async def run(self) -> None:
        pass

    async def take(self, step: int) -> list[ReadyGroup]:
        if not self.groups:
            await asyncio.Event().wait()
        return self.groups

    def advance(self, policy: PolicyVersion) -> None:
        pass

    def versions_in_use(self) -> set[str]:
        return self.versions

    def accepted_from(self) -> int:
        return 0

    def drain(self) -> None:
        pass


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(f"sqlite:///{tmp_path}/ledger.db", seed=1, size=4, epochs=1)
    yield opened
    opened.close()


def finished(ledger: Ledger, sampled_by: PolicyVersion) -> ReadyGroup:
    """A group of the next lease, which is finished."""
    lease = ledger.lease(0)
    assert lease is not None
    ledger.finish(lease)
    episode = Episode(
        id=f"g-{lease.position}/0",
        group_id=f"g-{lease.position}",
        scenario_id="s",
        index=0,
        seed=1,
        rows=[],
        turns=[],
        tool_calls=[],
        messages=[],
        stop_reason=StopReason.ANSWERED,
        failure=None,
        policy=sampled_by,
        engine="engine-0",
        started_at=0.0,
        seconds=1.0,
    )
    scenario = Scenario(id="s", ordinal=lease.ordinal, messages=[])
    group = Group(id=episode.group_id, scenario=scenario, episodes=[episode])
    return ReadyGroup(lease, group, policy(0), {policy(0).name: 0})


async def test_a_source_that_breaks_its_contract_is_found(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    good = finished(ledger, policy(0))
    source = CheckedSource(Scripted(good), ledger)
    source.begin(policy(0), 0)
    assert await source.take(0) == [good]
    with pytest.raises(AssertionError, match="a lease is taken once"):
        await source.take(1)
    with pytest.raises(AssertionError, match="a source runs until it is cancelled"):
        await source.run()
    with pytest.raises(AssertionError, match="a source begins once"):
        source.begin(policy(0), 0)
    late = finished(ledger, policy(1))
    with pytest.raises(AssertionError, match="a group names the version that its episodes began with"):
        await CheckedSource(Scripted(late), ledger).take(0)
    ledger.train([good.lease, late.lease], 1)
    with pytest.raises(AssertionError, match="leases of taken groups are finished; of 1 0 are"):
        await CheckedSource(Scripted(good), ledger).take(0)
    scripted = Scripted()
    scripted.versions = {"someone's"}
    source = CheckedSource(scripted, ledger)
    source.begin(policy(0), 0)
    with pytest.raises(AssertionError, match="published versions alone, not someone's"):
        source.versions_in_use()
    monkeypatch.setattr(testing, "DRAIN_SECONDS", 0.05)
    source.drain()
    with pytest.raises(AssertionError, match="lets `take` return"):
        await source.take(0)
