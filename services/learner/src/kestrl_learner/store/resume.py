"""Progress of a run according to its storage: the newest checkpoint, and whether the run has succeeded already."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kestrl.episode import PolicyVersion
from kestrl.errors import StorageError
from kestrl.runstate.events import HistoryRestored, LearningObserved, PhaseEntered, VersionPublished
from kestrl.runstate.log import Event
from kestrl.runstate.state import Learning
from kestrl.runstate.states import RunPhase
from kestrl.storage import ObjectStore, adapter_folder, read_manifest
from kestrl.storage.summary import DAMAGED, RunSummary, SummaryReason, read_summary
from kestrl_learner.store import checkpoint
from kestrl_learner.store.records import format_means

log = logging.getLogger(__name__)


def newest_checkpoint(store: ObjectStore) -> checkpoint.Manifest | None:
    """The manifest of the newest checkpoint, confirmed to be readable; None if there is none.

    Raises:
        StorageError: The store refused, or the checkpoint is corrupt.
        UserInputError: It was written by a later version of KestRL.
        PlaceError: Access to the storage is denied.
    """
    manifest = checkpoint.newest_manifest(store)
    if manifest is not None:
        checkpoint.confirm(store, manifest)
    return manifest


def completed(
    store: ObjectStore, manifest: checkpoint.Manifest, *, job: str, continues: Callable[[str], bool], steps: int
) -> Sequence[Event]:
    """The events that end a run that has succeeded already; none if the run is not complete.

    Summary, last checkpoint and adapter must agree: the summary alone may belong to a shorter schedule or to other
    data.

    Args:
        store: The run's storage.
        manifest: The newest checkpoint.
        job: The job's name.
        continues: Whether the present settings and data are those of a run by its recorded digest.
        steps: Optimiser steps of the present schedule.

    Raises:
        StorageError: The store refused.
        PlaceError: Access to the storage is denied.
    """
    summary = _readable_summary(store)
    if summary is None or summary.status is not RunPhase.SUCCEEDED or summary.steps != manifest.step:
        return ()
    digest = manifest.record.digest
    if digest is None or summary.policy is None or max(manifest.step, summary.total_steps) < steps:
        return ()
    if not continues(digest):
        return ()
    folder = adapter_folder(PolicyVersion(job=job, step=manifest.step, sha256=summary.policy.sha256))
    try:
        adapter = read_manifest(store, folder)
    except StorageError as error:
        if error.code != "not_found":
            raise
        log.warning("the run has succeeded, but its adapter is missing and is published again: %s", error)
        return ()
    after = f"; held-out, after: {format_means(summary.after)}" if summary.after else ""
    return (
        VersionPublished(version=adapter.policy, uri=store.address(folder), parent=adapter.parent or ""),
        LearningObserved(learning=_learning(summary)),
        HistoryRestored(step=manifest.step, history=manifest.record.history.but(failures=summary.failures)),
        PhaseEntered(phase=RunPhase.SUCCEEDED, message=f"it had succeeded before{after}"),
    )


def _readable_summary(store: ObjectStore) -> RunSummary | None:
    try:
        return read_summary(store)
    except StorageError as error:
        if error.code != DAMAGED:
            raise
        log.warning("%s", error)
        return None


def _learning(summary: RunSummary) -> Learning:
    """The summary's part on learning; unknown in summaries of older versions."""
    summary_reason = summary.not_learned or SummaryReason()
    return Learning(
        learned=summary.learned,
        reason=summary_reason.reason,
        message=summary_reason.message,
        warning=summary.learning_warning,
    )
