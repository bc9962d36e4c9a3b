"""`run.json`: what the runner observes of a run, for `kestrl status`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from pydantic import BaseModel, ConfigDict, Field

from kestrl._app.local.files import write_atomic
from kestrl.runstate.state import RunState
from kestrl.runstate.states import ComponentState
from kestrl.runstate.versioned import Versioned

INTERVAL = 1.0
"""Smallest number of seconds between two writes of delayed changes."""


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
    state: RunState | None = None
    """The run as the learner last reported it; None before its first report."""
    components: dict[str, ComponentRecord] = Field(default_factory=dict[str, ComponentRecord])
    engine_limit: int | None = None
    """Engines that have devices; None if engines need none."""
    followers: dict[str, str] = Field(default_factory=dict[str, str])
    """What has become of the run at each place that it is sent to, in words, by the place's name."""
    ended: int | None = None
    """Exit code of the runner; None while it runs, or if it was killed."""
    reason: str = ""
    """Why it ended."""

    @classmethod
    def from_json(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads a record; version 0.1 of KestRL wrote `progress` in place of `state`."""
        progress = content.get("progress")
        converted_fields = (
            {"state": _earlier_state(cast("dict[str, Any]", progress))} if isinstance(progress, dict) else {}
        )
        return super().from_json({**converted_fields, **content}, source)


def _earlier_state(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of the state that a `progress` says parts of."""
    job, step, digest = [*str(progress.get("policy") or "").rsplit(".", 2), "", ""][:3]
    version = {"job": job, "step": step, "sha256": digest} if step.isdecimal() else None
    return {
        "activity": {"phase": progress.get("phase"), "message": progress.get("message", "")},
        "steps": {"done": progress.get("step", 0), "total": progress.get("total_steps", 0)},
        "policy": {"version": version},
        "engines": {"verified": progress.get("engines_converged", 0), "total": progress.get("engines_total", 0)},
        "means": progress.get("means", {}),
        "last_step": {"tokens_per_second": progress.get("tokens_per_second", 0.0)},
        "tools": {"warning": progress.get("tool_warning", ""), "sandboxes": progress.get("sandboxes", {})},
        "history": {"failures": progress.get("failures", {}), "skipped_rows": progress.get("skipped_rows", 0)},
    }


class RunnerRecordFile:
    """Writes the record on changes, at most once per `INTERVAL`."""

    def __init__(self, path: Path, record: RunnerRecord) -> None:
        self._path, self._record = path, record.but(started_at=time.time())
        self._written = 0.0
        self._dirty = False

    def update(self, *, force: bool = False, **changes: Any) -> None:
        """Changes fields and writes the file, at most once per `INTERVAL` unless `force` is set, as at a run's end."""
        self._record = self._record.but(**changes)
        self._dirty = True
        if force or time.monotonic() - self._written >= INTERVAL:
            self.flush()

    def flush(self) -> None:
        """Writes pending changes."""
        if self._dirty:
            self._dirty, self._written = False, time.monotonic()
            write_atomic(self._path, self._record.but(updated_at=time.time()).text())
