"""Applies the objects of a job, and records what the API server refuses and when it is tried again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from time import time
from typing import Any

from kestrl._shared.backoff import Backoff
from kestrl._shared.telemetry import beginning, span, within
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl_operator.apiserver.client import Api, ApiProblem, Gone
from kestrl_operator.apiserver.kinds import KUEUE_WORKLOAD
from kestrl_operator.controllers.claims import CLAIMED, REFUSED, Foreign, claim
from kestrl_operator.controllers.due_objects import WATCHED_KINDS, Due
from kestrl_operator.controllers.engine_scale import EngineScale
from kestrl_operator.controllers.job_state import JobState, Refusal
from kestrl_operator.controllers.manifests import traceparent
from kestrl_operator.controllers.quota import KueueQuota
from kestrl_operator.events import Events
from kestrl_operator.state.snapshot import RENDERED, Snapshot
from kestrl_operator.state.store import WORKLOADS, OwnedObject, Store
from kestrl_operator.status.lifecycle import Decision
from kestrl_operator.status.quota import quota_use

log = logging.getLogger(__name__)
Object = dict[str, Any]
APPLY_CONFLICT = "Apply failed with"
"""The API server's message for a field owned by another manager: an object of that name existed before the job."""
FROM_SPEC = WORKLOADS | {"ConfigMap"}
"""Kinds of objects rendered from more of the spec than the job's name."""
BACKOFF = Backoff(5.0, 120.0)
"""Pauses before a refused object is applied again: a quota or an admission webhook may have changed."""
REFUSALS_SHOWN = 3


class Applier:
    """Server-side apply of rendered objects."""

    def __init__(self, api: Api, store: Store, events: Events) -> None:
        self._api, self._store = api, store
        self.engines, self.quota = (
            EngineScale(api, store, events),
            KueueQuota(api, partial(store.child, KUEUE_WORKLOAD.name)),
        )

    async def refuses(self, state: JobState, snapshot: Snapshot, rendering: Due) -> bool:
        """Whether the API server refuses newly rendered objects, which is recorded. All objects rendered from the spec
        are tried in a dry run before any is written; the others contain the job's name only, and are left out because
        of their cost.

        Objects of the last accepted spec are applied without a dry run: a refused one does not prevent the others.
        """
        if snapshot.problem or rendering.digest == rendering.standing:
            return False
        tried = [item for item in rendering.objects if item["kind"] in FROM_SPEC | CLAIMED]
        refused = await self._try_all(tried, rendering, dry_run=True)
        if refused:
            _note_refusal(state, snapshot, refused)
        return bool(refused)

    async def apply(self, state: JobState, snapshot: Snapshot, decision: Decision, rendering: Due) -> None:
        """Applies all objects, workloads last, and records refusals.

        Raises:
            ApiProblem: The API server failed for another reason.
        """
        # The first application is the root span of the job's trace; later ones, and all spans of the pods, are its
        # children.
        traced = beginning if snapshot.learner is None else within
        facts = {Attr.JOB: str(state.key), Attr.ATTEMPTS: decision.attempts, Attr.PARKED: decision.parked}
        *needed, last = rendering.objects
        inert = [item for item in needed if item["kind"] not in WORKLOADS]
        with traced(traceparent(snapshot.uid)), span(SpanName.RECONCILE, facts):
            refused = await self._try_all(inert, rendering)
            if snapshot.job is not None and not decision.parked:
                await self.engines.hand_over(state.key, snapshot.job.spec.inference.replicas)
            if rendering.begun or not refused:  # otherwise the first pods would miss an object
                refused += await self._try_all([item for item in needed if item["kind"] in WORKLOADS], rendering)
                if refused:
                    last["metadata"]["annotations"][RENDERED] = ""  # some objects are missing
                refused += await self._try_all([last], rendering)
        if refused:
            _note_refusal(state, snapshot, refused, rendering.digest)
        elif not snapshot.problem or (state.refusal is not None and state.refusal.digest == rendering.digest):
            state.refusal = None

    async def settle_quota(self, state: JobState, snapshot: Snapshot, decision: Decision) -> float | None:
        """Makes the next change of the job's Workload, as `KueueQuota.carry_out`."""
        return await self.quota.carry_out(state.quota, quota_use(snapshot, decision))

    async def _try_all(self, objects: Sequence[Object], rendering: Due, *, dry_run: bool = False) -> list[ApiProblem]:
        """Applies objects one after another: jobs are processed concurrently, and a larger connection pool costs more
        than it gains.
        """
        tried = [await self._try(item, rendering, dry_run=dry_run) for item in objects]
        return [problem for problem in tried if problem is not None]

    async def _try(self, item: Object, rendering: Due, *, dry_run: bool = False) -> ApiProblem | None:
        """Applies an object; returns the error if the API server refuses it.

        Raises:
            ApiProblem: The call failed for another reason.
        """
        try:
            applied_object = await self._applied(item, rendering, dry_run=dry_run)
        except Gone:
            raise
        except Foreign as error:
            return error
        except ApiProblem as error:
            if error.status in REFUSED or APPLY_CONFLICT in str(error):
                return error
            raise
        if item["kind"] in WATCHED_KINDS and not dry_run:
            self._store.child(item["kind"], applied_object)
        return None

    async def _applied(self, item: Object, rendering: Due, *, dry_run: bool) -> Object:
        """Applies an object; fields of other managers are taken over only in what is known to be the job's."""
        if item["kind"] not in CLAIMED:
            exists = OwnedObject(item["kind"], item["metadata"]["name"]) in rendering.there
            return await self._api.apply(item, force=exists, dry_run=dry_run)
        mine = await claim(self._api, item, has_begun=rendering.begun, dry_run=dry_run)
        if dry_run and item["kind"] not in FROM_SPEC:
            return mine
        return await self._api.apply(mine, dry_run=dry_run)


def _note_refusal(state: JobState, snapshot: Snapshot, refused: Sequence[ApiProblem], digest: str = "") -> None:
    """Records until when nothing of this spec is tried again."""
    before = state.refusal_of(snapshot.generation)
    times = 1 if before is None else before.times + 1
    wait = BACKOFF.pause(times)
    details = "; ".join(str(error) for error in refused[:REFUSALS_SHOWN])
    subject = "an object" if len(refused) == 1 else f"{len(refused)} objects"
    problem = f"Kubernetes refuses {subject} of this job: {details}"
    log.warning("%s: retried in %.0f s: %s", state.key, wait, problem)
    state.refusal = Refusal(snapshot.generation, problem, digest, times, time() + wait)
