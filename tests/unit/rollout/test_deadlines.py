"""Deadlines report their scope and cancel their body like `asyncio.timeout`."""

from __future__ import annotations

import asyncio

import pytest

from kestrl.errors import Boundary, DeadlineExceeded
from kestrl_rollout.deadlines import Scope, Waiting, deadline, now

FAR = 1000.0
SOON = 0.02


async def test_a_deadline_says_which_it_was_and_what_was_waited_for() -> None:
    waiting = Waiting()

    async def episode() -> None:
        async with deadline(Scope.EPISODE, now() + FAR, waiting):
            with waiting.on(Boundary.TOOL):
                async with deadline(Scope.TURN, now() + SOON, waiting):
                    await asyncio.Event().wait()

    with pytest.raises(DeadlineExceeded) as caught:
        await episode()
    assert (caught.value.code, caught.value.boundary) == ("turn_deadline", Boundary.TOOL)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_of_two_that_passed_together_the_outer_counts() -> None:
    waiting, at = Waiting(), now() - 1
    with pytest.raises(DeadlineExceeded) as caught:
        async with deadline(Scope.EPISODE, at, waiting), deadline(Scope.TURN, at, waiting):
            await asyncio.Event().wait()
    assert caught.value.code == "episode_deadline"


async def test_who_is_cancelled_from_outside_meanwhile_stays_cancelled() -> None:
    waiting, entered = Waiting(), asyncio.Event()

    async def work() -> None:
        async with deadline(Scope.TURN, now() - 1, waiting):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_that_comes_first_passes() -> None:
    waiting = Waiting()

    async def turn() -> None:
        async with deadline(Scope.TURN, now() - 1, waiting):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise ValueError("mine") from error

    with pytest.raises(ValueError, match="mine"):
        await turn()
    await asyncio.sleep(0)  # a cancellation left over would end this


async def test_tasks_of_one_episode_have_deadlines_of_their_own() -> None:
    waiting = Waiting()

    async def work(at: float) -> str:
        try:
            async with deadline(Scope.TOOL, at, waiting):
                await asyncio.Event().wait()
        except DeadlineExceeded as late:
            return late.code
        return ""

    began = now()
    slow = asyncio.create_task(work(began + FAR))
    assert await work(began + SOON) == "tool_deadline"
    assert not slow.done()
    slow.cancel()
    await asyncio.wait([slow])
