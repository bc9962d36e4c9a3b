"""The engine agent's parts beside a real server, in the process of a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl.engines.vllm import Vllm
from kestrl.runstate.states import EngineState
from kestrl_inference.engine import Engine
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.sleeper import Sleeper
from kestrl_inference.watch import Watch

BOUND = 1e-4
"""Twenty times what float32 gives (5e-6): see research/vllm-cpu.md section 3."""


@dataclass
class Agent:
    """The agent's parts beside one server, in this process."""

    server: Any
    engine: Engine
    adapters: LoadedAdapters
    watch: Watch
    folder: Path

    async def loaded(self) -> dict[str, str]:
        return await self.engine.adapters()

    async def end(self) -> None:
        """Leaves the server as it was found."""
        if (await self.engine.look()).healthy:
            for held in list(self.adapters.held.values()):
                await self.adapters.retire(held.policy)
        await self.watch.sleeper.close()
        await self.engine.close()


async def beside(server: Any, folder: Path, *, turns: bool = False) -> Agent:
    """An agent that has seen its engine healthy."""
    settings = AgentSettings(
        component="inference-0",
        job="job",
        run="run",
        listen="unused:1",
        engine_name="engine-0",
        engine_url=server.url,
        base_model="tiny",
        adapters_dir=str(folder),
        slots=3,
        probe_bound=BOUND,
        turns=turns,
    )
    engine = Engine(server.url, "base", Vllm(), timeout=60)
    adapters = LoadedAdapters(settings, engine)
    adapters.prepare()
    watch = Watch(engine, adapters, Sleeper(engine, adapters, turns=turns), 1.0, settings.component)
    await watch.look()
    assert watch.state is EngineState.READY
    return Agent(server, engine, adapters, watch, folder)
