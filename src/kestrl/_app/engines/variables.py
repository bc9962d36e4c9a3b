"""Environment variables of an engine's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kestrl._app.interpreters.places import without_python
from kestrl.errors import UserInputError

ENGINE_PREFIXES = ("VLLM_", "SGLANG_", "SGL_")
"""Prefixes of engines' settings, which come from the job alone: inherited ones could change what they sample."""
LONGEST_FOLDER = 60
"""Bytes of the folder for temporary files below which engines make sockets, whose paths have at most 107 bytes."""
SHORT_FOLDER = "/tmp"  # noqa: S108 - engines choose names that are free
"""What an engine gets in place of a longer one."""


def engine_environment(inherited: Mapping[str, str], python: str | None) -> dict[str, str]:
    """What an engine inherits: neither another interpreter's variables nor settings of engines; programs of its own
    environment come first on its PATH, and its folder for temporary files is short enough for its sockets.
    """
    variables = {key: value for key, value in without_python(inherited).items() if not key.startswith(ENGINE_PREFIXES)}
    if _too_long(variables):
        variables["TMPDIR"] = SHORT_FOLDER
    if python is not None:
        variables["PATH"] = os.pathsep.join(filter(None, (str(Path(python).parent), variables.get("PATH"))))
    return variables


def unused_variables() -> str:
    """Warning of settings in the shell that engines do not get; empty if there are none."""
    names = sorted(name for name in os.environ if name.startswith(ENGINE_PREFIXES))
    return f"engines do not get {', '.join(names)} of this shell; use inference.args" if names else ""


def sockets_note(environment: Mapping[str, str] = os.environ) -> str:
    """What an engine gets in place of TMPDIR, where that is too long; empty if it is not.

    Raises:
        UserInputError: It is, and there is no other folder.
    """
    if not _too_long(environment):
        return ""
    long = f"TMPDIR: is longer than {LONGEST_FOLDER} bytes, too long for the sockets of an engine"
    if not os.access(SHORT_FOLDER, os.W_OK | os.X_OK):
        raise UserInputError(f"{long}, and {SHORT_FOLDER} cannot be written to; set TMPDIR to a shorter folder")
    return f"{long}, which gets {SHORT_FOLDER}"


def _too_long(environment: Mapping[str, str]) -> bool:
    return len(os.fsencode(environment.get("TMPDIR", ""))) > LONGEST_FOLDER
