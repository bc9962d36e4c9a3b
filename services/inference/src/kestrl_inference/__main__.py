"""`python -m kestrl_inference --settings FILE`: the engine agent."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import kestrl.stopping  # noqa: F401  # pyright: ignore[reportUnusedImport] - it takes SIGTERM from here on
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME
from kestrl.plan.settings import AgentSettings
from kestrl.rpc import serve
from kestrl.service import run_service
from kestrl_inference.engine import Engine
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.metrics import observe_engine
from kestrl_inference.servicer import EngineAgent
from kestrl_inference.watch import Watch


async def work(settings: AgentSettings) -> None:
    """Serves until SIGTERM."""
    dialect = DIALECTS[settings.engine]
    engine = Engine(settings.engine_url, BASE_MODEL_NAME, dialect, timeout=settings.load_seconds)
    adapters = LoadedAdapters(settings, engine)
    adapters.prepare()
    failure_file = None if settings.failure_file is None else Path(settings.failure_file)
    watch = Watch(engine, adapters, settings.poll_seconds, settings.component, failure_file)
    agent = EngineAgent(settings, adapters, watch)
    observe_engine(watch, adapters)
    watching = asyncio.create_task(watch.run(), name="watch-engine")

    async def stop_watching() -> None:
        watching.cancel()
        await asyncio.wait([watching])

    try:
        await serve(
            settings.component,
            settings.listen,
            lambda server: stubs.add_EngineAgentServiceServicer_to_server(agent, server),
            drain=stop_watching,
            until=watching,  # an agent that has stopped watching must not continue to answer
        )
    finally:
        await engine.close()


if __name__ == "__main__":
    sys.exit(run_service(AgentSettings, work))
