"""The engine agent's `main`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.rpc import serve
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME
from kestrl_inference.engine import Engine
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.metrics import observe_engine
from kestrl_inference.servicer import EngineAgentServicer
from kestrl_inference.sleeper import Sleeper
from kestrl_inference.watch import Watch


async def run_agent(settings: AgentSettings) -> None:
    """Watches the engine and serves until SIGTERM, and then until the engine has drained; or until watching ends.

    Raises:
        UserInputError: The folder of adapters cannot be used, or the port is taken.
    """
    dialect = DIALECTS[settings.engine]
    engine = Engine(
        settings.engine_url,
        BASE_MODEL_NAME,
        dialect,
        timeout=settings.load_seconds,
        move_seconds=settings.move_seconds,
    )
    adapters = LoadedAdapters(settings, engine)
    adapters.prepare()
    failure_file = None if settings.failure_file is None else Path(settings.failure_file)
    sleeper = Sleeper(engine, adapters, turns=settings.turns)
    watch = Watch(engine, adapters, sleeper, settings.poll_seconds, settings.component, failure_file)
    servicer = EngineAgentServicer(settings, adapters, watch)
    observe_engine(watch, adapters)
    watching = asyncio.create_task(watch.run(), name="watch-engine")

    async def leave() -> None:
        if not watching.done():
            await watch.drain(settings.drain_seconds)
        watching.cancel()
        await asyncio.wait([watching])

    try:
        await serve(
            settings.component,
            settings.listen,
            lambda server: stubs.add_EngineAgentServiceServicer_to_server(servicer, server),
            drain=leave,
            until=watching,  # an agent that has stopped watching must not continue to answer
        )
    finally:
        await sleeper.close()
        await engine.close()
