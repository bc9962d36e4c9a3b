"""Engines that join and leave while it trains."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.learner.fakes import running, until

from kestrl._app.local.files import write_atomic
from kestrl._shared.plan.settings.learner import EngineEntry, EngineList
from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl_learner.engines import engines as engines_module
from kestrl_learner.engines.discovery import EnginesOfFile


@pytest.fixture(autouse=True)
def _looked_up_often(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginesOfFile, "seconds", 0.02)


class Fleet:
    """The file with the engines of a stage."""

    def __init__(self, stage: Any) -> None:
        self.path, self._entries = stage.folder / "engines.json", stage.settings.engines

    def consists_of(self, *numbers: int) -> None:
        listed = EngineList(engines=tuple(self._entries[number] for number in numbers))
        write_atomic(self.path, listed.model_dump_json())

    @property
    def settings(self) -> dict[str, Any]:
        return {"engines": (), "engines_file": str(self.path), "validation": None}


def named(requests: Sequence[Any]) -> set[str]:
    return {engine.name for request in requests for engine in request.engines}


async def test_an_engine_that_joins_proves_the_version_before_it_is_named(staged: Any) -> None:
    async with staged(engines=2) as stage:
        fleet, worker, joiner = Fleet(stage), stage.workers[0], stage.agents[1]
        fleet.consists_of(0)
        joiner.gate, worker.gate = asyncio.Event(), asyncio.Event()
        async with running(stage.but(**fleet.settings)) as (run, _):
            await until(lambda: worker.running == 6)
            assert run.progress.state.engines.total == 1
            fleet.consists_of(0, 1)
            await until(lambda: joiner.loads)
            assert run.progress.state.engines.total == 2
            assert worker.updates == []
            joiner.gate.set()
            await until(lambda: worker.updates)
            assert named(worker.requests) == {"engine-0"}
            assert named(worker.updates) == {"engine-0", "engine-1"}
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert {turn.engine for group in stage.groups(6) for each in group.episodes for turn in each.turns} == {
            "engine-0",
            "engine-1",
        }


async def test_an_engine_that_joins_holds_no_publication_up(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_module, "STRAGGLER_SECONDS", 3600.0)
    async with staged(engines=2) as stage:
        fleet, worker, joiner = Fleet(stage), stage.workers[0], stage.agents[1]
        fleet.consists_of(0)
        joiner.gate, worker.gate = asyncio.Event(), asyncio.Event()
        async with running(stage.but(**fleet.settings)):
            await until(lambda: worker.running == 6)
            fleet.consists_of(0, 1)
            await until(lambda: joiner.loads)
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["steps"] == 6
        assert joiner.held == {}


async def test_an_engine_that_leaves_gets_no_session_and_its_turns_are_accepted(staged: Any) -> None:
    async with staged(engines=2) as stage:
        fleet, worker = Fleet(stage), stage.workers[0]
        fleet.consists_of(0, 1)
        worker.gate = asyncio.Event()
        async with running(stage.but(**fleet.settings)) as (run, _):
            await until(lambda: worker.running == 6)
            fleet.consists_of(0)
            await until(lambda: worker.updates)
            assert named(worker.updates) == {"engine-0"}
            assert run.progress.state.engines.total == 1
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert named(stage.asked()[2:]) == {"engine-0"}
        assert stage.states == {"trained": 12}
        assert len(stage.asked()) == 12, "no scenario was attempted twice"


async def test_an_engine_that_drains_gets_no_session_and_its_turns_are_accepted(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines_module, "STRAGGLER_SECONDS", 3600.0)
    async with staged(engines=2) as stage:
        worker, leaver = stage.workers[0], stage.agents[0]
        worker.gate = asyncio.Event()
        async with running(stage.but(validation=None)) as (run, _):
            await until(lambda: worker.running == 6)
            assert named(stage.asked()[-2:]) == {"engine-0", "engine-1"}
            leaver.state = ipb.ENGINE_STATE_DRAINING
            await until(lambda: worker.updates)
            assert named(worker.updates) == {"engine-1"}
            fleet = run.progress.state.engines
            assert [report.state for report in fleet.reports] == ["draining", "serving"]
            assert (fleet.verified, fleet.total) == (1, 1), "what stays has proved it"
            loads = leaver.loads
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert {turn.engine for group in stage.groups(1) for each in group.episodes for turn in each.turns} >= {
            "engine-0"
        }
        assert leaver.loads == loads, "no further version is loaded on it, and no publication waits for it"
        assert named(stage.asked()[2:]) == {"engine-1"}
        assert stage.states == {"trained": 12}
        assert len(stage.asked()) == 12, "no scenario was attempted twice"


async def test_a_file_that_cannot_be_read_takes_no_engine_away(tmp_path: Any) -> None:
    path = tmp_path / "engines.json"
    found = EnginesOfFile(path)
    assert await found.look() is None
    path.write_text("{")
    assert await found.look() is None
    entry = EngineEntry(name="engine-0", url="http://127.0.0.1:1", agent_address="127.0.0.1:2")
    path.write_text(EngineList(engines=(entry,)).model_dump_json())
    assert await found.look() == (entry,)


async def test_half_of_the_engines_gone_at_once_three_times_costs_no_scenario(staged: Any) -> None:
    async with staged(engines=4) as stage:
        worker = stage.workers[0]
        times = 0

        async def half_of_them_are_killed(run: Any) -> None:
            nonlocal times
            for killed in (stage.agents[:2], stage.agents[2:], stage.agents[:2]):
                worker.gate = held = asyncio.Event()
                await until(lambda: worker.running == 6)
                for agent in killed:
                    agent.state = ipb.ENGINE_STATE_DOWN
                    agent.held.clear()
                await until(lambda: run.progress.state.engines.verified == 2)
                step = run.progress.state.steps.done
                worker.gate = held_again = asyncio.Event()
                held.set()
                await until(lambda before=step: run.progress.state.steps.done > before)
                await until(lambda: worker.running == 6)
                for agent in killed:
                    agent.state = ipb.ENGINE_STATE_READY
                await until(lambda: run.progress.state.engines.verified == 4)
                held_again.set()
                times += 1
            worker.gate = None

        async with running(stage.but(validation=None, epochs=4)) as (run, _):
            await asyncio.wait_for(half_of_them_are_killed(run), 60)
        assert times == 3
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert stage.states == {"trained": 24}
        assert len(stage.asked()) == 24, "no scenario was attempted twice"
