"""Episodes resume a few per pass, in order of arrival, and none is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kestrl_rollout.pacing import MAX_PACED_EPISODES, MIN_RESUMED, ResumePacer

BATCH = 64


class Batch:
    """Episodes that reach a pacer together, and the pass in which each resumed."""

    def __init__(self, episodes: int = BATCH) -> None:
        self.pacer = ResumePacer(lambda: episodes)
        self.passes: list[list[int]] = []
        self.tasks = [asyncio.create_task(self._one(number)) for number in range(BATCH)]

    async def _one(self, number: int) -> None:
        await self.pacer.enter()
        self.passes[-1].append(number)

    async def watch(self) -> list[list[int]]:
        """Waits until all resumed or were cancelled."""
        while not all(task.done() for task in self.tasks):
            self.passes.append([])
            await asyncio.sleep(0)
            assert len(self.passes) < 10 * BATCH, "an episode is left behind"
        return [resumed for resumed in self.passes if resumed]


async def test_a_batch_resumes_a_few_at_a_time_in_order() -> None:
    passes = await Batch().watch()
    assert [number for resumed in passes for number in resumed] == list(range(BATCH))
    assert len(passes[0]) == MIN_RESUMED
    assert max(map(len, passes)) <= BATCH // 4
    assert len(passes) > 4


async def test_with_many_episodes_all_resume_at_once() -> None:
    assert await Batch(episodes=MAX_PACED_EPISODES + 1).watch() == [list(range(BATCH))]


async def test_a_cancelled_waiter_takes_no_turn() -> None:
    batch = Batch()
    batch.passes.append([])
    await asyncio.sleep(0)
    for task in batch.tasks[MIN_RESUMED : BATCH - 3]:
        task.cancel()
    passes = await batch.watch()
    assert [number for resumed in passes for number in resumed] == [*range(MIN_RESUMED), *range(BATCH - 3, BATCH)]


async def test_a_single_episode_does_not_wait() -> None:
    pacer = ResumePacer(lambda: 1)
    for _ in range(3):
        entering = pacer.enter()
        with pytest.raises(StopIteration):
            entering.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_passes_stop_when_no_episode_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    await Batch().watch()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loop, soon = asyncio.get_running_loop(), list[Any]()
    call_soon = loop.call_soon

    def noted(callback: Any, *arguments: Any, **options: Any) -> asyncio.Handle:
        soon.append(callback)
        return call_soon(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon", noted)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not [callback for callback in soon if isinstance(getattr(callback, "__self__", None), ResumePacer)]
