"""Runs verifiers' own check of a task set, vf-validate, in the environment's interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from kestrl._app.plays.reports import RESULTS, read_report
from kestrl._app.plays.verdict import PlaysVerdict
from kestrl._shared.checking import last_line, run_guarded
from kestrl._shared.plan.settings.rollout import OutsideEnvironment
from kestrl._shared.processes.guarded import ending, kept_variables
from kestrl.errors import UserInputError

MODULE = "verifiers.v1.cli.validate"
FIELD = "spec.environment.verifiers"
RUN = "validate"
TASK_SECONDS = 120.0
"""Time limit of a check of a task."""
CHECKS_PER_TASK = 4
"""Set-up and check of the solution, and of the untouched task."""


def validate_taskset(environment: OutsideEnvironment, *, folder: Path, tasks: int) -> PlaysVerdict:
    """The findings of vf-validate for the first tasks: their solution passes, and an untouched task does not.

    Args:
        environment: The environment, with its interpreter.
        folder: Folder with the user's code.
        tasks: Tasks that are checked, the first ones.

    Raises:
        UserInputError: It cannot check the task set.
    """
    python, config = environment.python, environment.config
    assert python is not None
    with TemporaryDirectory(prefix="kestrl-validate-") as name:
        run_folder = Path(name)
        settings = {
            "taskset": config["taskset"],
            "select": {"limit": tasks},
            "runtime": config["agent"]["runtime"],
            "timeout": {"setup": TASK_SECONDS, "total": TASK_SECONDS},
            "rich": False,
            "output_dir": str(run_folder),
            "run": {"dir": RUN},
        }
        settings_file, output = run_folder / "settings.json", run_folder / "output"
        settings_file.write_text(json.dumps(settings), encoding="utf-8")
        variables = {
            **kept_variables(),
            "PYTHONPATH": str(folder),
            "PATH": os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", os.defpath))),
        }
        seconds = environment.start_seconds + tasks * CHECKS_PER_TASK * TASK_SECONDS
        with output.open("wb") as stream:
            command = [python, "-m", MODULE, "@", str(settings_file)]
            status = run_guarded(command, run_folder, stream.fileno(), seconds, variables)
        if status is None:
            raise UserInputError(f"{FIELD}: vf-validate did not end within {seconds:g} s; give fewer --rows")
        if status != 0 or not (run_folder / RUN / RESULTS).is_file():
            raise UserInputError(
                f"{FIELD}: vf-validate cannot check the task set ({ending(status)}); {last_line(output)}"
            )
        return read_report(run_folder / RUN)
