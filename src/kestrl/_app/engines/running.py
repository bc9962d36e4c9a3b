"""One engine as a child of this process, for a check or to serve a policy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kestrl._app.engines.variables import engine_environment
from kestrl._app.ports import LOOPBACK
from kestrl._shared import engine_failure
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component
from kestrl._shared.processes.guarded import GuardedProcess
from kestrl.errors import KestrlError

EVERY_INTERFACE = "0.0.0.0"  # noqa: S104 - a name of what a person asks for
START_SECONDS = 600.0
"""Time limit of the engine's start."""
POLL_SECONDS = 0.2
REQUEST_SECONDS = 10.0
GRACE_SECONDS = 20.0


class EngineStartError(KestrlError):
    """An engine does not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKeys:
    """Credentials of an engine's routes."""

    data: str
    """Grants the routes that sample."""
    control: str
    """Grants all routes."""


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine that answers."""

    url: str
    process: subprocess.Popen[bytes]

    def wait(self) -> int:
        """Waits until it ends; returns its exit status."""
        return self.process.wait()


@contextmanager
def running_engine(
    component: Component, keys: EngineKeys, work: Path, log: Path, host: str = LOOPBACK
) -> Generator[RunningEngine]:
    """Runs an engine until the context ends, or this process does.

    Args:
        component: The engine, on one HTTP port of this machine.
        keys: Credentials of its routes.
        work: Its working directory.
        log: File for its output.
        host: Address that it listens at.

    Raises:
        EngineStartError: It ended, or did not answer in time. The message has the path of its log.
    """
    environment = {
        **engine_environment(os.environ, component.python),
        **component.env,
        Secret.ENGINE_KEY.value: keys.data,
        Secret.ENGINE_CONTROL_KEY.value: keys.control,
    }
    engine_failure.forget(environment)
    command = (component.python or sys.executable, "-m", component.module, *component.args)
    with log.open("wb") as output:
        engine = GuardedProcess.start(
            command, variables=environment, stdout=output, stderr=output, folder=work, grace=GRACE_SECONDS
        )
    url = f"http://{LOOPBACK if host == EVERY_INTERFACE else host}:{component.ports['http']}"
    try:
        assert component.ready is not None
        _wait(engine.process, f"{url}{component.ready.http_path}", component.env, log)
        yield RunningEngine(url, engine.process)
    finally:
        engine.release()
        engine.wait()


def _wait(process: subprocess.Popen[bytes], url: str, environment: Mapping[str, str], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _answers(url):
        if process.poll() is not None:
            raise EngineStartError(f"the engine does not start: {_reason(process, environment)}; its log is {log}")
        if time.monotonic() > deadline:
            raise EngineStartError(f"the engine did not start in {START_SECONDS:g} s; its log is {log}")
        time.sleep(POLL_SECONDS)


def _reason(process: subprocess.Popen[bytes], environment: Mapping[str, str]) -> str:
    failure = engine_failure.read(Path(environment[engine_failure.VARIABLE]))
    return f"it ended with status {process.returncode}" if failure is None else failure.message


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=REQUEST_SECONDS) as answer:  # noqa: S310 - of this machine
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
