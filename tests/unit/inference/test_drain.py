"""How an engine ends: its agent and the hook of its container drain it, and what starts ends at once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import Any

import pytest

from kestrl_inference import watch
from kestrl_inference.inside import drain, launcher, sglang_launcher
from kestrl_inference.inside.drain import HEARD_SECONDS, drained

from .test_process import start


@pytest.mark.parametrize(
    ("running", "waited", "over"),
    [(0, 0.0, False), (0, HEARD_SECONDS, True), (1, HEARD_SECONDS, False), (1, 119.0, False), (1, 120.0, True)],
    ids=["others have not heard of it", "no turn", "a turn", "a long turn", "the deadline of a turn"],
)
def test_an_engine_has_drained_when_no_turn_runs_and_others_know(running: int, waited: float, over: bool) -> None:
    assert drained(running, waited, 120.0) is over


@pytest.fixture
def _heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "HEARD_SECONDS", 0.0)
    monkeypatch.setattr(watch, "ASK_SECONDS", 0.01)


@pytest.mark.usefixtures("_heard_at_once")
async def test_an_agent_reports_that_its_engine_drains_until_the_turns_are_over(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    stage.engine.turns = 1
    leaving = asyncio.create_task(stage.watch.drain(600.0))
    while stage.engine.drains < 2:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.01)
    assert await stage.state() == "DRAINING"
    assert await stage.proved() == {1: True}, "its running turns are of a version that it has proved"
    assert not leaving.done()
    stage.engine.turns = 0
    await asyncio.wait_for(leaving, 20)


@pytest.mark.usefixtures("_heard_at_once")
async def test_a_turn_beyond_its_deadline_and_an_engine_that_is_gone_keep_no_agent(stage: Any) -> None:
    stage.engine.turns = 1
    await asyncio.wait_for(stage.watch.drain(0.05), 20)
    assert stage.engine.drains >= 2
    leaving = asyncio.create_task(stage.watch.drain(600.0))
    await stage.engine.stop()
    await asyncio.wait_for(leaving, 20)
    await stage.look()
    assert await stage.state() == "DOWN", "that it is gone says more than that it drains"


async def test_an_engine_without_the_guards_route_keeps_no_agent(stage: Any) -> None:
    await asyncio.wait_for(stage.watch.drain(600.0), 20)
    assert await stage.state() == "DRAINING"


async def test_sigterm_has_an_agent_drain_its_engine(make_stage: Any, tmp_path: Any) -> None:
    stage = await make_stage()
    stage.engine.turns = 1
    changes = {"adapters_dir": str(tmp_path / "agent"), "drain_seconds": 0.2}
    process = await start(stage.settings.model_copy(update=changes), tmp_path)
    assert process.stderr is not None
    while b"serves on" not in await process.stderr.readline():
        pass
    process.send_signal(signal.SIGTERM)
    await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0
    assert stage.engine.drains >= 1


@pytest.mark.parametrize("limit", ["0.2", "600"], ids=["a turn that goes on", "an engine that goes away"])
async def test_the_hook_of_the_container_waits_for_the_turns(stage: Any, limit: str) -> None:
    stage.engine.turns = 1
    command = (sys.executable, "-m", drain.__name__, str(stage.engine.port), limit)
    hook = await asyncio.create_subprocess_exec(*command)
    while not stage.engine.drains:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.01)
    if limit == "600":
        assert hook.returncode is None
        await stage.engine.stop()
    assert await asyncio.wait_for(hook.wait(), 60) == 0


async def test_the_hook_keeps_no_engine_that_has_not_started(stage: Any) -> None:
    await stage.engine.stop()
    hook = await asyncio.create_subprocess_exec(sys.executable, "-m", drain.__name__, str(stage.engine.port), "600")
    assert await asyncio.wait_for(hook.wait(), 60) == 0


@pytest.mark.parametrize("module", [launcher, sglang_launcher])
def test_an_engine_that_starts_ends_at_sigterm_also_as_process_1(module: Any) -> None:
    """The kernel gives process 1 of a container no signal that it has no handler for."""
    code = (
        f"import os, signal, {module.__name__} as launcher\n"
        "launcher.read_options = lambda arguments: os.kill(os.getpid(), signal.SIGTERM)\n"
        "launcher.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
