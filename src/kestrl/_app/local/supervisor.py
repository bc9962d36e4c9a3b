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
class ObservedChild:
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
        self._tasks: dict[asyncio.Task[int], ObservedChild] = {}
        self._added = asyncio.Event()
        self.observed = {component.name: ObservedChild(component) for component in components}

    async def run(self) -> int:
        """Runs to the end and returns the learner's exit status.

        Raises:
            UserInputError: A component rejected its input (exit code 2); has its message.
            ComponentFailed: A component ended too often.
        """
        started_names = {child.component.name for child in self._tasks.values()}  # what was added before
        for name, child in self.observed.items():
            if name not in started_names:
                self._begin(child)
        try:
            while True:
                self._added.clear()
                added = asyncio.create_task(self._added.wait())
                done_tasks, _ = await asyncio.wait({*self._tasks, added}, return_when=asyncio.FIRST_COMPLETED)
                added.cancel()
                for task in [task for task in self._tasks if task in done_tasks]:
                    child = self._tasks.pop(task)
                    if task.cancelled():  # removed while it waited to be started again
                        continue
                    if child.joined and isinstance(failure := task.exception(), KestrlError):
                        child.last_error = str(failure)
                        self._changed()
                        continue
                    status = task.result()
                    if child.component.role is Role.LEARNER:
                        return status
        finally:
            await self._stop_all()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5)

    def _begin(self, child: ObservedChild) -> None:
        self._tasks[asyncio.create_task(self._keep(child), name=child.component.name)] = child
        self._added.set()

    def add(self, component: Component) -> None:
        """Starts one more component of a run that goes on."""
        child = self.observed[component.name] = ObservedChild(component, joined=True)
        self._begin(child)
        self._changed()

    async def remove(self, name: str) -> None:
        """Ends a component while the run goes on, and waits for its end."""
        self._leaving.add(name)
        task = next((task for task, child in self._tasks.items() if child.component.name == name), None)
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

    async def _keep(self, child: ObservedChild) -> int:
        """Runs a component with restarts and returns its last exit status."""
        in_row = 0
        while True:
            started = time.monotonic()
            status = await self._run_once(child)
            if self._ended or child.component.name in self._leaving:
                return status
            if status == EXIT_INPUT:
                raise UserInputError(child.last_error or f"{child.component.name} rejected its input")
            lasting = self._cannot_start(child)
            if lasting is not None and not self._stopping:
                raise lasting
            if self._stopping or not (child.component.restarts or was_killed(status)):
                return status
            in_row = 1 if time.monotonic() - started > STEADY_SECONDS else in_row + 1
            if in_row > MAX_RESTARTS:
                raise ComponentFailed(
                    f"{child.component.name} ended {in_row} times in a row (exit status {status}): {child.last_error}\n"
                    f"its log: {self._launcher.log_path(child.component.name)}"
                )
            child.state = ComponentState.WAITING
            child.restarts += 1
            self._changed()
            log.warning("%s ended with status %s, restarting it", child.component.name, status)
            await asyncio.sleep(BACKOFF.pause(in_row))

    def _cannot_start(self, child: ObservedChild) -> ComponentFailed | None:
        """Sets the root cause as last error; returns the failure if no further start of the engine would help."""
        path = child.component.env.get(engine_failure.VARIABLE)
        failure = engine_failure.read(Path(path)) if path else None
        if failure is None:
            return None
        child.last_error = failure.message
        self._changed()
        if not failure.lasting:
            return None
        log_path = self._launcher.log_path(child.component.name)
        return ComponentFailed(
            f"{child.component.name} cannot start: {failure.message}\nits log: {log_path}", code=engine_failure.CODE
        )

    async def _run_once(self, child: ObservedChild) -> int:
        engine_failure.forget(child.component.env)
        running = await self._launcher.start(child.component)
        self._live[child.component.name] = running
        child.state, child.pid = ComponentState.RUNNING, running.process.pid
        self._changed()
        try:
            status = await running.wait()
        finally:
            running.release()
            self._live.pop(child.component.name, None)
        child.state, child.pid, child.last_exit = ComponentState.ENDED, 0, status
        if status != 0 and not self._ended:
            child.last_error = last_error(self._launcher.log_path(child.component.name))
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
