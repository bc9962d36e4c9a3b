"""Record of why an engine could not start: a file that the engine's processes write, read by the runner and the engine
agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

VARIABLE = "KESTRL_ENGINE_FAILURE"
"""Environment variable with the path of the file."""
CODE = "engine_cannot_start"


class EngineStartFailure(NamedTuple):
    """Why an engine did not start."""

    message: str
    """The root cause, with the error's type."""
    lasting: bool
    """Whether every further start would fail in the same way."""


def read(path: Path) -> EngineStartFailure | None:
    """Failure of the last start; None if there is no record."""
    try:
        return EngineStartFailure(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def forget(environment: Mapping[str, str]) -> None:
    """Removes the record of an earlier start of the engine with this environment."""
    if path := environment.get(VARIABLE):
        Path(path).unlink(missing_ok=True)
