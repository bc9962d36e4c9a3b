"""Engines behind a name, as of a headless Service: their agents say which they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fakes.ports import free_port
from tests.unit.learner.fakes import running, served, until

from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.api.inference.v1 import inference_pb2_grpc as istubs
from kestrl_learner.engines import discovery
from kestrl_learner.engines.discovery import EnginesByName


@pytest.fixture(autouse=True)
def _looked_up_often(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EnginesByName, "seconds", 0.02)


async def test_the_agents_of_a_resolved_name_are_asked_for_their_engines(staged: Any) -> None:
    async with staged(engines=1) as stage:
        port = stage.settings.engines[0].agent_address.rpartition(":")[2]
        engines = await EnginesByName(f"localhost:{port}").look()
        assert engines is not None
        assert [(engine.name, engine.url, engine.agent_address) for engine in engines] == [
            ("engine-0", "http://engine-0", f"127.0.0.1:{port}")
        ]


async def test_a_run_follows_the_addresses_of_the_name(staged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged(engines=3) as stage:
        first, second, third = (engine.agent_address for engine in stage.settings.engines)
        present: set[str] | None = {first, second}

        async def resolve(name: str) -> set[str] | None:
            assert name == "job-inference:7000"
            return present

        monkeypatch.setattr(discovery, "resolved", resolve)
        worker = stage.workers[0]
        worker.gate = asyncio.Event()
        behind_a_name = {"engines": (), "engine_agents": "dns://job-inference:7000", "validation": None}
        async with running(stage.but(**behind_a_name)) as (run, _):
            await until(lambda: worker.running == 6)
            names = [report.name for report in run.progress.state.engines.reports]
            assert names == ["engine-0", "engine-1"]
            present = {third, second}
            await until(
                lambda: (
                    worker.updates and {each.name for each in worker.updates[-1].engines} == {"engine-1", "engine-2"}
                )
            )
            present = None  # a name server that fails takes no engine away
            worker.gate.set()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert len(stage.asked()) == 12, "no scenario was attempted twice"


class Agent(istubs.EngineAgentServiceServicer):
    """An agent of an engine at a URL."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url

    async def GetEngine(self, request: Any, context: Any) -> ipb.GetEngineResponse:
        return ipb.GetEngineResponse(name=self.name, url=self.url)

    async def LoadPolicy(self, request: Any, context: Any) -> ipb.LoadPolicyResponse:
        raise AssertionError("it is asked for its engine alone")

    async def RetirePolicy(self, request: Any, context: Any) -> ipb.RetirePolicyResponse:
        raise AssertionError("it is asked for its engine alone")


def serving(name: str, url: str) -> Any:
    return served("inference", lambda server: istubs.add_EngineAgentServiceServicer_to_server(Agent(name, url), server))


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The addresses behind every name."""
    present: set[str] = set()

    async def resolve(name: str) -> set[str]:
        return set(present)

    monkeypatch.setattr(discovery, "resolved", resolve)
    return present


async def test_an_agent_that_does_not_answer_stays_known_and_another_is_not_used_yet(addresses: set[str]) -> None:
    engines = EnginesByName("job-inference:7000")
    async with serving("engine-10", "http://pod-10:8000") as tenth, serving("engine-9", "http://pod-9:8000") as ninth:
        addresses |= {tenth, ninth, f"127.0.0.1:{free_port()}"}
        known = await engines.look()
        assert known is not None
        assert [(each.name, each.agent_address) for each in known] == [("engine-9", ninth), ("engine-10", tenth)]
    assert await engines.look() == known, "their agents restart"
    addresses -= {ninth}
    assert await engines.look() == known[1:]


async def test_a_replaced_pod_of_the_same_name_is_the_one_that_answers(addresses: set[str]) -> None:
    engines = EnginesByName("job-inference:7000")
    async with serving("engine-0", "http://pod-0:8000") as before:
        addresses |= {before}
        assert [engine.agent_address for engine in await engines.look() or ()] == [before]
    async with serving("engine-0", "http://pod-0:8000") as after:
        addresses |= {after}
        assert [engine.agent_address for engine in await engines.look() or ()] == [after]


async def test_an_engine_that_only_its_own_pod_reaches_is_not_used(
    addresses: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Agents of releases before this one report so."""
    engines = EnginesByName("job-inference:7000")
    async with serving("engine-0", "http://127.0.0.1:8000") as address:
        addresses |= {address}
        assert await engines.look() == []
        assert await engines.look() == []
    (record,) = [record for record in caplog.records if "is not used yet" in record.message]
    assert record.message.endswith("engine-0 is at 'http://127.0.0.1:8000', which others cannot reach")
