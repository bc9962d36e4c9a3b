"""The engines of a local run while it goes on: `kestrl scale` asks for a number, and engines join and leave.

The learner reads which engines there are from a file. An engine that leaves is taken out of the file first, so that it
is named no more. Then its agent is asked to end, which drains the engine before it does, as on a cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kestrl._app.local.files import write_atomic
from kestrl._app.local.site import Listener, reserve_engine
from kestrl._app.local.supervisor import Supervisor
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.devices import with_devices
from kestrl._shared.plan.engines import engine_component, engine_entry
from kestrl._shared.plan.planning import agent_component
from kestrl._shared.plan.settings.learner import EngineList
from kestrl._shared.plan.site import Site
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.inference import MOST_ENGINES
from kestrl.errors import UserInputError

REQUEST = "scale.json"
"""File of a run's folder with the number of engines that is asked for."""
LOOK_SECONDS = 0.5


class ScaleRequest(BaseModel):
    """The number of engines that a run is to have."""

    model_config = ConfigDict(frozen=True)
    engines: int = Field(ge=1, le=MOST_ENGINES)


def check_scale(job: AgentRLJob, engines: int, limit: int | None) -> None:
    """Checks that a run of a job can have a number of engines. `limit` is that of the run's devices, None without one.

    Raises:
        UserInputError: It cannot.
    """
    inference, replicas = job.spec.inference, job.spec.inference.replicas
    if not replicas.fixed and replicas.nearest(engines) != engines:
        raise UserInputError(
            f"engines={engines}: spec.inference.replicas allows {replicas.min} to {replicas.max}; name one of these, "
            "or change the range and run the job again, which resumes it"
        )
    if not 1 <= engines <= MOST_ENGINES:
        raise UserInputError(f"engines={engines}: is not between 1 and {MOST_ENGINES}")
    if limit is not None and engines > limit:
        raise UserInputError(
            f"engines={engines}: this run has {inference.accelerator.profile} devices for {limit}; offer it more "
            "devices and run the job again, which resumes it"
        )


class LocalEngineFleet:
    """Keeps as many engines as are asked for.

    Args:
        job: The job.
        site: Its site.
        folder: The run's folder.
        ports: Ports of the site, to which those of further engines are added.
        supervisor: Starts and ends their processes.
        say: Shows a line to the person who watches the run.
    """

    def __init__(
        self,
        job: AgentRLJob,
        site: Site,
        folder: Path,
        ports: dict[Listener, int],
        supervisor: Supervisor,
        say: Callable[[str], None],
    ) -> None:
        self._job, self._site, self._ports = job, site, ports
        self._request, self._supervisor, self._say = folder / REQUEST, supervisor, say
        self._present = list(range(job.spec.inference.replicas.min))
        self._held = ExitStack()

    async def run(self) -> None:
        """Follows requests until cancelled. One of an earlier runner no longer counts."""
        self._request.unlink(missing_ok=True)
        last_content = b""
        with self._held:
            while True:
                content = self._request.read_bytes() if self._request.exists() else b""
                if content != last_content:
                    last_content = content
                    await self._follow(content)
                await asyncio.sleep(LOOK_SECONDS)

    async def _follow(self, content: bytes) -> None:
        try:
            engines = ScaleRequest.model_validate_json(content).engines
            check_scale(self._job, engines, None if self._site.devices is None else self._site.devices.engine_limit)
            await self._scale(engines)
        except (ValidationError, UserInputError, OSError) as error:
            self._say(f"warning: {self._request} is not followed: {error}")

    async def _scale(self, replicas: int) -> None:
        while len(self._present) < replicas:
            self._start(next(index for index in range(MOST_ENGINES) if index not in self._present))
        leaving = self._present[replicas:]
        if leaving:
            self._present = self._present[:replicas]
            self.write()
            await asyncio.gather(*(self._end(index) for index in leaving))

    def _start(self, index: int) -> None:
        reserve_engine(self._ports, index, self._held)
        for component in self._components(index):
            self._supervisor.add(component)
        self._present.append(index)
        self.write()
        self._say(f"engine-{index} joins the run")

    def _components(self, index: int) -> tuple[Component, ...]:
        components = engine_component(self._job, self._site, index), agent_component(self._job, self._site, index)
        return (
            components
            if self._site.devices is None
            else tuple(with_devices(component, self._site.devices) for component in components)
        )

    async def _end(self, index: int) -> None:
        """Ends an engine after its agent, which ends when the running turns are over or their deadline has passed."""
        for role in (Role.INFERENCE, Role.ENGINE):
            await self._supervisor.remove(f"{role}-{index}")
        self._say(f"engine-{index} has left the run")

    def write(self) -> None:
        """Writes which engines there are, for the learner."""
        assert self._site.engines_file is not None
        engines = tuple(engine_entry(self._site, index) for index in self._present)
        write_atomic(Path(self._site.engines_file), EngineList(engines=engines).model_dump_json(indent=2))
