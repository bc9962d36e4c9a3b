"""An engine that gives its device to the learner in turns: vLLM's own server in its development mode, with its guard,
and the agent.

vLLM on a CPU refuses `--enable-sleep-mode` and gives no memory up when it is put to sleep. Its routes, what they answer
and the pause of its scheduler are those of a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import KEYS, PROBE_IDS, Server

from kestrl.errors import EngineFailure
from kestrl.runstate.states import EngineState
from kestrl_inference.engine import CONTROL_KEY

from .agents import BOUND, Agent, beside

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("engine-turns"),  # all ask the same one
]

DATA, CONTROL = KEYS["KESTRL_ENGINE_KEY"], KEYS["KESTRL_ENGINE_CONTROL_KEY"]
HIDDEN = (
    ("POST", "/sleep"),
    ("POST", "/sleep?level=2"),
    ("POST", "/wake_up"),
    ("GET", "/is_sleeping"),
    ("POST", "/release_kv_cache_memory"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/collective_rpc"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/update_weights"),
    ("GET", "/server_info"),
    ("POST", "/kestrl/drain"),
    ("POST", "/kestrl/resume"),
    ("POST", "/kestrl/end"),
)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(model, tmp_path_factory.mktemp("turns"), variables={"VLLM_SERVER_DEV_MODE": "1"})
    server.start()
    server.wait_until_healthy()
    yield server
    if server.process is not None and server.process.poll() is None:
        server.stop()


@pytest.fixture
async def agent(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    monkeypatch.setenv(CONTROL_KEY, CONTROL)
    agent = await beside(server, tmp_path / "adapters", turns=True)
    yield agent
    await agent.end()


def generate(server: Server, model: str, count: int = 1) -> tuple[int, Any]:
    """Status and body of a request for tokens, as a worker sends it."""
    sampling = {"max_tokens": count, "ignore_eos": True, "detokenize": False}
    body = {"model": model, "token_ids": [60, 61], "sampling_params": sampling}
    status, answer = server.ask("POST", "/inference/v1/generate", key=DATA, body=json.dumps(body).encode())
    return status, json.loads(answer)


def test_who_samples_reaches_no_route_of_the_development_mode(server: Server) -> None:
    for method, path in HIDDEN:
        body = b"{}" if method == "POST" else None
        answers = [server.ask(method, path, key=key, body=body)[0] for key in ("", DATA, "wrong")]
        assert answers == [401, 403, 403], path
    assert server.ask("GET", "/is_sleeping", key=CONTROL) == (200, b'{"is_sleeping":false}')
    assert generate(server, "base")[0] == 200


async def test_an_engine_sleeps_and_is_verified_again(
    agent: Agent, server: Server, adapters: Any, publish: Any, tmp_path: Path
) -> None:
    adapter, sleeper = adapters(1), agent.watch.sleeper
    version = publish(tmp_path / "storage", adapter)
    await agent.adapters.load(version.policy, version.uri)
    await sleeper.sleep(lease=60.0, seconds=60.0)
    assert await agent.engine.sleeping()
    assert agent.adapters.proved() == frozenset()
    await agent.watch.look()
    assert agent.watch.reported_state is EngineState.ASLEEP
    status, answer = await asyncio.to_thread(generate, server, version.name)
    assert (status, answer["error"]["type"]) == (503, "EngineDraining"), "no request waits in a sleeping engine"
    await sleeper.wake(seconds=60.0)
    assert not await agent.engine.sleeping()
    assert agent.adapters.proved() == {version.name}
    await agent.watch.look()
    assert agent.watch.reported_state is EngineState.READY
    assert (await asyncio.to_thread(generate, server, version.name))[0] == 200
    scores = await agent.engine.score(version.name, PROBE_IDS)
    assert max(abs(one - other) for one, other in zip(scores, adapter.score(PROBE_IDS), strict=True)) < BOUND


async def test_requests_that_run_end_before_the_engine_sleeps(agent: Agent, server: Server) -> None:
    running = asyncio.create_task(asyncio.to_thread(generate, server, "base", 400))
    while not (await agent.engine.look()).load.running:
        assert not running.done(), "it was to be seen running"
    await agent.watch.sleeper.sleep(lease=60.0, seconds=120.0)
    status, answer = await running
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 400)
    await agent.watch.sleeper.wake(seconds=60.0)


async def test_an_engine_that_is_ended_asleep_sleeps_again_and_loads_its_versions_when_it_wakes(
    agent: Agent, server: Server, adapters: Any, publish: Any, has_ended: Any, tmp_path: Path
) -> None:
    version = publish(tmp_path / "storage", adapters(2))
    await agent.adapters.load(version.policy, version.uri)
    sleeper = agent.watch.sleeper
    await sleeper.sleep(lease=600.0, seconds=60.0)
    pidfds = [os.pidfd_open(pid) for pid in (server.pid, *server.children())]
    await agent.engine.end()
    ended = [await asyncio.to_thread(has_ended, pidfd) for pidfd in pidfds]
    for pidfd in pidfds:
        os.close(pidfd)
    assert all(ended), "its server and what computes for it"
    await agent.watch.look()
    assert agent.watch.state is EngineState.DOWN
    with pytest.raises(EngineFailure):
        await agent.engine.sleeping()
    assert server.process is not None
    server.process.wait()
    server.start()
    await asyncio.to_thread(server.wait_until_healthy)
    await agent.watch.look()
    await sleeper.sleep(lease=600.0, seconds=60.0)
    assert await agent.engine.sleeping()
    assert await agent.loaded() == {}, "nothing is loaded in the learner's turn"
    await sleeper.wake(seconds=120.0)
    assert agent.adapters.proved() == {version.name}
