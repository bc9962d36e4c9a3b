"""A check of one part of a job in a process of its own: what the part loads at its start, without serving anything.

Importing a user's module may print, hang, or end the process, so that it never happens in the command that asks. The child
reads its settings from a file and writes a report to another; what it prints is kept away from the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from kestrl.errors import UserInputError
from kestrl.plan.settings import DataSettings, Model, RolloutSettings, read_settings

Settings = TypeVar("Settings", bound=Model)
Facts = Mapping[str, Any]


class RolloutCheck(Model):
    """What the check of a rollout worker is given."""

    rollout: RolloutSettings
    tools: tuple[dict[str, Any], ...]
    """Name, description, parameters and environment (or an empty text) of each tool of the job."""
    data: dict[str, DataSettings]
    """Data sets by name."""


class DecodeRequest(Model):
    """Token ids to be written as text."""

    tokenizer: str
    """Folder or Hugging Face id."""
    ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found."""

    facts: Facts
    problems: tuple[str, ...] = ()
    """Each names its field and the fix."""
    missing: str = ""
    """The distribution that would have checked, where it is not installed."""


def run_check(kind: type[Settings], check: Callable[[Settings], Facts]) -> None:
    """The child: `python -m MODULE --settings FILE --report FILE`. Ends the process at once, whatever threads are left.

    Args:
        kind: What its settings are.
        check: Gives facts, or raises UserInputError with a problem on each line.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()
    settings = read_settings(kind, arguments.settings)
    report: dict[str, Any] = {"facts": {}, "problems": []}
    try:
        report["facts"] = dict(check(settings))
    except UserInputError as error:
        report["problems"] = str(error).splitlines()
    arguments.report.write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)


def ask(module: str, settings: Model, *, subject: str, seconds: float) -> Report:
    """Runs a check and waits for its report.

    Args:
        module: Such as `kestrl_tools.check`.
        settings: What it is given.
        subject: What it looks at, for messages, such as `spec.tools`.
        seconds: Its time limit.
    """
    distribution = module.partition(".")[0]
    if find_spec(distribution) is None:
        return Report({}, missing=distribution.replace("_", "-"))
    with tempfile.TemporaryDirectory(prefix="kestrl-check-") as name:
        folder = Path(name)
        given, report, output = folder / "settings.json", folder / "report.json", folder / "output"
        given.write_text(settings.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", module, "--settings", str(given), "--report", str(report)]
        with output.open("wb") as written:
            status = _run(command, folder, written.fileno(), seconds)
        if status is None:
            return Report({}, (f"{subject}: not loaded within {seconds:g} s; {_last_line(output)}",))
        if not report.is_file():
            return Report({}, (f"{subject}: loading it ended the process with status {status}; {_last_line(output)}",))
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return Report(found["facts"], tuple(found["problems"]))


def _run(command: list[str], folder: Path, output: int, seconds: float) -> int | None:
    """The exit status, or None where the time was up; whatever it started in its process group is gone."""
    process = subprocess.Popen(  # noqa: S603 - our own module
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(output: Path) -> str:
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return f"its last output: {lines[-1][:500]}" if lines else "it printed nothing"
