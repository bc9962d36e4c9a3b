"""An environment in another container of the pod: only a Unix socket between the service and what starts it."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl._shared.prepare import PrepareSettings, prepare
from kestrl.errors import Boundary, FailureError, UserInputError
from kestrl_tools.catalogue import load_tools
from kestrl_tools.tool_threads import ToolThreads

from .test_job_environment import FOLDER, begun, environment

CONTAINER = {"PATH": os.environ["PATH"], "IMAGE": "mine"}


class Container:
    """The launcher in a container of an environment's image."""

    def __init__(self, packages: Path, path: Path) -> None:
        self.path = str(path)
        prepare(PrepareSettings(packages=("kestrl", "kestrl_tools"), packages_target=str(packages)))
        self._program = packages / "kestrl_tools" / "process" / "launcher.py"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Its own packages are those of this environment: a host needs some.
        command = [sys.executable, str(self._program), self.path]
        self._process = subprocess.Popen(command, cwd=FOLDER, env=CONTAINER, start_new_session=True)

    def kill(self) -> None:
        """Ends the launcher, as its container would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def entry(self, use: str, *, start_seconds: float = 60.0) -> ToolEntry:
        entry = environment(use)
        assert entry.environment is not None
        placed = {"launcher": self.path, "start_seconds": start_seconds}
        return entry.model_copy(update={"environment": entry.environment.model_copy(update=placed)})


@pytest.fixture
async def container(tmp_path: Path) -> AsyncIterator[Container]:
    here = Container(tmp_path / "packages", tmp_path / "launcher")
    yield here
    await asyncio.to_thread(here.kill)


def ends(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(descriptor) as process:
        return bool(select.select([process], [], [], 10)[0])


async def test_it_is_played_by_what_its_image_has(
    serve: Any, container: Container, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KESTRL_ROLLOUT_TO_TOOLS_TOKEN", "credential")
    container.start()
    async with serve(container.entry("Countdown")) as client:
        session, prompt = await begun(client, start=2)
        assert prompt == "Count down from 2."
        assert not (await client.call(session, "act", {"text": "2"})).final
        assert (await client.call(session, "act", {"text": "1"})).final
        state = (await client.state(session))["environment"]
        assert state["get_reward"] == {"done": 1.0, "said": 2.0}
        assert "IMAGE" in state["variables"]
        assert not [name for name in state["variables"] if name.startswith("KESTRL_")]
    assert await asyncio.to_thread(ends, state["pid"]), "it ends with the service"


async def test_it_is_waited_for_and_a_container_that_does_not_come_is_named(serve: Any, container: Container) -> None:
    asyncio.get_running_loop().call_later(1.0, container.start)
    async with serve(container.entry("Countdown")) as client:
        await begun(client, start=1)
    container.kill()
    with pytest.raises(UserInputError, match=r"spec\.environment\.image: the container of environment did not answer"):
        await load_tools([container.entry("Countdown", start_seconds=0.5)], ToolThreads())


@pytest.mark.parametrize(("how", "code"), [("raise", "raised"), ("die", "process_died")])
async def test_failures_are_those_beside_the_service(serve: Any, container: Container, how: str, code: str) -> None:
    container.start()
    async with serve(container.entry("Fragile")) as client:
        other, _ = await begun(client, how="")
        session, _ = await begun(client, how=how)
        with pytest.raises(FailureError) as caught:
            await client.call(session, "act", {"text": "x"})
        assert (caught.value.boundary, caught.value.code) == (Boundary.ENVIRONMENT, code)
        assert (await client.call(other, "act", {"text": "still there"})).text == "still there"


async def test_a_container_that_restarts_costs_its_episodes_alone(serve: Any, container: Container) -> None:
    container.start()
    async with serve(container.entry("Countdown")) as client:
        session, _ = await begun(client, start=1)
        pid = (await client.state(session))["environment"]["pid"]
        container.kill()
        # The kernel ends what else is in a container; here only its first process has ended.
        os.kill(pid, 9)
        container.start()
        with pytest.raises(FailureError) as caught:
            await client.call(session, "act", {"text": "1"})
        assert (caught.value.boundary, caught.value.code) == (Boundary.ENVIRONMENT, "process_died")
        again, _ = await begun(client, start=1)
        assert (await client.call(again, "act", {"text": "1"})).final
