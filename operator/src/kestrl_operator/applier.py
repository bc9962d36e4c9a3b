"""Applies the objects of a job, and records what the API server refuses and when it is tried again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import time
from typing import Any, NamedTuple

from kestrl.telemetry import beginning, span, within
from kestrl.telemetry.names import Attr, SpanName
from kestrl_operator.api import Api, ApiProblem, Gone
from kestrl_operator.lifecycle import Decision
from kestrl_operator.manifests import traceparent
from kestrl_operator.snapshot import RENDERED, Snapshot
from kestrl_operator.store import WORKLOADS, Child, Key, Store
from kestrl_operator.watch import WATCHED

log = logging.getLogger(__name__)
Object = dict[str, Any]
REFUSED = frozenset({400, 403, 413, 422})
"""Status codes with which the API server rejects an object that a user has to fix."""
APPLY_CONFLICT = "Apply failed with"
"""The API server's message for a field owned by another manager: an object of that name existed before the job."""
FROM_SPEC = WORKLOADS | {"ConfigMap"}
"""Kinds of objects rendered from more of the spec than the job's name."""
WATCHED_KINDS = frozenset(kind.name for kind in WATCHED)
FIRST_RETRY, LONGEST_RETRY = 5.0, 120.0
"""First and longest wait in seconds before a refused object is applied again, doubled each time: a quota or an
admission webhook may have changed."""
REFUSALS_SHOWN = 3


class Refusal(NamedTuple):
    """What the API server refused of one generation of a spec."""

    uid: str
    generation: int
    problem: str
    digest: str
    """Digest of the objects that were applied in part; empty where nothing was applied."""
    wait: float
    until: float
    """When it is tried again."""


NO_REFUSAL = Refusal("", 0, "", "", 0.0, 0.0)


class Due(NamedTuple):
    """Objects to apply."""

    objects: list[Object]
    digest: str
    standing: str
    """Digest of the objects that were applied last; empty if none or not all of them were."""
    begun: bool
    """Whether anything was applied before."""
    there: frozenset[Child]
    whole: bool
    """Whether every watched object exists, and none was changed by another manager."""


class Applier:
    """Server-side apply of rendered objects."""

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store
        self._refusals: dict[Key, Refusal] = {}

    def forget(self, key: Key) -> None:
        """Drops the refusal of a job."""
        self._refusals.pop(key, None)

    def refusal(self, key: Key, uid: str, generation: int) -> Refusal | None:
        """The last refusal of this generation."""
        known = self._refusals.get(key)
        return known if known is not None and (known.uid, known.generation) == (uid, generation) else None

    def refused_now(self, key: Key, uid: str, generation: int, now: float) -> str:
        """Why this generation cannot be applied, until it is tried again."""
        refusal = self.refusal(key, uid, generation)
        return refusal.problem if refusal is not None and now < refusal.until else ""

    async def dry_run(self, key: Key, snapshot: Snapshot, due: Due) -> str:
        """Why the API server refuses newly rendered objects; empty if it accepts them. All objects rendered from the
        spec are tried in a dry run before any is written; the others contain the job's name only, and are left out
        because of their cost.

        Objects of the last accepted spec are applied without a dry run: a refused one does not prevent the others.
        """
        if snapshot.problem or due.digest == due.standing:
            return ""
        refused = await self._try_all([item for item in due.objects if item["kind"] in FROM_SPEC], due, dry_run=True)
        return self._note_refusal(key, snapshot, refused) if refused else ""

    async def apply(self, key: Key, snapshot: Snapshot, decision: Decision, due: Due) -> None:
        """Applies all objects, workloads last, and records refusals.

        Raises:
            ApiProblem: The API server failed for another reason.
        """
        # The first application is the root span of the job's trace; later ones, and all spans of the pods, are its
        # children.
        traced = beginning if snapshot.learner is None else within
        facts = {Attr.JOB: str(key), Attr.ATTEMPTS: decision.attempts, Attr.PARKED: decision.parked}
        *needed, last = due.objects
        inert = [item for item in needed if item["kind"] not in WORKLOADS]
        with traced(traceparent(snapshot.uid)), span(SpanName.RECONCILE, facts):
            refused = await self._try_all(inert, due)
            if due.begun or not refused:  # otherwise the first pods would miss an object
                refused += await self._try_all([item for item in needed if item["kind"] in WORKLOADS], due)
                if refused:
                    last["metadata"]["annotations"][RENDERED] = ""  # some objects are missing
                refused += await self._try_all([last], due)
        if refused:
            self._note_refusal(key, snapshot, refused, due.digest)
        elif not snapshot.problem or self._refusals.get(key, NO_REFUSAL).digest == due.digest:
            self._refusals.pop(key, None)

    async def _try_all(self, objects: Sequence[Object], due: Due, *, dry_run: bool = False) -> list[ApiProblem]:
        """Applies objects one after another: jobs are processed concurrently, and a larger connection pool costs more
        than it gains.
        """
        tried = [await self._try(item, due, dry_run=dry_run) for item in objects]
        return [problem for problem in tried if problem is not None]

    async def _try(self, item: Object, due: Due, *, dry_run: bool = False) -> ApiProblem | None:
        """Applies an object; returns the error if the API server refuses it.

        Raises:
            ApiProblem: The call failed for another reason.
        """
        try:
            made = await self._api.apply(item, force=self._is_ours(item, due.there, begun=due.begun), dry_run=dry_run)
        except Gone:
            raise
        except ApiProblem as error:
            if error.status in REFUSED or APPLY_CONFLICT in str(error):
                return error
            raise
        if item["kind"] in WATCHED_KINDS and not dry_run:
            self._store.child(item["kind"], made)
        return None

    def _note_refusal(self, key: Key, snapshot: Snapshot, refused: Sequence[ApiProblem], digest: str = "") -> str:
        """Records until when nothing of this spec is tried again; returns the message for the user."""
        before = self.refusal(key, snapshot.uid, snapshot.generation)
        wait = FIRST_RETRY if before is None else min(LONGEST_RETRY, 2 * before.wait)
        shown = "; ".join(str(error) for error in refused[:REFUSALS_SHOWN])
        what = "an object" if len(refused) == 1 else f"{len(refused)} objects"
        problem = f"Kubernetes refuses {what} of this job: {shown}"
        log.warning("%s: retried in %.0f s: %s", key, wait, problem)
        self._refusals[key] = Refusal(snapshot.uid, snapshot.generation, problem, digest, wait, time() + wait)
        return problem

    def _is_ours(self, item: Object, there: Collection[Child], *, begun: bool) -> bool:
        """Whether an object of this name must be the job's: it was seen to be, or, for kinds that are not watched, the
        job has begun.
        """
        child = Child(item["kind"], item["metadata"]["name"])
        return child in there if item["kind"] in WATCHED_KINDS else begun
