"""What earlier processes of a run left in storage: how far it is, and whether it has ended."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kestrl.episode import PolicyVersion
from kestrl.errors import StorageError
from kestrl.storage import ObjectStore, adapter_folder, read_manifest
from kestrl_learner import checkpoint
from kestrl_learner.facts import told_means
from kestrl_learner.learning import Learning

log = logging.getLogger(__name__)


def reached(store: ObjectStore) -> checkpoint.Manifest | None:
    """The newest checkpoint, surely there; None where there is none.

    Raises:
        StorageError: The store refused, or the checkpoint is corrupt.
        PlaceError: The place is not ours.
    """
    found = checkpoint.newest_manifest(store)
    if found is not None:
        checkpoint.confirm(store, found)
    return found


def ended(
    store: ObjectStore, newest: checkpoint.Manifest, *, job: str, digest: str, steps: int
) -> Mapping[str, Any] | None:
    """What there is to tell of a run that has succeeded already; None where something is left to do.

    Summary, last checkpoint and adapter must agree: the summary alone may be of a shorter schedule, or of other data.

    Args:
        store: The run's.
        newest: The newest checkpoint.
        job: The job's name.
        digest: Of what must not change under a run, as settings and data are now.
        steps: Of the schedule as it is now.

    Raises:
        StorageError: The store refused.
        PlaceError: The place is not ours.
    """
    summary = _summary(store)
    if summary.get("status") != "succeeded" or summary.get("steps") != newest.step:
        return None
    if newest.facts.get("digest") != digest or max(newest.step, summary.get("total_steps", 0)) < steps:
        return None
    folder = adapter_folder(PolicyVersion(job=job, step=newest.step, sha256=summary["policy"]["sha256"]))
    try:
        adapter = read_manifest(store, folder)
    except StorageError as error:
        if error.code != "not_found":
            raise
        log.warning("the run has succeeded, and its adapter is gone; it is made again: %s", error)
        return None
    after = summary["after"]
    return {
        "step": newest.step,
        "policy": adapter.policy,
        "policy_uri": store.address(folder),
        "policy_parent": adapter.parent or "",
        "learning": _learning(summary),
        "failures": Counter(summary["failures"]),
        "message": "it had succeeded before" + (f"; held-out, after: {told_means(after)}" if after else ""),
    }


def _learning(summary: Mapping[str, Any]) -> Learning | None:
    """What the summary says of it; None in one that an older learner wrote."""
    if summary.get("learned") is None:
        return None
    return Learning(bool(summary["learned"]), **(summary.get("not_learned") or {}))


def _summary(store: ObjectStore) -> dict[str, Any]:
    try:
        return json.loads(store.get("summary.json"))  # type: ignore[no-any-return]
    except StorageError as error:
        if error.code != "not_found":
            raise
        return {}
    except ValueError as error:
        log.warning("%s is not a summary: %s", store.address("summary.json"), error)
        return {}
