"""The pause after trouble: what is being started again must not use up every scenario's attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kestrl.errors import EngineFailure
from kestrl_learner import collect
from kestrl_learner.collect import Trouble
from kestrl_learner.run import Run


async def test_the_pause_doubles_up_to_a_bound_and_success_ends_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(collect, "LONGEST_PAUSE", 0.03)
    loop, trouble, pauses = asyncio.get_running_loop(), Trouble(), []

    async def one() -> None:
        over, began = asyncio.Event(), loop.time()
        trouble.again(over.set)
        assert trouble.pausing
        trouble.again(over.set)  # a part of the same trouble
        await over.wait()
        assert not trouble.pausing
        pauses.append(loop.time() - began)

    for _ in range(4):
        await one()
    trouble.over()
    await one()
    for pause, least in zip(pauses, (0.01, 0.02, 0.03, 0.03, 0.01), strict=True):
        assert pause == pytest.approx(least, abs=0.009)


async def test_while_it_pauses_no_group_is_started(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is away for a while costs attempts of the groups that ran, not of all that might have."""
    monkeypatch.setattr(collect, "FIRST_PAUSE", 0.4)
    async with staged() as stage:
        loop = asyncio.get_running_loop()
        asked: list[float] = []

        def away(request: Any, group: Any) -> Any:
            if request.purpose != "train":
                return group
            asked.append(loop.time())
            back = asked[0] + 0.3
            return group if loop.time() > back else EngineFailure("it is being started again", code="engine_lost")

        stage.workers[0].script = away
        await Run(stage.but(max_steps=2)).main()
        failed = [moment for moment in asked if moment <= asked[0] + 0.3]
        assert len(failed) == 2  # the two that ran at once
        assert stage.summary["status"] == "succeeded"
        assert all("dropped" not in reason for reason in stage.summary["failures"])
