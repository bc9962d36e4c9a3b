"""Supervises the components of a run: restarts them with back-off and a limit, and ends the run when the learner
ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kestrl._app.local.processes import Launcher, Running, last_error
from kestrl._app.local.runner_record import ComponentRecord
from kestrl._shared import engine_failure
from kestrl._shared.backoff import Backoff
from kestrl._shared.conventions import EXIT_INPUT
from kestrl._shared.plan.components import Component, Role
from kestrl.errors import KestrlError, UserInputError
from kestrl.runstate.states import ComponentState

log = logging.getLogger(__name__)
MAX_RESTARTS = 5
"""Maximum consecutive restarts; the count is reset after `STEADY_SECONDS` of running."""
STEADY_SECONDS = 120.0
BACKOFF = Backoff(1.0, 30.0)
"""Pauses before consecutive restarts."""


@dataclass(slots=True)
class Observed:
    """Observations of a component."""

    component: Component
    state: ComponentState = ComponentState.STARTING
    pid: int = 0
    restarts: int = 0
    last_exit: int | None = None
    last_error: str = ""
    joined: bool = False
    """Whether it joined a run that went on: what it fails for does not end the run."""

    def record(self) -> ComponentRecord:
        """The form in `run.json`."""
        return ComponentRecord(
            role=self.component.role,
            state=self.state,
            pid=self.pid,
            ports=dict(self.component.ports),
            devices=self.component.device.indices,
            restarts=self.restarts,
            last_exit=self.last_exit,
            last_error=self.last_error,
        )


class ComponentFailed(KestrlError):
    """A component failed permanently."""

    code = "component_failed"


def was_killed(status: int) -> bool:
    """Whether a signal ended a process: 128 + its number as passed on by the guard, or negative if the guard was
    killed.
    """
    return status < 0 or status > 128


class Supervisor:
    """Runs the components of a run until the learner ends, a component fails permanently, or it is cancelled."""

    def __init__(self, components: Sequence[Component], launcher: Launcher, changed: Callable[[], None]) -> None:
        self._launcher = launcher
        self._changed = changed
        self._live: dict[str, Running] = {}
        self._stopping = False
        self._ended = False
        """Whether all components were asked to end; how they then end is no failure of theirs."""
        self._leaving: set[str] = set()
        """Components that are ended while the run goes on."""
        self._tasks: dict[asyncio.Task[int], Observed] = {}
        self._added = asyncio.Event()
        self.observed = {component.name: Observed(component) for component in components}

    async def run(self) -> int:
        """Runs to the end and returns the learner's exit status.

        Raises:
            UserInputError: A component rejected its input (exit code 2); has its message.
            ComponentFailed: A component ended too often.
        """
        begun = {seen.component.name for seen in self._tasks.values()}  # what was added before
        for name, seen in self.observed.items():
            if name not in begun:
                self._begin(seen)
        try:
            while True:
                self._added.clear()
                added = asyncio.create_task(self._added.wait())
                done, _ = await asyncio.wait({*self._tasks, added}, return_when=asyncio.FIRST_COMPLETED)
                added.cancel()
                for task in [task for task in self._tasks if task in done]:
                    seen = self._tasks.pop(task)
                    if task.cancelled():  # removed while it waited to be started again
                        continue
                    if seen.joined and isinstance(failure := task.exception(), KestrlError):
                        seen.last_error = str(failure)
                        self._changed()
                        continue
                    status = task.result()
                    if seen.component.role is Role.LEARNER:
                        return status
        finally:
            await self._stop_all()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5)

    def _begin(self, seen: Observed) -> None:
        self._tasks[asyncio.create_task(self._keep(seen), name=seen.component.name)] = seen
        self._added.set()

    def add(self, component: Component) -> None:
        """Starts one more component of a run that goes on."""
        seen = self.observed[component.name] = Observed(component, joined=True)
        self._begin(seen)
        self._changed()

    async def remove(self, name: str) -> None:
        """Ends a component while the run goes on, and waits for its end."""
        self._leaving.add(name)
        task = next((task for task, seen in self._tasks.items() if seen.component.name == name), None)
        if name in self._live:
            self._live[name].terminate()
        elif task is not None:
            task.cancel()  # it waits to be started again
        if task is not None:
            await asyncio.wait([task])
        self._leaving.discard(name)
        self.observed.pop(name, None)
        self._changed()

    def drain_learner(self) -> None:
        """Asks the learner to finish its step, checkpoint and end, which ends the run."""
        self._stopping = True
        for running in self._live.values():
            if running.component.role is Role.LEARNER:
                running.terminate()

    async def _keep(self, seen: Observed) -> int:
        """Runs a component with restarts and returns its last exit status."""
        in_row = 0
        while True:
            started = time.monotonic()
            status = await self._run_once(seen)
            if self._ended or seen.component.name in self._leaving:
                return status
            if status == EXIT_INPUT:
                raise UserInputError(seen.last_error or f"{seen.component.name} rejected its input")
            lasting = self._cannot_start(seen)
            if lasting is not None and not self._stopping:
                raise lasting
            if self._stopping or not (seen.component.restarts or was_killed(status)):
                return status
            in_row = 1 if time.monotonic() - started > STEADY_SECONDS else in_row + 1
            if in_row > MAX_RESTARTS:
                raise ComponentFailed(
                    f"{seen.component.name} ended {in_row} times in a row (exit status {status}): {seen.last_error}\n"
                    f"its log: {self._launcher.log_path(seen.component.name)}"
                )
            seen.state = ComponentState.WAITING
            seen.restarts += 1
            self._changed()
            log.warning("%s ended with status %s, restarting it", seen.component.name, status)
            await asyncio.sleep(BACKOFF.pause(in_row))

    def _cannot_start(self, seen: Observed) -> ComponentFailed | None:
        """Sets the root cause as last error; returns the failure if no further start of the engine would help."""
        path = seen.component.env.get(engine_failure.VARIABLE)
        found = engine_failure.read(Path(path)) if path else None
        if found is None:
            return None
        seen.last_error = found.message
        self._changed()
        if not found.lasting:
            return None
        log_path = self._launcher.log_path(seen.component.name)
        return ComponentFailed(
            f"{seen.component.name} cannot start: {found.message}\nits log: {log_path}", code=engine_failure.CODE
        )

    async def _run_once(self, seen: Observed) -> int:
        engine_failure.forget(seen.component.env)
        running = await self._launcher.start(seen.component)
        self._live[seen.component.name] = running
        seen.state, seen.pid = ComponentState.RUNNING, running.process.pid
        self._changed()
        try:
            status = await running.wait()
        finally:
            running.release()
            self._live.pop(seen.component.name, None)
        seen.state, seen.pid, seen.last_exit = ComponentState.ENDED, 0, status
        if status != 0 and not self._ended:
            seen.last_error = last_error(self._launcher.log_path(seen.component.name))
        self._changed()
        return status

    async def _stop_all(self) -> None:
        """Ends running components: SIGTERM first, then killed by their guards."""
        self._stopping = self._ended = True
        live = list(self._live.values())
        for running in live:
            running.terminate()
        if live:
            waits = [asyncio.create_task(running.wait()) for running in live]
            await asyncio.wait(waits)
