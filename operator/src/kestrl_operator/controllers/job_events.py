"""Events of AgentRLJobs and of what belongs to them: which need a pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kestrl_operator.apiserver.kinds import JOB, KUEUE_WORKLOAD, POD, Kind
from kestrl_operator.controllers.job_state import JobStates
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.sft import SFT_LABEL
from kestrl_operator.state.store import WORKLOADS, Store
from kestrl_operator.state.versions import uid_of
from kestrl_operator.watch.drift import Drift

Object = Mapping[str, Any]


class JobEvents:
    """Takes events into the store of AgentRLJobs.

    Args:
        store: The store.
        states: What is remembered of each job between its passes.
        changed: Called with a job of which a user changed the manifest.
        received: Called with uid and version of a job that a stream delivered.
    """

    def __init__(
        self, store: Store, states: JobStates, changed: Callable[[Key], None], received: Callable[[str, int], None]
    ) -> None:
        self._store, self._states, self._changed, self._received = store, states, changed, received
        self._drift = Drift()

    def take(self, kind: Kind, body: Object, deleted: bool) -> Key | None:
        """Stores an object; returns its job if that needs a pass."""
        if kind == JOB:
            return self._take_job(body, deleted)
        if kind == POD:
            return self._store.pod(body, deleted=deleted)
        return self._take_child(kind, body, deleted)

    def _take_job(self, body: Object, deleted: bool) -> Key | None:
        """Handles a change of a job; None for a state that needs no pass, such as one that a pass has written."""
        expected, before = not deleted and self._store.expects(body), self._generation(body)
        key = self._store.job(body, deleted=deleted)
        if self._generation(body) != before:
            self._changed(key)
        self._received(uid_of(body), int(body["metadata"]["resourceVersion"]))
        return None if expected else key

    def _generation(self, body: Object) -> tuple[str, int] | None:
        """The uid and generation of the job that is known by this name."""
        key = Key(body["metadata"]["namespace"], body["metadata"]["name"])
        metadata = self._store.jobs.get(key, {}).get("metadata")
        return None if metadata is None else (metadata["uid"], metadata.get("generation", 0))

    def _take_child(self, kind: Kind, body: Object, deleted: bool) -> Key | None:
        """Handles a change of an applied object: a deletion, or a change of its spec by another manager."""
        if kind == KUEUE_WORKLOAD and SFT_LABEL in body["metadata"].get("labels", {}):
            return None
        key = self._store.child(kind.name, body, deleted=deleted)
        if key is None or kind == KUEUE_WORKLOAD:  # whose spec and status Kueue changes as it has to
            return key
        touched = deleted or self._drift.is_new(body)
        if touched:
            self._states.mark_drifted(key)
        return key if touched or kind.name in WORKLOADS else None
