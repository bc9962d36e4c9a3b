"""Workers behind a name: who comes is used, who goes ends what it has and gets nothing more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kestrl._shared.rpc.lookup import resolved
from kestrl_learner.dispatch import workers
from kestrl_learner.run import LearnerRun


async def test_a_name_stands_for_all_of_its_addresses() -> None:
    found = await resolved("localhost:7000")
    assert found is not None
    assert "127.0.0.1:7000" in found
    assert await resolved("no-such-host.invalid:7000") is None


async def test_workers_come_and_go_while_it_trains(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    async with staged(workers=2) as stage:
        first, second = stage.settings.rollout_addresses
        there: set[str] | None = {first}

        async def looked_up(name: str) -> set[str] | None:
            assert name == "job-rollout:7000"
            return there

        monkeypatch.setattr(workers, "resolved", looked_up)

        def seen(request: Any, group: Any) -> Any:
            nonlocal there
            if request.purpose == "train":
                count = len(stage.asked())
                there = {first} if count < 3 else None if count < 4 else {first, second} if count < 8 else {second}
            return group

        stage.workers[0].script = stage.workers[1].script = seen
        await LearnerRun(stage.but(rollout_addresses=("dns://job-rollout:7000",))).main()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert all(worker.requests for worker in stage.workers)
        assert len(stage.asked()) == 12  # every scenario of both epochs once: coming and going costs none


async def test_who_goes_ends_what_it_has(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
    async with staged(workers=1) as stage:
        (address,) = stage.settings.rollout_addresses
        there = {address}
        looks = 0

        async def looked_up(name: str) -> set[str] | None:
            nonlocal looks
            looks += 1
            return set(there)

        monkeypatch.setattr(workers, "resolved", looked_up)
        worker = stage.workers[0]
        worker.gate = asyncio.Event()
        run = asyncio.create_task(
            LearnerRun(stage.but(rollout_addresses=("dns://job-rollout:7000",), validation=None, max_steps=2)).main()
        )
        async with asyncio.timeout(20):
            while worker.running == 0:  # noqa: ASYNC110 - the fake only has a count
                await asyncio.sleep(0.01)
            there.clear()
            before = looks
            while looks < before + 3:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            begun = len(worker.requests)
            worker.gate.set()
            while worker.running:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
            assert len(worker.requests) == begun  # its groups ended well, and it got no further one
            there.add(address)
            await run
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
