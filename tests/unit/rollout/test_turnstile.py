"""Who was answered goes on a few at a time while the core has time to spare, in the order of coming, and nobody is left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kestrl_rollout.turnstile import BUSY, FEW, Turnstile

CROWD = 64


class Crowd:
    """Episodes that come to a turnstile together; who went on in which round of the loop."""

    def __init__(self, episodes: int = CROWD) -> None:
        self.turnstile = Turnstile(lambda: episodes)
        self.rounds: list[list[int]] = []
        self.tasks = [asyncio.create_task(self._one(number)) for number in range(CROWD)]

    async def _one(self, number: int) -> None:
        await self.turnstile.enter()
        self.rounds[-1].append(number)

    async def watch(self) -> list[list[int]]:
        """Until all went on, or were cancelled."""
        while not all(task.done() for task in self.tasks):
            self.rounds.append([])
            await asyncio.sleep(0)
            assert len(self.rounds) < 10 * CROWD, "somebody is left behind"
        return [went for went in self.rounds if went]


async def test_a_crowd_dissolves_in_the_order_of_coming() -> None:
    rounds = await Crowd().watch()
    assert [number for went in rounds for number in went] == list(range(CROWD))
    assert len(rounds[0]) == FEW
    assert max(map(len, rounds)) <= CROWD // 4
    assert len(rounds) > 4


async def test_a_busy_core_takes_all_at_once() -> None:
    assert await Crowd(episodes=BUSY + 1).watch() == [list(range(CROWD))]


async def test_who_is_cancelled_while_waiting_takes_nobodys_turn() -> None:
    crowd = Crowd()
    crowd.rounds.append([])
    await asyncio.sleep(0)
    for task in crowd.tasks[FEW : CROWD - 3]:
        task.cancel()
    rounds = await crowd.watch()
    assert [number for went in rounds for number in went] == [*range(FEW), *range(CROWD - 3, CROWD)]


async def test_who_comes_alone_waits_for_nothing() -> None:
    turnstile = Turnstile(lambda: 1)
    for _ in range(3):
        entering = turnstile.enter()
        with pytest.raises(StopIteration):
            entering.send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_it_stops_turning_when_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    await Crowd().watch()
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
    assert not [callback for callback in soon if isinstance(getattr(callback, "__self__", None), Turnstile)]
