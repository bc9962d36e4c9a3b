"""`kestrl scale`: engines that join a run on this machine, and leave it when their turns are over."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kestrl._app.local import engine_fleet
from kestrl._app.local.devices import LocalDevice
from kestrl._app.local.engine_fleet import LocalEngineFleet, ScaleRequest, check_scale
from kestrl._app.local.memory import machine_devices
from kestrl._app.local.processes import Launcher
from kestrl._app.local.site import replicas
from kestrl._app.local.supervisor import Supervisor
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.devices import device_needs
from kestrl._shared.plan.settings.learner import EngineList
from kestrl._shared.plan.site import ReplicaEndpoint, Site
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl.errors import UserInputError

SLEEPER = "import time; time.sleep(600)"
DRAINER = """
import os, signal, time
def drain(*_):
    open("drains", "w").close()
    while not os.path.exists("drained"):
        time.sleep(0.01)
    raise SystemExit(0)
signal.signal(signal.SIGTERM, drain)
open("started", "w").close()
time.sleep(600)
"""
"""An agent: after SIGTERM it ends when its engine has drained."""


def job(replicas: Any = 1, **spec: Any) -> AgentRLJob:
    return parse_job(
        {
            "apiVersion": "kestrl.dev/v1alpha1",
            "kind": "AgentRLJob",
            "metadata": {"name": "scaled"},
            "spec": {
                "model": {"base": "demo://tiny"},
                "data": {"train": {"uri": "demo://arithmetic", "size": 8}},
                "rewards": [{"rule": "kestrl.rewards:exact_match"}],
                "inference": {"replicas": replicas, **spec.pop("inference", {})},
                **spec,
            },
        }
    )


class Fleet:
    """A fleet of sleepers."""

    def __init__(self, folder: Path) -> None:
        (folder / "logs").mkdir()
        (folder / "drainer.py").write_text(DRAINER)
        (folder / "sleeper.py").write_text(SLEEPER)
        self.folder, self.ports, self.said = folder, dict[Any, int](), list[str]()
        launcher = Launcher(folder=folder, secrets={secret.value: "x" for secret in Secret}, environment=os.environ)
        learner = Component(name="learner-0", role=Role.LEARNER, module="sleeper", restarts=False)
        self.supervisor = Supervisor([learner], launcher, lambda: None)
        site = Site(
            run="scaled-1",
            endpoint=self._endpoint,
            model="m",
            template=None,
            train="t",
            validation=None,
            storage="s",
            database="d",
            work_dir=str(folder),
            engines_file=str(folder / "engines.json"),
        )
        self.fleet = LocalEngineFleet(job(), site, folder, self.ports, self.supervisor, self.said.append)
        self.fleet._components = lambda index: tuple(  # what the plan makes of it needs an engine
            Component(name=f"{role}-{index}", role=role, module=module)
            for role, module in ((Role.ENGINE, "sleeper"), (Role.INFERENCE, "drainer"))
        )

    def _endpoint(self, role: Role, index: int) -> ReplicaEndpoint:
        return ReplicaEndpoint(bind="127.0.0.1", host="127.0.0.1", port=self.ports.get((role, index), 1))

    def asks_for(self, engines: int) -> None:
        (self.folder / "scale.json").write_text(ScaleRequest(engines=engines).model_dump_json())

    @property
    def listed(self) -> list[str]:
        content = json.loads((self.folder / "engines.json").read_bytes())
        return [entry.name for entry in EngineList.model_validate(content).engines]

    @property
    def running(self) -> set[str]:
        return {name for name, seen in self.supervisor.observed.items() if seen.pid}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - files and processes have no event
            await asyncio.sleep(0.01)


@pytest.fixture
async def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(engine_fleet, "LOOK_SECONDS", 0.02)
    fleet = Fleet(tmp_path)
    fleet.fleet.write()
    tasks = [asyncio.create_task(fleet.supervisor.run()), asyncio.create_task(fleet.fleet.run())]
    try:
        yield fleet
    finally:
        (tmp_path / "drained").touch()
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_engines_join_and_leave_when_their_turns_are_over(scaled: Fleet) -> None:
    fleet = scaled
    await until(lambda: "learner-0" in fleet.running)
    assert fleet.listed == ["engine-0"]
    fleet.asks_for(2)
    await until(lambda: {"engine-1", "inference-1"} <= fleet.running and (fleet.folder / "started").exists())
    assert fleet.listed == ["engine-0", "engine-1"]
    assert {(Role.ENGINE, 1), (Role.INFERENCE, 1), (Role.INFERENCE, 1, "metrics")} == set(fleet.ports)
    fleet.asks_for(1)
    await until((fleet.folder / "drains").exists)
    assert fleet.listed == ["engine-0"], "it gets no further turn"
    assert {"engine-1", "inference-1"} <= fleet.running, "it has one that is not over"
    (fleet.folder / "drained").touch()
    await until(lambda: fleet.running == {"learner-0"})
    await until(lambda: fleet.said == ["engine-1 joins the run", "engine-1 has left the run"])


async def test_a_request_that_cannot_be_followed_is_said_and_changes_nothing(scaled: Fleet) -> None:
    fleet = scaled
    (fleet.folder / "scale.json").write_text('{"engines": 0}')
    await until(lambda: fleet.said)
    assert "scale.json is not followed" in fleet.said[0]
    assert fleet.listed == ["engine-0"]


def test_devices_bound_the_number_of_engines() -> None:
    check_scale(job(2), 5, None)
    check_scale(job(2, rewards=[{"ruler": {"self": True}}]), 1, None)  # its judge follows the engines
    with pytest.raises(UserInputError, match="between 1 and 256"):
        check_scale(job(2), 0, None)
    on_cards = job(2, inference={"accelerator": {"profile": "nvidia"}})
    check_scale(on_cards, 1, 3)
    check_scale(on_cards, 3, 3)
    with pytest.raises(UserInputError) as caught:
        check_scale(on_cards, 4, 3)
    assert str(caught.value) == (
        "engines=4: this run has nvidia devices for 3; offer it more devices and run the job again, which resumes it"
    )


@pytest.mark.parametrize(
    ("engines", "offered", "joining", "note"),
    [
        ({"min": 1, "max": 3}, 4, {"engine-1": ("2",), "engine-2": ("3",)}, ""),
        ({"min": 1, "max": 2}, 4, {"engine-1": ("2",)}, ""),
        ({"min": 1, "max": 4}, 3, {"engine-1": ("2",)}, "replicas.max: 4 engines, and this machine offers nvidia"),
        (2, 4, {"engine-2": ("3",)}, ""),
        (1, 2, {}, ""),
    ],
)
def test_engines_that_join_have_the_devices_that_are_left(
    engines: Any, offered: int, joining: dict[str, tuple[str, ...]], note: str, tmp_path: Path
) -> None:
    on_cards = job(
        engines,
        inference={"accelerator": {"profile": "nvidia"}},
        learner={"accelerator": {"profile": "nvidia"}},
    )
    cards = {"nvidia": [LocalDevice(index=str(index), name="card") for index in range(offered)]}
    devices = machine_devices(on_cards, tuple(device_needs(on_cards.spec)), cards, model="m", cache_dir=tmp_path)
    least = on_cards.spec.inference.replicas.min
    start = {f"engine-{index}": (str(index),) for index in range(least)} | {"learner-0": (str(least),)}
    assert devices.assigned == start | joining
    assert devices.engine_limit == least + len(joining)
    assert note in "".join(devices.notes)
    assert bool(note) == bool(devices.notes)


def test_a_range_bounds_the_number_of_engines() -> None:
    ranged = job({"min": 2, "max": 4})
    for number in (2, 3, 4):
        check_scale(ranged, number, None)
    for number in (1, 5):
        with pytest.raises(UserInputError) as caught:
            check_scale(ranged, number, None)
        assert str(caught.value) == (
            f"engines={number}: spec.inference.replicas allows 2 to 4; name one of these, or change the range and run "
            "the job again, which resumes it"
        )
    assert [index for role, index in replicas(ranged) if role is Role.ENGINE] == [0, 1], "a run starts with the least"
