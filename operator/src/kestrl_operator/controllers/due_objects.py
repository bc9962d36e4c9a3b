"""The objects of a job that are to be applied now: all of them, where the rendered digest differs from the applied one
or an object is missing or was changed, and none otherwise. Nothing is called here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kestrl.errors import UserInputError
from kestrl_operator.controllers.job_state import JobState, Rendered
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.state.snapshot import ACCEPTED, RENDERED, Snapshot
from kestrl_operator.state.store import OwnedObject
from kestrl_operator.status.lifecycle import Decision
from kestrl_operator.watch.streams import WATCHED

Object = dict[str, Any]
WATCHED_KINDS = frozenset(kind.name for kind in WATCHED)


class Due(NamedTuple):
    """Objects to apply."""

    objects: list[Object]
    digest: str
    standing: str
    """Digest of the objects that were applied last; empty if none or not all of them were."""
    begun: bool
    """Whether anything was applied before."""
    there: frozenset[OwnedObject]
    whole: bool
    """Whether every watched object exists, and none was changed by another manager."""


def due_objects(
    state: JobState, snapshot: Snapshot, decision: Decision, existing: frozenset[OwnedObject], manifests: Manifests
) -> Due | None:
    """The objects to apply; None if all are up to date.

    Args:
        state: State of the job; its last rendering is recorded.
        snapshot: The snapshot of the job.
        decision: The decision about it.
        existing: The watched objects of the job that exist.
        manifests: Renders the objects.
    """
    annotations: Mapping[str, str] = snapshot.learner.annotations if snapshot.learner is not None else {}
    accepted = _accepted(state, snapshot, annotations)
    if snapshot.job is None or accepted is None:
        return None  # what was applied stays as it is
    rendering = Rendered(
        snapshot.generation,
        decision.parked,
        decision.attempts,
        decision.restarts,
        decision.forgiven,
        None if snapshot.quota is not None else snapshot.queue,
        state.quota.places,
        bool(snapshot.problem),
    )
    last_rendering, standing = state.rendered, annotations.get(RENDERED, "")
    complete = last_rendering is not None and not state.drifted and last_rendering.children <= existing
    if (
        last_rendering is not None
        and complete
        and last_rendering == rendering._replace(digest=standing, children=last_rendering.children)
    ):
        return None
    try:
        objects = manifests.objects(
            state.key,
            snapshot.uid,
            snapshot.job,
            decision,
            queue=rendering.queue,
            annotations=annotations,
            accepted=accepted,
            placements=state.quota.places,
        )
    except UserInputError:
        if snapshot.problem:
            return None  # the administrator's settings have changed since; `problem` reports the current error
        raise
    digest = objects[-1]["metadata"]["annotations"][RENDERED]
    children = frozenset(
        OwnedObject(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] in WATCHED_KINDS
    )
    state.rendered = rendering._replace(digest=digest, children=children)
    complete_set = not state.drifted and children <= existing
    if _awaits_retry(state, snapshot, digest) or (complete_set and digest == standing):
        return None
    return Due(objects, digest, standing, RENDERED in annotations, existing, complete_set)


def _accepted(state: JobState, snapshot: Snapshot, annotations: Mapping[str, str]) -> str | None:
    """The spec that is in force, as it is stored; None if there is none."""
    if snapshot.problem:
        return annotations.get(ACCEPTED)
    return None if state.parsed is None else state.parsed.accepted


def _awaits_retry(state: JobState, snapshot: Snapshot, digest: str) -> bool:
    """Whether these very objects were refused, and are tried again later."""
    refusal = state.refusal_of(snapshot.generation)
    return refusal is not None and refusal.digest == digest and snapshot.now < refusal.until
