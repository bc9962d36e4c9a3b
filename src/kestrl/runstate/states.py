"""States that processes report to each other: of a run and of an engine.

`kestrl._shared.rpc.codec` converts them to the enums of the same names in `proto/`. As text, in `run.json`,
`summary.json` and the status of a job, each is the word given here.
"""

from __future__ import annotations

from enum import StrEnum


class RunPhase(StrEnum):
    """Phase of a run; the final ones are also the `status` of `summary.json`."""

    STARTING = "starting"
    EVALUATING = "evaluating"
    TRAINING = "training"
    DRAINING = "draining"
    """The current step is finished and checkpointed."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SUSPENDED = "suspended"
    """Drained; a later process resumes it."""

    @property
    def final(self) -> bool:
        """Whether the run has ended."""
        return self in {RunPhase.SUCCEEDED, RunPhase.FAILED, RunPhase.SUSPENDED}


class EngineState(StrEnum):
    """State of an engine, as observed by its agent."""

    STARTING = "starting"
    READY = "ready"
    RECOVERING = "recovering"
    """Restarted without its adapters, which are being loaded and verified again."""
    DOWN = "down"
    DRAINING = "draining"
    """It leaves: running turns go on, and it takes no further one."""
    ASLEEP = "asleep"
    """The learner has its device: it falls asleep, sleeps or wakes."""

    @property
    def up(self) -> bool:
        """Whether the engine answers and takes turns."""
        return self in {EngineState.READY, EngineState.RECOVERING}


class ServingState(StrEnum):
    """Whether an engine serves the newest published version, as observed by the learner."""

    STARTING = "starting"
    SERVING = "serving"
    LOADING = "loading"
    RECOVERING = "recovering"
    QUARANTINED = "quarantined"
    """It could not verify the version, gets no requests for it, and is retried."""
    AWAY = "away"
    """It, or its agent, has stopped answering."""
    DRAINING = "draining"
    """It leaves, finishes its running turns and gets no further request."""
    ASLEEP = "asleep"
    """The learner has its device for an update."""


class ComponentState(StrEnum):
    """State of a component on one machine, as observed by the runner."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    """Waiting for a restart."""
    ENDED = "ended"
    GONE = "gone"
    """Its runner has ended, so it does not run."""


class LocalRunState(StrEnum):
    """State of a run on one machine, as shown by `kestrl status`."""

    NEVER_STARTED = "never started"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """Its runner ended before the run did."""
    DEAD = "dead"
    """Its runner ended without a record, as when it was killed."""
