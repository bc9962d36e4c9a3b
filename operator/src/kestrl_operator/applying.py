"""Applies the objects of a job, remembers what the API server refuses, and when that is tried again."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from time import time
from typing import Any, NamedTuple

from kestrl.telemetry import beginning, span, within
from kestrl.telemetry.names import Attr, SpanName
from kestrl_operator.api import Api, ApiProblem, Gone
from kestrl_operator.drawing import traceparent
from kestrl_operator.observe import RENDERED, Snapshot
from kestrl_operator.policies import Decision
from kestrl_operator.shell import WATCHED
from kestrl_operator.store import WORKLOADS, Child, Key, Store

log = logging.getLogger(__name__)
Object = dict[str, Any]
REFUSED = frozenset({400, 403, 413, 422})
"""The apiserver's answers to an object that it does not want: a person has to mend something."""
TAKEN = "Apply failed with"
"""The apiserver's words where a field is somebody else's: an object of that name was there before the job."""
FROM_SPEC = WORKLOADS | {"ConfigMap"}
"""Kinds of objects that hold anything of the spec but the job's name."""
HEARD_OF = frozenset(kind.name for kind in WATCHED)
FIRST_RETRY, LONGEST_RETRY = 5.0, 120.0
"""Seconds until what the apiserver refused is tried again, doubled each time: a quota or an admission may have changed."""
REFUSALS_SHOWN = 3


class Refusal(NamedTuple):
    """What the apiserver refused of a generation."""

    uid: str
    generation: int
    problem: str
    digest: str
    """Of what was applied as far as it was taken; empty where nothing was."""
    wait: float
    until: float
    """When it is tried again."""


NO_REFUSAL = Refusal("", 0, "", "", 0.0, 0.0)


class Due(NamedTuple):
    """Objects to apply."""

    objects: list[Object]
    digest: str
    standing: str
    """The digest of what was applied last; empty where not all of it was, or nothing."""
    begun: bool
    """Whether anything was applied before."""
    there: frozenset[Child]
    whole: bool
    """Whether every object that is watched is there, and nobody else has changed one."""


class Applier:
    """Server-side apply of rendered objects."""

    def __init__(self, api: Api, store: Store) -> None:
        self._api, self._store = api, store
        self._refusals: dict[Key, Refusal] = {}

    def forget(self, key: Key) -> None:
        """Drops what was refused of a job."""
        self._refusals.pop(key, None)

    def refusal(self, key: Key, uid: str, generation: int) -> Refusal | None:
        """What the apiserver refused last of this generation."""
        known = self._refusals.get(key)
        return known if known is not None and (known.uid, known.generation) == (uid, generation) else None

    def refused_now(self, key: Key, uid: str, generation: int, now: float) -> str:
        """Why this generation cannot be applied, until it is tried again."""
        refusal = self.refusal(key, uid, generation)
        return refusal.problem if refusal is not None and now < refusal.until else ""

    async def dry_run(self, key: Key, seen: Snapshot, due: Due) -> str:
        """Why the apiserver refuses objects of what is newly rendered; empty if none. All that hold anything of the spec are asked about
        before any object is written; the others hold the job's name alone, and a dry run of them would cost as much as all else.

        What is rendered from the last accepted spec is applied as far as it is taken: an object that is refused keeps no other from its upkeep.
        """
        if seen.problem or due.digest == due.standing:
            return ""
        refused = await self._try_all([item for item in due.objects if item["kind"] in FROM_SPEC], due, dry_run=True)
        return self._note_refusal(key, seen, refused) if refused else ""

    async def apply(self, key: Key, seen: Snapshot, decision: Decision, due: Due) -> None:
        """Applies all objects, workloads last; refusals are remembered.

        Raises:
            ApiProblem: The API server failed for another reason.
        """
        # The first application is the root of the job's trace; later ones, and all that the pods do, hang on it.
        traced = beginning if seen.learner is None else within
        facts = {Attr.JOB: str(key), Attr.ATTEMPTS: decision.attempts, Attr.PARKED: decision.parked}
        *needed, last = due.objects
        inert = [item for item in needed if item["kind"] not in WORKLOADS]
        with traced(traceparent(seen.uid)), span(SpanName.RECONCILE, facts):
            refused = await self._try_all(inert, due)
            if due.begun or not refused:  # else something that a first pod needs would be missing
                refused += await self._try_all([item for item in needed if item["kind"] in WORKLOADS], due)
                if refused:
                    last["metadata"]["annotations"][RENDERED] = ""  # not all of it is there
                refused += await self._try_all([last], due)
        if refused:
            self._note_refusal(key, seen, refused, due.digest)
        elif not seen.problem or self._refusals.get(key, NO_REFUSAL).digest == due.digest:
            self._refusals.pop(key, None)

    async def _try_all(self, objects: Sequence[Object], due: Due, *, dry_run: bool = False) -> list[ApiProblem]:
        """Applies objects one after another: jobs are worked on side by side, and a wide pool of connections costs more than it gains."""
        tried = [await self._try(item, due, dry_run=dry_run) for item in objects]
        return [problem for problem in tried if problem is not None]

    async def _try(self, item: Object, due: Due, *, dry_run: bool = False) -> ApiProblem | None:
        """Applies an object; why the apiserver does not want it, if so.

        Raises:
            ApiProblem: It did not do what was asked for another reason.
        """
        try:
            made = await self._api.apply(item, force=self._is_ours(item, due.there, begun=due.begun), dry_run=dry_run)
        except Gone:
            raise
        except ApiProblem as error:
            if error.status in REFUSED or TAKEN in str(error):
                return error
            raise
        if item["kind"] in HEARD_OF and not dry_run:
            self._store.child(item["kind"], made)
        return None

    def _note_refusal(self, key: Key, seen: Snapshot, refused: Sequence[ApiProblem], digest: str = "") -> str:
        """Keeps in mind until when nothing of it is tried again; returns what a person is to know."""
        before = self.refusal(key, seen.uid, seen.generation)
        wait = FIRST_RETRY if before is None else min(LONGEST_RETRY, 2 * before.wait)
        shown = "; ".join(str(error) for error in refused[:REFUSALS_SHOWN])
        what = "an object" if len(refused) == 1 else f"{len(refused)} objects"
        problem = f"Kubernetes refuses {what} of this job: {shown}"
        log.warning("%s: tried again in %.0f s: %s", key, wait, problem)
        self._refusals[key] = Refusal(seen.uid, seen.generation, problem, digest, wait, time() + wait)
        return problem

    def _is_ours(self, item: Object, there: Collection[Child], *, begun: bool) -> bool:
        """Whether an object of this name can only be the job's: it was seen to be, or, of kinds that are not watched, the job has begun."""
        child = Child(item["kind"], item["metadata"]["name"])
        return child in there if item["kind"] in HEARD_OF else begun
