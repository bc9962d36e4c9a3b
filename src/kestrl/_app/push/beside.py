"""`telemetry.mlflow`: `kestrl push --to mlflow` as a program beside a run. Its failures are words, never the run's."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from kestrl._app.local.logs import Log
from kestrl._app.local.rundir import RunDir
from kestrl._app.push.follower import LEFT_OUT, RECOVERED, WAITING
from kestrl._shared.processes.guarded import guard_command
from kestrl._shared.spec.job import MLflowTracking
from kestrl.errors import UserInputError

PROGRAM = "kestrl._app.cli.main"
PACKAGES = ("httpx2", "opentelemetry.proto")
"""What it needs beside the packages of `kestrl run`."""
STOP_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
FINISH_SECONDS = 60.0
"""Time limit of sending the rest when a run has ended."""
ERROR = "error: "
"""How the program's last lines begin if it fails."""
LONGEST_LINE = 1 << 20
LONGEST_REPORT = 1_000
Report = Callable[[str, bool], None]


class MLflowFollower:
    """Sends a run to MLflow while it goes on.

    Args:
        tracking: The server.
        credentials: Reads the environment variables with the credentials for it.
        base: The manifest's folder, to which the path of a database is relative.

    Raises:
        UserInputError: A package is missing.
    """

    name = "mlflow"

    def __init__(self, tracking: MLflowTracking, credentials: Callable[[], Mapping[str, str]], base: Path) -> None:
        if missing_packages := [package for package in PACKAGES if find_spec(package) is None]:
            raise UserInputError(
                f"spec.telemetry.mlflow needs {', '.join(missing_packages)}: pip install 'kestrl[push]'"
            )
        scheme, _, place = tracking.uri.partition("///")
        uri = f"sqlite:///{(base / place).resolve()}" if scheme == "sqlite:" else tracking.uri
        self._tracking, self._credentials = tracking.model_copy(update={"uri": uri}), credentials

    async def follow(self, run: RunDir, report: Report) -> None:
        """Sends what the run stores, until it is cancelled."""
        report(f"sends to {self._tracking.uri}", False)
        status, last = await self._push(run, report, "--follow")
        report(f"ended ({status}): {last}; the rest is sent when the run has ended", True)

    async def finish(self, run: RunDir, report: Report) -> None:
        """Sends the rest of a run that has ended, within `FINISH_SECONDS`."""
        problem = f"not everything was sent; send it: {shlex.join(['kestrl', *self._arguments(run)])}"
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                status, last = await self._push(run, report)
        except TimeoutError:
            report(f"no end within {FINISH_SECONDS:g} s; {problem}", True)
            return
        report(f"{last}; {problem}" if status else f"{last}: everything is at {self._tracking.uri}", status != 0)

    def _arguments(self, run: RunDir) -> list[str]:
        tracking = self._tracking
        experiment = ["--experiment", tracking.experiment] if tracking.experiment else []
        target = ["--to", "mlflow", "--uri", tracking.uri, *experiment, "--sample", f"{tracking.sample:g}"]
        return ["push", run.id, "--runs", str(run.path.parent), *target]

    async def _push(self, run: RunDir, report: Report, *options: str) -> tuple[int, str]:
        """Exit status and last line of `kestrl push`."""
        log = Log(run.path / "logs" / f"{self.name}.log")
        last = ""
        try:
            async with self._started(run, *options) as process:
                assert process.stdout is not None
                async for line in process.stdout:
                    log.write(line)
                    text = line.decode(errors="replace").strip()
                    last = (f"{last} {text}" if last.startswith(ERROR) else text or last)[:LONGEST_REPORT]
                    if text.startswith((WAITING, LEFT_OUT)):
                        report(text, True)
                    elif text == RECOVERED:
                        report(f"sends to {self._tracking.uri}", False)
                return await process.wait(), last.removeprefix(ERROR)
        finally:
            log.close()

    @asynccontextmanager
    async def _started(self, run: RunDir, *options: str) -> AsyncGenerator[asyncio.subprocess.Process]:
        """The program, under a process guard. At the end of the block it and all below it have ended."""
        read_end, pipe = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *guard_command(
                    read_end, [sys.executable, "-m", PROGRAM, *self._arguments(run), *options], grace=STOP_SECONDS
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._credentials(), "PYTHONUNBUFFERED": "1"},
                cwd=run.path,
                pass_fds=(read_end,),
                start_new_session=True,  # Ctrl-C only reaches the runner
                limit=LONGEST_LINE,
            )
        except BaseException:
            os.close(pipe)
            raise
        finally:
            os.close(read_end)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            try:
                await process.wait()
            finally:
                os.close(pipe)
