"""Backoff: a restarting service must not use up every scenario's attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kestrl._shared.backoff import Backoff
from kestrl.errors import EngineFailure
from kestrl_learner.dispatch import retry_pause
from kestrl_learner.dispatch.retry_pause import RetryPause
from kestrl_learner.run import LearnerRun


class Clock:
    """A loop whose timers are fired by the test."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> None:
        self.timers.append((delay, lambda: callback(*arguments)))


async def test_the_pause_doubles_up_to_a_bound_and_a_success_resets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pause, woken = Clock(), RetryPause(), []
    monkeypatch.setattr(retry_pause.asyncio, "get_running_loop", lambda: clock)
    for number in range(9):
        if number == 8:
            pause.reset()
        pause.start(lambda: woken.append(True))
        assert pause.active
        pause.start(lambda: woken.append(True))  # part of the same pause
        assert len(clock.timers) == number + 1
        clock.timers[-1][1]()
        assert not pause.active
    assert [delay for delay, _ in clock.timers] == [0.5, 1, 2, 4, 8, 16, 30, 30, 0.5]
    assert len(woken) == 9


async def test_while_it_pauses_no_group_is_started(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is away for a while costs attempts of the groups that ran, not of all that might have."""
    monkeypatch.setattr(retry_pause, "BACKOFF", Backoff(0.4, 30))
    async with staged() as stage:
        loop = asyncio.get_running_loop()
        asked: list[float] = []

        def away(request: Any, group: Any) -> Any:
            if request.purpose != "train":
                return group
            asked.append(loop.time())
            return group if len(asked) > 2 else EngineFailure("it is being started again", code="engine_lost")

        stage.workers[0].script = away
        await LearnerRun(stage.but(max_steps=2)).main()
        assert asked[2] - asked[0] >= 0.39  # the two that ran at once failed; the next came after the pause
        assert len(asked) == 6
        assert stage.summary["status"] == "succeeded"
