"""Runs a component as a process: with a process guard, a settings file, its credentials and a bounded log."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from kestrl._app.engines.variables import engine_environment
from kestrl._app.local.files import write_atomic
from kestrl._app.local.logs import Log, tail
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.processes.guarded import guard_command
from kestrl._shared.spec.rules.reserved_arguments import RESERVED_VARIABLES
from kestrl.errors import UserInputError

SERVICES = ("kestrl-inference", "kestrl-judge", "kestrl-learner", "kestrl-rollout", "kestrl-tools")
"""Distributions whose programs are the processes of a run."""
LOCAL = "pip install 'kestrl[local]'"
"""Command that installs all of them."""
LAST_LINES_SECONDS = 5.0
"""Time limit in seconds for the remaining output of a program that has ended with all its children."""
KEPT_OUT = frozenset({"VLLM_CPU_KVCACHE_SPACE", "PYTHONDONTWRITEBYTECODE", *(secret.value for secret in Secret)})
"""Environment variables that components do not inherit: an empty first one stops vLLM, the second one forces a
compilation on every start, and credentials belong to the run."""


def missing_services(names: Sequence[str] = SERVICES) -> list[str]:
    """Those of some distributions that are not installed beside this program."""
    return [name for name in names if find_spec(name.replace("-", "_")) is None]


def require_services(names: Sequence[str] = SERVICES) -> None:
    """Refuses a run that could not start its processes.

    Raises:
        UserInputError: Some of the distributions are missing.
    """
    if missing_names := missing_services(names):
        raise UserInputError(f"{', '.join(missing_names)}: not installed, which a run on this machine needs; {LOCAL}")


@dataclass(slots=True)
class Running:
    """A started component."""

    component: Component
    process: asyncio.subprocess.Process
    guard_pipe: int
    """Write end of the guard's pipe; closing it kills the process."""
    logging: asyncio.Task[None]
    """Task that copies the output to the log."""

    async def wait(self) -> int:
        """Waits until the process and all its descendants have ended and the log is complete; returns the exit
        status.
        """
        try:
            status = await self.process.wait()
            await asyncio.wait([self.logging], timeout=LAST_LINES_SECONDS)
            return status
        finally:
            self.release()

    def release(self) -> None:
        """Closes the guard's pipe, which kills the process and its descendants."""
        if self.guard_pipe >= 0:
            os.close(self.guard_pipe)
            self.guard_pipe = -1

    def terminate(self) -> None:
        """Sends SIGTERM; the guard kills the process after its component's `stop_seconds`."""
        if self.process.returncode is None:
            self.process.terminate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Starts components in one run's folder."""

    folder: Path
    secrets: Mapping[str, str]
    """All credentials of the run, by variable."""
    granted: Mapping[Role, Mapping[str, str]] = field(default_factory=dict[Role, Mapping[str, str]])
    """Variables from the secrets of the job, by role."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _environment(self, component: Component) -> dict[str, str]:
        inherited = {key: value for key, value in self.environment.items() if key not in KEPT_OUT}
        if component.role is Role.ENGINE:
            inherited = engine_environment(inherited, component.python)
        granted = {secret.value: self.secrets[secret.value] for secret in component.secrets}
        role_variables = self.granted.get(component.role, {})
        if component.role is Role.ENGINE:  # as a patch of its pod cannot set them
            inherited, role_variables = (
                {name: value for name, value in variables.items() if not RESERVED_VARIABLES.fullmatch(name)}
                for variables in (inherited, role_variables)
            )
        return {
            **component.env_defaults,
            **inherited,
            **role_variables,
            "PYTHONUNBUFFERED": "1",
            **component.env,
            **granted,
        }

    def command(self, component: Component) -> list[str]:
        """`python -m MODULE [--settings FILE] ARGS`, the settings written first."""
        command = [component.python or sys.executable, "-m", component.module]
        if component.settings is not None:
            path = self.folder / "settings" / f"{component.name}.json"
            write_atomic(path, component.settings.model_dump_json(indent=2))
            command += ["--settings", str(path)]
        return [*command, *component.args]

    async def start(self, component: Component) -> Running:
        """Starts a component, which is killed when this process ends."""
        log = Log(self.log_path(component.name))
        read_end, guard_pipe = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *guard_command(read_end, self.command(component), grace=component.stop_seconds),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(component),
                cwd=self.folder,
                pass_fds=(read_end,),
                start_new_session=True,  # Ctrl-C only reaches the runner, which drains in order
            )
        except BaseException:
            os.close(guard_pipe)
            raise
        finally:
            os.close(read_end)
        assert process.stdout is not None
        logging = asyncio.create_task(log.copy(process.stdout), name=f"log-{component.name}")
        return Running(component=component, process=process, guard_pipe=guard_pipe, logging=logging)


def last_error(log: Path) -> str:
    """Last `error: ...` message of a component's log with its continuation lines, or the last line."""
    lines = tail(log, 16_384).decode(errors="replace").splitlines()
    for position in range(len(lines) - 1, -1, -1):
        if lines[position].startswith("error: "):
            return "\n".join(lines[position:]).removeprefix("error: ")
    return lines[-1] if lines else ""
