"""A run as observed from its folder, and its storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kestrl._app.local.rundir import RunDir
from kestrl._app.local.runner_record import RunnerRecord
from kestrl._app.local.secrets import open_storage
from kestrl._app.local.site import storage_address
from kestrl.runstate.states import LocalRunState, RunPhase
from kestrl.storage import ObjectStore
from kestrl.storage.summary import RunSummary

FINISHED = {RunPhase.SUCCEEDED: LocalRunState.SUCCEEDED, RunPhase.FAILED: LocalRunState.FAILED}


def run_store(run: RunDir) -> ObjectStore:
    """The storage of a run."""
    job, base = run.job(), run.manifest_dir
    return open_storage(job, base, storage_address(job, run, base), create=False)


@dataclass(frozen=True, slots=True)
class ObservedRun:
    """A run as observed: whether it is alive follows from the lock on its folder, not from a file's content."""

    run: RunDir
    pid: int | None
    """The live runner's."""
    record: RunnerRecord | None
    summary: RunSummary | None

    @property
    def state(self) -> LocalRunState:
        if self.pid is not None:
            return LocalRunState.RUNNING
        if self.summary is not None and self.summary.status in FINISHED:
            return FINISHED[self.summary.status]
        if self.record is None:
            return LocalRunState.NEVER_STARTED
        return LocalRunState.DEAD if self.record.ended is None else LocalRunState.STOPPED

    def as_json(self) -> dict[str, Any]:
        return {
            "run": self.run.id,
            "state": self.state,
            "pid": self.pid,
            "record": {} if self.record is None else self.record.to_json(),
            "summary": {} if self.summary is None else self.summary.to_json(),
        }


def observe(run: RunDir) -> ObservedRun:
    """Observes a run.

    Raises:
        UserInputError: A file of the run is damaged.
    """
    return ObservedRun(run, run.runner_pid(), run.record(), run.summary())
