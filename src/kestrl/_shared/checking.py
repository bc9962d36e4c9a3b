"""Checks of one part of a job in a child process: the part loads what it needs at its start, without serving.

Importing a user's module may print, hang, or end the process, so it never happens in the command itself. The child
reads its settings from a file and writes a report to another; its output does not reach the terminal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from kestrl._shared.plan.settings.common import DataSettings, SettingsModel, read_settings
from kestrl._shared.plan.settings.judge import JudgeEntry, JudgeSettings, RewardEntry, RulerEntry
from kestrl._shared.plan.settings.rollout import OutsideEnvironment, RolloutSettings
from kestrl._shared.plan.settings.tools import ToolsSettings
from kestrl._shared.processes.guarded import GuardedProcess, ending
from kestrl.errors import UserInputError, problems_of

Settings = TypeVar("Settings", bound=SettingsModel)
Facts = Mapping[str, Any]


class ToolsCheck(SettingsModel):
    """Input of the check of the tools."""

    tools: ToolsSettings
    data: dict[str, DataSettings]
    """Files of the data sets, by name."""
    absent: tuple[str, ...] = ()
    """Uris of files that rows may name and this machine does not have."""


class RewardsCheck(SettingsModel):
    """Input of the check of the rewards."""

    judge: JudgeSettings
    data: dict[str, DataSettings]
    """Files of the data sets, by name."""
    max_turns: int


class RolloutCheck(SettingsModel):
    """Input of the check of a rollout worker."""

    rollout: RolloutSettings
    tools: tuple[dict[str, Any], ...]
    """Name, description, parameters and environment (empty if none) of each tool of the job."""
    data: dict[str, DataSettings]
    """Files of the data sets, by name."""


NOTHING, TRYING, SOLUTION = "nothing", "trying", "solution"
"""Kinds of plays: no action and no answer, a wrong one, and that of a perfect player."""


ATTEMPT = "I do not know."
"""Turn of a play that tries and fails."""
ANSWER_FORMS = ("{}", "The answer is {}.", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
"""Ways to write a solution as an answer, of which the best counts."""


class RunsCheck(SettingsModel):
    """Input of the plays of an environment that runs its episodes itself."""

    environment: OutsideEnvironment
    python_path: tuple[str, ...]
    data: DataSettings
    rows: int
    """Rows that are played, the first ones."""
    seconds: float
    """Time limit of an episode."""


class PlaysCheck(SettingsModel):
    """Input of the plays of a job without a model."""

    tools: ToolsSettings
    data: DataSettings
    rows: int
    """Rows that are played, the first ones."""


class PlayedCheck(SettingsModel):
    """Input of the scores of plays."""

    judge: JudgeSettings
    data: DataSettings
    max_turns: int
    rows: tuple[dict[str, Any], ...]
    """What was played of each row."""


class JudgeCheck(SettingsModel):
    """Input of the test bank of judges."""

    ruler: RulerEntry | None = None
    correctness: JudgeEntry | None = None


class Rejudge(SettingsModel):
    """Stored groups to be scored again."""

    ruler: RulerEntry
    rewards: tuple[RewardEntry, ...]
    """The rules of the job, whose stored values are used."""
    max_turns: int
    batch: str
    """File with a GroupBatch, which the command writes."""


class DecodeRequest(SettingsModel):
    """Token ids to decode."""

    tokenizer: str
    """Folder or Hugging Face id."""
    ids: list[list[int]]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a check."""

    facts: Facts
    problems: tuple[str, ...] = ()
    """Problems; each names the field and the fix."""
    missing: str = ""
    """Distribution that is needed for the check and is not installed; empty otherwise."""


def run_check(kind: type[Settings], check: Callable[[Settings], Facts]) -> None:
    """Entry point of the child: `python -m MODULE --settings FILE --report FILE`. Exits without waiting for threads.

    Args:
        kind: Type of the settings.
        check: Returns facts, or raises UserInputError with one problem per line.
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
        report["problems"] = list(problems_of(error))
    arguments.report.write_text(json.dumps(report), encoding="utf-8")
    os._exit(0)


def ask(
    module: str, settings: SettingsModel, *, subject: str, seconds: float, variables: Mapping[str, str] | None = None
) -> Report:
    """Runs a check and waits for its report.

    Args:
        module: Module to run, such as `kestrl_tools.check`.
        settings: Input of the check.
        subject: What is checked, for messages, such as `spec.tools`.
        seconds: Time limit.
        variables: Environment variables of the child in addition to those of this process, such as secrets.
    """
    distribution = module.partition(".")[0]
    if find_spec(distribution) is None:
        return Report({}, missing=distribution.replace("_", "-"))
    with tempfile.TemporaryDirectory(prefix="kestrl-check-") as name:
        folder = Path(name)
        settings_file, report, output = folder / "settings.json", folder / "report.json", folder / "output"
        settings_file.write_text(settings.model_dump_json(), encoding="utf-8")
        command = [sys.executable, "-m", module, "--settings", str(settings_file), "--report", str(report)]
        with output.open("wb") as stream:
            status = run_guarded(command, folder, stream.fileno(), seconds, {**os.environ, **(variables or {})})
        if status is None:
            return Report({}, (f"{subject}: not loaded within {seconds:g} s; {last_line(output)}",))
        if not report.is_file():
            return Report({}, (f"{subject}: loading it ended the process ({ending(status)}); {last_line(output)}",))
        fields: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return Report(fields["facts"], tuple(fields["problems"]))


def run_guarded(
    command: Sequence[str], folder: Path, output: int, seconds: float, variables: Mapping[str, str]
) -> int | None:
    """Exit status of a command, or None after the time limit. Nothing that it has started is left.

    Args:
        command: The command.
        folder: Where it runs.
        output: File descriptor of what it prints.
        seconds: Time limit.
        variables: Environment variables.
    """
    process = GuardedProcess.start(command, variables=variables, stdout=output, stderr=output, folder=folder)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.release()
        process.wait()


def last_line(output: Path) -> str:
    """The end of what a command has printed, for messages."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
    return f"its last output: {lines[-1][:500]}" if lines else "it printed nothing"
