"""One component as a process of this machine: under a process guard, with its settings file, its credentials and its bounded log."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kestrl import process_guard
from kestrl.credentials import Secret
from kestrl.local.logs import Log, tail
from kestrl.local.rundir import write_atomic
from kestrl.plan.components import Component, Role

LAST_WORDS_SECONDS = 5.0
"""For the last lines of a program that has ended: nothing it started is alive then."""
STOP_SECONDS = 40.0
"""Between SIGTERM and SIGKILL: longer than any component takes to drain."""
KEPT_OUT = frozenset({"VLLM_CPU_KVCACHE_SPACE", "PYTHONDONTWRITEBYTECODE", *(secret.value for secret in Secret)})
"""Variables of this shell that no component gets: an empty one of the first stops vLLM, the second makes each start compile anew, and
credentials are the run's own."""


@dataclass(slots=True)
class Running:
    """A started component."""

    component: Component
    process: asyncio.subprocess.Process
    tether: int
    """The end of the pipe that keeps it alive."""
    logging: asyncio.Task[None]
    """Copies its output into its log."""

    async def wait(self) -> int:
        """Its exit status, once it and everything it started are gone and its log is whole."""
        try:
            status = await self.process.wait()
            await asyncio.wait([self.logging], timeout=LAST_WORDS_SECONDS)
            return status
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Closes the tether, which kills whatever still hangs on it."""
        if self.tether >= 0:
            os.close(self.tether)
            self.tether = -1

    def terminate(self) -> None:
        """Asks it to drain and end; the guard kills it after `STOP_SECONDS`."""
        if self.process.returncode is None:
            self.process.terminate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Starts components in one run's folder."""

    folder: Path
    secrets: Mapping[str, str]
    """Every credential of the run, by variable."""
    granted: Mapping[Role, Mapping[str, str]] = field(default_factory=dict[Role, Mapping[str, str]])
    """Variables of the secrets that the job refers to, by who gets them."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def log_path(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def _environment(self, component: Component) -> dict[str, str]:
        inherited = {key: value for key, value in self.environment.items() if key not in KEPT_OUT}
        granted = {secret.value: self.secrets[secret.value] for secret in component.secrets}
        own = self.granted.get(component.role, {})
        return {**component.env_defaults, **inherited, **own, "PYTHONUNBUFFERED": "1", **component.env, **granted}

    def command(self, component: Component) -> list[str]:
        """`python -m MODULE [--settings FILE] ARGS`, the settings written first."""
        command = [sys.executable, "-m", component.module]
        if component.settings is not None:
            path = self.folder / "settings" / f"{component.name}.json"
            write_atomic(path, component.settings.model_dump_json(indent=2))
            command += ["--settings", str(path)]
        return [*command, *component.args]

    async def start(self, component: Component) -> Running:
        """Starts a component; it lives until it ends, is terminated, or this process is gone."""
        log = Log(self.log_path(component.name))
        held, tether = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", process_guard.__file__, str(held), str(STOP_SECONDS)),
                *self.command(component),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(component),
                cwd=self.folder,
                pass_fds=(held,),
                start_new_session=True,  # Ctrl-C reaches the runner alone, which drains in order
            )
        except BaseException:
            os.close(tether)
            raise
        finally:
            os.close(held)
        assert process.stdout is not None
        logging = asyncio.create_task(log.copy(process.stdout), name=f"log-{component.name}")
        return Running(component=component, process=process, tether=tether, logging=logging)


def last_error(log: Path) -> str:
    """The last `error: ...` line of a component's log (with the lines that belong to it), or its last line."""
    lines = tail(log, 16_384).decode(errors="replace").splitlines()
    for position in range(len(lines) - 1, -1, -1):
        if lines[position].startswith("error: "):
            return "\n".join(lines[position:]).removeprefix("error: ")
    return lines[-1] if lines else ""
