"""The agent as a process: `python -m kestrl_inference --settings FILE`."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.credentials import Secret
from kestrl._shared.rpc import call, channel
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs


async def start(settings: Any, tmp_path: Path) -> asyncio.subprocess.Process:
    file = tmp_path / "settings.json"
    file.write_text(settings.model_dump_json(), encoding="utf-8")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kestrl_inference", "--settings", str(file), stderr=asyncio.subprocess.PIPE
    )


async def eventually(ask: Callable[[], Awaitable[Any]], answer: Any) -> None:
    while await ask() != answer:  # noqa: ASYNC110 - another process can only be asked
        await asyncio.sleep(0.01)


async def test_it_watches_loads_and_ends_when_asked(make_stage: Any, tmp_path: Path) -> None:
    stage = await make_stage()
    version = stage.publish(1)
    settings = stage.settings.model_copy(update={"adapters_dir": str(tmp_path / "agent")})
    process = await start(settings, tmp_path)
    async with channel(settings.listen) as connection:
        stage.stub = stubs.EngineAgentServiceStub(connection)
        await call(
            stage.stub.GetEngine,
            pb.GetEngineRequest(),
            pb.GetEngineResponse,
            timeout=20,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
            wait=True,
        )
        await stage.load(version)
        assert await stage.proved() == {1: True}
        await stage.engine.stop()
        await eventually(stage.state, "DOWN")
        await stage.engine.start()
        await eventually(stage.proved, {1: True})
        assert list(stage.engine.adapters) == [version.name]
    process.send_signal(signal.SIGTERM)
    _, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    assert b"Traceback" not in log


async def test_a_taken_port_is_reported_in_one_line(make_stage: Any, tmp_path: Path) -> None:
    stage = await make_stage()
    settings = stage.settings.model_copy(update={"listen": stage.engine.url.removeprefix("http://")})
    process = await start(settings, tmp_path)
    _, log = await process.communicate()
    assert process.returncode == 2
    assert f"error: inference-0: cannot listen on {settings.listen}" in log.decode()
    assert b"Traceback" not in log


@pytest.mark.parametrize(
    "module", ["kestrl_inference.__main__", "kestrl_inference.inside.guard", "kestrl_inference.inside.launcher"]
)
def test_importing_it_brings_nothing_heavy(module: str) -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'peft', 'kopf', 'kubernetes', 'sqlalchemy', 'numpy'}"
    code = f"import sys, {module}; found = {heavy} & set(sys.modules); sys.exit(str(found) if found else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
