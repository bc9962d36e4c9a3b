"""The protocol of a target of `kestrl push`, and its failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kestrl.errors import KestrlError
from kestrl.storage.episodes import EpisodeBatch
from kestrl.storage.summary import RunSummary


class TargetUnavailable(KestrlError):
    """A target does not answer, or answers that it is overloaded. What was not sent is sent by the next attempt."""

    code = "push_unavailable"
    retryable = True


class TargetRefused(KestrlError):
    """A target refuses what it is sent: a credential, an address, or the content. A person has to fix it."""

    code = "push_refused"


class PartRefused(TargetRefused):
    """A target refuses some of a part, and has taken the rest of it. The other parts are sent."""

    code = "push_part_refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedRun:
    """A run as targets name it."""

    id: str
    job: str
    """Name of the job; that of the run if only its storage is known."""
    storage: str
    """Address of the run's storage."""
    settings: Mapping[str, Any]
    """The manifest's `spec` as JSON; empty if only the storage is known."""


class Target(Protocol):
    """A place that receives a run. Everything may be sent again, with the same content: it replaces what is there.

    Methods raise `TargetUnavailable`, `TargetRefused`, and `PartRefused` where only some of a part is refused.
    """

    key: str
    """What distinguishes the target from others that receive the same run."""

    def open(self, run: PushedRun, *, live: bool) -> str:
        """Begins, or continues, the run; returns the identity of what receives it, which changes when it is made anew,
        so that everything is sent again.

        Args:
            run: The run.
            live: Whether it goes on.
        """
        ...

    def metrics(self, step: int, record: Mapping[str, Any], at: float) -> None:
        """Takes the record of an optimiser step, stored at `at` in Unix seconds."""
        ...

    def evaluation(self, step: int, means: Mapping[str, Any], at: float) -> None:
        """Takes the means over the held-out data after a step; 0 is before training."""
        ...

    def episodes(self, batch: EpisodeBatch) -> None:
        """Takes the episodes of a step or an evaluation."""
        ...

    def finish(self, summary: RunSummary, at: float) -> None:
        """Takes the result. A run that is resumed sends another one later."""
        ...

    def close(self) -> None:
        """Writes what is pending and releases everything; called once."""
        ...
