"""`run.json`: what the runner observes of a run, for `kestrl status`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from kestrl._app.local.files import write_atomic
from kestrl.runstate.states import ComponentState, RunPhase
from kestrl.runstate.versioned import Versioned
from kestrl.tools import SandboxInUse

INTERVAL = 1.0
"""Smallest number of seconds between two writes of delayed changes."""


class ProgressRecord(BaseModel):
    """The last progress report of the learner."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")
    phase: RunPhase = RunPhase.STARTING
    step: int = 0
    total_steps: int = 0
    means: dict[str, float] = Field(default_factory=dict[str, float])
    policy: str | None = None
    """Name of the newest version."""
    engines_converged: int = 0
    engines_total: int = 0
    tokens_per_second: float = 0.0
    eta_seconds: float = 0.0
    failures: dict[str, int] = Field(default_factory=dict[str, int])
    """Counts by `boundary/code`."""
    failure: str | None = None
    message: str = ""
    groups_running: int = 0
    skipped_rows: int = 0
    not_learned: str = ""
    learning_warning: str = ""
    storage_wait: str = ""
    tool_warning: str = ""
    sandboxes: dict[str, SandboxInUse] = Field(default_factory=dict[str, SandboxInUse])
    """Sandboxes by tool; empty until the tool service has reported them."""
    gathering: dict[str, Any] = Field(default_factory=dict[str, Any])


class ComponentRecord(BaseModel):
    """A component as last observed."""

    model_config = ConfigDict(frozen=True)
    role: str = ""
    state: ComponentState
    pid: int
    """0 if it does not run."""
    ports: dict[str, int]
    devices: tuple[str, ...] = ()
    """Indices of its accelerators."""
    restarts: int
    last_exit: int | None
    last_error: str


class RunnerRecord(Versioned):
    """The content of `run.json`."""

    NAME: ClassVar[str] = "runner's record"
    run: str = ""
    job: str = ""
    pid: int = 0
    """The runner's."""
    started_at: float = 0.0
    """Seconds since 1970, as `updated_at`."""
    updated_at: float = 0.0
    progress: ProgressRecord | None = None
    components: dict[str, ComponentRecord] = Field(default_factory=dict[str, ComponentRecord])
    ended: int | None = None
    """Exit code of the runner; None while it runs, or if it was killed."""
    reason: str = ""
    """Why it ended."""


class RunnerRecordFile:
    """Writes the record on changes, at most once per `INTERVAL`."""

    def __init__(self, path: Path, record: RunnerRecord) -> None:
        self._path, self._record = path, record.model_copy(update={"started_at": time.time()})
        self._written = 0.0
        self._dirty = False

    def update(self, *, force: bool = False, **changes: Any) -> None:
        """Changes fields and writes the file, at most once per `INTERVAL` unless `force` is set, as at a run's end."""
        self._record = self._record.model_copy(update=changes)
        self._dirty = True
        if force or time.monotonic() - self._written >= INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Writes pending changes."""
        if self._dirty:
            self._dirty, self._written = False, time.monotonic()
            write_atomic(self._path, self._record.model_copy(update={"updated_at": time.time()}).text())
