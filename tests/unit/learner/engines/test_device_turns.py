"""Runs whose engine shares its device in turns: the learner, a real agent, and an engine that can sleep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.fakes.engine import FakeEngine
from tests.fakes.ports import free_port
from tests.unit.learner.conftest import Stage
from tests.unit.learner.fakes import VOCABULARY, Oracle, running, served, until

from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.plan.settings.learner import EngineEntry
from kestrl.api.inference.v1 import inference_pb2_grpc as istubs
from kestrl.engines.vllm import Vllm
from kestrl.episode import BASE_MODEL_NAME
from kestrl.errors import KestrlError
from kestrl_inference.engine import Engine
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.servicer import EngineAgentServicer
from kestrl_inference.sleeper import Sleeper
from kestrl_inference.watch import Watch
from kestrl_learner.concurrency import finished
from kestrl_learner.engines import device_turns
from kestrl_learner.model import adapters as learner_adapters
from kestrl_learner.model.base_weights import BaseWeights
from kestrl_learner.train.trainer import Trainer


@dataclass(kw_only=True)
class OracleEngine(FakeEngine):
    """A fake engine with the log-probs of the learner's model."""

    oracle: Oracle
    slept: threading.Event = field(default_factory=threading.Event)

    def weights(self, model: str) -> str | None:
        if model not in self.adapters:
            return super().weights(model)
        self.oracle.learn(model, Path(self.adapters[model]))
        return model

    def scores(self, weights: str, token_ids: Sequence[int]) -> list[float]:
        return [-1.0, *self.oracle.score(weights or BASE_MODEL_NAME, token_ids)]

    async def _sleep(self, request: web.Request) -> web.Response:
        answer = await super()._sleep(request)
        self.slept.set()
        return answer


@asynccontextmanager
async def shared_engine(stage: Stage, *, asleep: bool = False) -> AsyncGenerator[tuple[OracleEngine, EngineEntry]]:
    """An engine and its agent."""
    engine = OracleEngine(oracle=stage.oracle, turns=0, vocab_size=VOCABULARY)
    async with engine:
        engine.asleep = asleep
        async with agent_of(engine, stage.folder) as entry:
            yield engine, entry


@asynccontextmanager
async def agent_of(engine: OracleEngine, folder: Path) -> AsyncGenerator[EngineEntry]:
    """An agent that watches its engine."""
    settings = AgentSettings(
        component="inference-0",
        job="test",
        run="test-1",
        listen=f"127.0.0.1:{free_port()}",
        engine_name="engine-0",
        engine_url=engine.url,
        base_model="base",
        adapters_dir=str(folder / "adapters"),
        slots=3,
        probe_bound=1e-3,
        draws=0,
        poll_seconds=0.05,
        turns=True,
    )
    client = Engine(engine.url, BASE_MODEL_NAME, Vllm(), timeout=10)
    adapters = LoadedAdapters(settings, client)
    adapters.prepare()
    sleeper = Sleeper(client, adapters, turns=True)
    watch = Watch(client, adapters, sleeper, settings.poll_seconds, settings.component)
    servicer = EngineAgentServicer(settings, adapters, watch)
    watching = asyncio.create_task(watch.run())
    register = lambda server: istubs.add_EngineAgentServiceServicer_to_server(servicer, server)  # noqa: E731
    try:
        async with served("inference-0", register) as address:
            yield EngineEntry(name="engine-0", url="http://engine-0", agent_address=address)
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await sleeper.close()
        await client.close()


class Observed:
    """Whether the engine slept when the learner computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: OracleEngine) -> None:
        self.updates: list[bool] = []
        self.probes: list[bool] = []
        step, publish = Trainer.step, learner_adapters.publish

        def observed_step(trainer: Any, *arguments: Any) -> Any:
            self.updates.append(engine.asleep)
            self.during(len(self.updates))
            return step(trainer, *arguments)

        def observed_publish(*arguments: Any, **options: Any) -> Any:
            published = publish(*arguments, **options)
            self.probes.append(engine.asleep)
            return published

        monkeypatch.setattr(Trainer, "step", observed_step)
        monkeypatch.setattr(learner_adapters, "publish", observed_publish)

    def during(self, update: int) -> None:
        """Called within each update."""


async def test_the_engine_sleeps_during_each_update_and_its_probe(
    staged: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with staged(engines=0, turns=True, eval_every=2) as stage, shared_engine(stage) as (engine, entry):
        observed = Observed(monkeypatch, engine)
        async with running(stage.but(engines=(entry,), max_steps=4)):
            pass
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert observed.updates == [True] * 4
        assert observed.probes == [False, *[True] * 4], "that of version 0 is computed before the first turn"
        assert engine.sleeps == ["sleep", "wake"] * 4
        assert engine.disturbed == [], "nothing is loaded, sampled or verified while it sleeps"
        assert not engine.asleep


class ObservedBase:
    """Moves of the base, and whether the engine slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: OracleEngine) -> None:
        self.moves: list[tuple[str, bool]] = []
        self.away = False
        for name in ("leave", "come_back"):
            self.observe(monkeypatch, engine, name)

    def observe(self, monkeypatch: pytest.MonkeyPatch, engine: OracleEngine, name: str) -> None:
        move = getattr(BaseWeights, name)

        def observed(base: BaseWeights) -> None:
            slept_before = engine.asleep
            move(base)
            self.away = base.away
            self.moves.append((name, slept_before and engine.asleep))

        monkeypatch.setattr(BaseWeights, name, observed)


async def test_the_base_is_on_the_device_only_while_the_engine_sleeps(
    staged: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    away_in_rollouts: list[bool] = []
    async with staged(engines=0, turns=True, base_offload=True, eval_every=2) as stage:
        async with shared_engine(stage) as (engine, entry):
            observed, base = Observed(monkeypatch, engine), ObservedBase(monkeypatch, engine)
            episode = stage.workers[0]._episode

            def rolled_out(*arguments: Any) -> Any:
                away_in_rollouts.append(base.away)
                return episode(*arguments)

            monkeypatch.setattr(stage.workers[0], "_episode", rolled_out)
            async with running(stage.but(engines=(entry,), max_steps=3)):
                pass
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["failures"] == {}
        assert observed.updates == [True] * 3
        assert observed.probes == [True] * 4, "that of version 0 has a turn, too"
        turns = len(engine.sleeps) // 2
        assert engine.sleeps == ["sleep", "wake"] * turns
        assert turns in {4, 5}, "the model is loaded in a turn, which that of version 0 may prolong"
        assert base.moves == [("leave", True), *[("come_back", True), ("leave", True)] * 4]
        assert len(away_in_rollouts) > 0
        assert all(away_in_rollouts)
        assert engine.disturbed == []


async def test_a_run_whose_engine_does_not_start_says_so_before_it_loads_a_model(staged: Any, quick: None) -> None:
    async with staged(engines=0, turns=True, base_offload=True, start_seconds=0.5) as stage:
        async with shared_engine(stage) as (engine, entry):
            engine.healthy = False
            with pytest.raises(KestrlError, match="shares the learner's device has not started"):
                async with running(stage.but(engines=(entry,), max_steps=1)):
                    pass
        assert engine.sleeps == []
        assert stage.summary["status"] == "failed"


async def test_what_computes_in_a_turn_ends_before_the_turn() -> None:
    began, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def update() -> None:
        began.set()
        assert go_on.wait(10)
        ended.append("update")

    async def turn() -> None:
        try:
            await finished(update)
        finally:
            ended.append("turn")

    task = asyncio.create_task(turn())
    await asyncio.to_thread(began.wait, 10)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["update", "turn"]


async def test_an_engine_that_dies_asleep_sleeps_again_and_the_run_goes_on(
    staged: Any, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_turns, "LEASE_SECONDS", 3.0)
    loop = asyncio.get_running_loop()
    async with staged(engines=0, turns=True) as stage, shared_engine(stage) as (engine, entry):

        async def die() -> None:
            await engine.stop()
            engine.slept.clear()
            await engine.start()

        def during(update: int) -> None:
            if update == 2:
                asyncio.run_coroutine_threadsafe(die(), loop).result(10)
                assert engine.slept.wait(10), "it is put to sleep again while the update goes on"

        monkeypatch.setattr(Observed(monkeypatch, engine), "during", during)
        async with running(stage.but(engines=(entry,), max_steps=3)):
            pass
        assert stage.summary["status"] == "succeeded"
        assert stage.states["trained"] == 6
        assert engine.sleeps == ["sleep", "wake", "sleep", "sleep", "wake", "sleep", "wake"]
        assert engine.disturbed == []


async def test_a_run_that_resumes_takes_the_device_from_an_engine_that_sleeps(staged: Any, quick: None) -> None:
    # Its learner and its agent were killed during an update.
    async with staged(engines=0, turns=True) as stage, shared_engine(stage, asleep=True) as (engine, entry):
        async with running(stage.but(engines=(entry,), max_steps=1)):
            await until(lambda: engine.sleeps)
        assert engine.sleeps == ["wake", "sleep", "wake"]
        assert stage.summary["status"] == "succeeded"
