"""Environment variables of an engine's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kestrl._app.interpreters.places import without_python

ENGINE_PREFIXES = ("VLLM_", "SGLANG_", "SGL_")
"""Prefixes of engines' settings, which come from the job alone: inherited ones could change what they sample."""


def engine_environment(inherited: Mapping[str, str], python: str | None) -> dict[str, str]:
    """What an engine inherits: neither another interpreter's variables nor settings of engines; programs of its own
    environment come first on its PATH.
    """
    kept = {key: value for key, value in without_python(inherited).items() if not key.startswith(ENGINE_PREFIXES)}
    if python is not None:
        kept["PATH"] = os.pathsep.join(filter(None, (str(Path(python).parent), kept.get("PATH"))))
    return kept


def unused_variables() -> str:
    """Warning of settings in the shell that engines do not get; empty if there are none."""
    names = sorted(name for name in os.environ if name.startswith(ENGINE_PREFIXES))
    return f"engines do not get {', '.join(names)} of this shell; use inference.args" if names else ""
