"""What the tests of whole runs share: the program as a child process, what it left running, what it wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kestrl._app.local.rundir import RunDir

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "email-search" / "quickstart.yaml"
SMALL = [
    *("--set", "data.validation.size=12", "--set", "algorithm.groupsPerStep=2"),
    *("--set", "algorithm.groupSize=4", "--set", "schedule.checkpointEvery=1"),
]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "kestrl._app.cli.main", *map(str, arguments)]


def kestrl(
    *arguments: str | Path, code: int = 0, timeout: float = 600, prefix: Sequence[str] = (), **environment: str
) -> str:
    done = subprocess.run(
        [*prefix, *command(*arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
        cwd=ROOT,
        env=os.environ | environment,
    )
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed, printed
    assert done.returncode == code, printed
    return printed


def belonging_to(folder: Path) -> list[str]:
    """Command lines of live processes that were started for runs in a folder: they all have it in their environment or
    arguments."""
    found: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) == os.getpid():
            continue
        try:
            line = (process / "cmdline").read_bytes()
            place = str((process / "cwd").readlink())
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, ProcessLookupError):
            continue
        if state != "Z" and (str(folder).encode() in line or place.startswith(str(folder))):
            found.append(line.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    """Waits for what another process does; there is no event to await across processes."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


def summary_of(run: RunDir) -> dict[str, Any]:
    summary = run.read_json("summary.json")
    assert summary is not None
    return summary


def wait_for_step(run: RunDir, process: subprocess.Popen[str], step: int) -> None:
    """Waits for `process` to report a step; the record of an earlier process of the same run does not count."""

    def reached() -> bool:
        assert process.poll() is None, "it ended too early"
        record = run.record()
        return (
            record is not None
            and record.pid == process.pid
            and record.state is not None
            and record.state.steps.done >= step
        )

    eventually(reached, 480)
