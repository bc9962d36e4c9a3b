"""One pass over one job: observe, decide, render, apply, follow, write the status. The only path by which a job is ever touched.

Level-based: a pass looks at what is, never at what happened, so any number of events may be missed or doubled, and any process may take
over after any line of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any, NamedTuple

from kestrl.credentials import Secret
from kestrl.errors import KestrlError, UserInputError
from kestrl.plan.components import Role
from kestrl.spec import AgentRLJob
from kestrl.telemetry import beginning, span, within
from kestrl.telemetry.names import Attr, SpanName
from kestrl_operator.accelerators import Node
from kestrl_operator.api import JOB, POD, Api, ApiProblem, Conflict, Gone
from kestrl_operator.cluster import GRPC_PORT, Cluster
from kestrl_operator.credentials import derive
from kestrl_operator.drawing import Drawing, traceparent
from kestrl_operator.events import Events
from kestrl_operator.follow import FIRST_WORD, Followers
from kestrl_operator.lacks import Lacks
from kestrl_operator.observe import RENDERED, Memory, Snapshot, Told, seconds_of
from kestrl_operator.policies import Decision, Stage, decide
from kestrl_operator.shell import WATCHED
from kestrl_operator.status import status_of, with_failure, without_empties
from kestrl_operator.store import Child, Key, Store

log = logging.getLogger(__name__)
Object = dict[str, Any]
LOOK_AGAIN = 60.0
"""Seconds between two looks at a job whose learner speaks: a stall is told by the clock alone."""
CONFLICT_LOOK = 5.0
"""Seconds after which a job is looked at again that changed while its status was made; the stream tells of it before, unless it is deaf."""
STRANGER_LOOK, STRANGER_SECONDS = 1.0, 20.0
"""How often it is looked whether the objects of a deleted job of the same name are gone, and from when on that is told."""
REFUSED = frozenset({400, 403, 413, 422})
"""The apiserver's answers to an object that it does not want: a person has to mend something."""
TAKEN = "Apply failed with"
"""The apiserver's words where a field is somebody else's: an object of that name was there before the job."""
HEARD_OF = frozenset(kind.name for kind in WATCHED)


class ObjectRefused(KestrlError):
    """Kubernetes does not take an object of the job; the job's status tells of it already."""

    code = "object_refused"


class Parsed(NamedTuple):
    """What a manifest is, for one generation of it: a job, or what is wrong with it."""

    uid: str
    generation: int
    job: AgentRLJob | None
    problem: str


class Drawn(NamedTuple):
    """What a job was rendered from, and the digest of what came out: most passes need no more of it."""

    uid: str
    generation: int
    parked: bool
    attempts: int
    restarts: int
    forgiven: int
    queue: str | None
    digest: str = ""
    children: frozenset[Child] = frozenset()
    """Those that we are told of when somebody changes them."""


class Reconciler:
    """All jobs of this operator."""

    def __init__(
        self, api: Api, store: Store, followers: Followers, events: Events, cluster: Cluster, key: bytes
    ) -> None:
        self._api, self._store, self._followers, self._events = api, store, followers, events
        self._drawing, self._key = Drawing(cluster, key), key
        self._parsed: dict[Key, Parsed] = {}
        self._drawn: dict[Key, Drawn] = {}
        self._memory: dict[Key, Memory] = {}
        self._drifted: set[Key] = set()
        self._lacks = Lacks(api)
        self.nodes: Sequence[Node] | None = None
        """As last listed; None where this operator may not."""

    def drifted(self, key: Key) -> None:
        """Something of this job was changed or deleted by somebody else: all is applied anew."""
        self._drifted.add(key)

    def forget(self, key: Key) -> None:
        """The job is gone; Kubernetes deletes what it owned."""
        self._followers.stop(key)
        self._parsed.pop(key, None)
        self._drawn.pop(key, None)
        self._lacks.forget(key)
        self._memory.pop(key, None)
        self._drifted.discard(key)

    async def reconcile(self, key: Key) -> float | None:
        """One pass; returns the seconds after which time alone calls for another.

        Raises:
            ApiProblem: The apiserver did not do what was asked; another pass is due later.
            ObjectRefused: It never will, until a person mends something.
        """
        raw = self._store.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self.forget(key)
            return None
        seen = self._snapshot(key, raw)
        left = self._store.strangers(key, seen.uid)
        if left:
            await self._tell_of_strangers(key, seen, left, since=seconds_of(raw["metadata"].get("creationTimestamp")))
            return STRANGER_LOOK
        if self._awaits_a_word(key, seen):
            return FIRST_WORD
        seen = replace(seen, unmade=await self._lacks.unmade(key, seen))
        decision = decide(seen)
        self._memory[key] = decision.memory
        if decision.delete:
            await self._api.delete(JOB, *key, uid=seen.uid)
            return None
        if seen.job is not None and not await self._carried_out(key, seen, seen.job, decision):
            return None
        self._follow(key, seen, decision)
        if not await self._write_status(key, seen, decision):
            return CONFLICT_LOOK
        return self._look_again(seen, decision)

    async def tell_of_failure(self, key: Key, why: str) -> None:
        """Writes into a job's status that a pass over it failed.

        Raises:
            ApiProblem: The apiserver does not take that either.
        """
        raw = self._store.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return
        metadata, before = raw["metadata"], raw.get("status", {})
        status = with_failure(before, why, generation=metadata.get("generation", 0), now=time())
        await self._write(key, metadata["uid"], before, without_empties(status))

    async def _tell_of_strangers(
        self, key: Key, seen: Snapshot, left: Collection[Child], *, since: float | None
    ) -> None:
        """Objects of a deleted job of the same name: they are going, and must not be taken for this one's, as its ledger would be."""
        if since is not None and seen.now < since + STRANGER_SECONDS:
            return
        what = ", ".join(sorted(f"{child.kind} {child.name}" for child in left))
        problem = f"another job of this name has left {what}; Kubernetes deletes them, unless a finalizer holds them: see to that"
        waiting = replace(seen, job=None, problem=problem)
        await self._write_status(key, waiting, decide(waiting))

    def _snapshot(self, key: Key, raw: Mapping[str, Any]) -> Snapshot:
        metadata = raw["metadata"]
        parsed = self._read(key, raw)
        job, nodes = parsed.job, self.nodes
        return Snapshot(
            now=time(),
            name=key.name,
            namespace=key.namespace,
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            job=job,
            problem=parsed.problem,
            labels=metadata.get("labels", {}),
            status=raw.get("status", {}),
            pods=self._store.pods(key),
            workloads=self._store.workloads(key),
            told=self._followers.told(key),
            silent=self._followers.silent(key),
            unsatisfiable="" if job is None or nodes is None else self._drawing.unsatisfiable(job, nodes),
            memory=self._memory.get(key, Memory()),
        )

    def _read(self, key: Key, raw: Mapping[str, Any]) -> Parsed:
        """A manifest, read once a generation."""
        uid, generation = raw["metadata"]["uid"], raw["metadata"].get("generation", 0)
        known = self._parsed.get(key)
        if known is not None and (known.uid, known.generation) == (uid, generation):
            return known
        try:
            parsed = Parsed(uid, generation, self._drawing.read(key, raw), "")
        except UserInputError as error:
            parsed = Parsed(uid, generation, None, str(error))
        self._parsed[key] = parsed
        return parsed

    async def _carried_out(self, key: Key, seen: Snapshot, job: AgentRLJob, decision: Decision) -> bool:
        """Does what was decided; False if the job is not there any more.

        An object that the apiserver refuses is told of as the manifest's problem.
        """
        if decision.drain:
            await self._drain(key)
        if self._lacks.until_mended(key, seen) == 0:
            self._lacks.mended(key, seen)
            self._drifted.add(key)
        try:
            if not await self._apply(key, seen, job, decision):
                return False
        except Gone:
            raise
        except ApiProblem as error:
            if error.status not in REFUSED and TAKEN not in str(error):
                raise
            log.warning("%s: %s", key, error)
            refused = replace(seen, job=None, problem=f"Kubernetes refuses an object of this job: {error}")
            await self._write_status(key, refused, decide(refused))
            raise ObjectRefused(str(error)) from error
        for name, uid in decision.remove:
            await self._api.delete(POD, key.namespace, name, uid=uid)
        return True

    async def _apply(self, key: Key, seen: Snapshot, job: AgentRLJob, decision: Decision) -> bool:
        """Applies all objects unless they stand as they are to be; False if the job is not there any more."""
        queue = seen.queue
        wanted = Drawn(
            seen.uid,
            seen.generation,
            decision.parked,
            decision.attempts,
            decision.restarts,
            decision.forgiven,
            queue,
        )
        known = self._drawn.get(key)
        standing = seen.learner.annotations.get(RENDERED, "") if seen.learner is not None else ""
        there, untouched = self._store.children(key), key not in self._drifted
        same = known is not None and known == wanted._replace(digest=standing, children=known.children)
        if untouched and known is not None and same and known.children <= there:
            return True
        kept: Mapping[str, str] = seen.learner.annotations if seen.learner is not None else {}
        objects = self._drawing.objects(key, seen.uid, job, decision, queue=queue, kept=kept)
        digest = objects[-1]["metadata"]["annotations"][RENDERED]
        children = frozenset(
            Child(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] in HEARD_OF
        )
        self._drawn[key] = wanted._replace(digest=digest, children=children)
        whole = untouched and children <= there
        if whole and digest == standing:
            return True
        if not whole and seen.status and not await self._still_there(key, seen):
            return False
        self._drifted.discard(key)
        # The first application is the root of the job's trace; later ones, and all that the pods do, hang on it.
        traced = beginning if seen.learner is None else within
        facts = {Attr.JOB: str(key), Attr.ATTEMPTS: decision.attempts, Attr.PARKED: decision.parked}
        try:
            with traced(traceparent(seen.uid)), span(SpanName.RECONCILE, facts):
                # One after another: jobs are worked on side by side, and a wide pool of connections costs more than it gains.
                for item in objects:
                    made = await self._api.apply(item, force=self._is_ours(item, there, begun=bool(standing)))
                    if item["kind"] in HEARD_OF:
                        self._store.child(item["kind"], made)
        except ApiProblem:
            self._drifted.add(key)
            raise
        return True

    def _is_ours(self, item: Object, there: Collection[Child], *, begun: bool) -> bool:
        """Whether an object of this name can only be the job's: it was seen to be, or, of kinds that are not watched, the job has begun."""
        child = Child(item["kind"], item["metadata"]["name"])
        return child in there if item["kind"] in HEARD_OF else begun

    async def _still_there(self, key: Key, seen: Snapshot) -> bool:
        """Whether the job is: the objects of one whose deletion nobody told us of vanish, and are not to be made anew."""
        version = self._store.version(seen.uid)
        try:
            await self._api.apply_status(key.namespace, key.name, version, seen.status)
        except Gone:
            self._store.drop(key, seen.uid)
            self.forget(key)
            return False
        return True

    async def _drain(self, key: Key) -> None:
        try:
            await self._followers.drain(key)
        except KestrlError as error:
            log.warning("%s: the learner does not take the order to drain, it is given again: %s", key, error)

    def _awaits_a_word(self, key: Key, seen: Snapshot) -> bool:
        """Whether the learner has neither spoken yet nor been found silent: who has just begun must not tell of that, nor act on it."""
        if seen.learner is not None and seen.learner.replicas > 0:
            self._listen(key, seen)
        return self._followers.expects(key)

    def _follow(self, key: Key, seen: Snapshot, decision: Decision) -> None:
        """Listens to the learner for as long as it should run."""
        if decision.parked and decision.stage is not Stage.ENDED:
            self._followers.stop(key)
        else:
            self._listen(key, seen)

    def _listen(self, key: Key, seen: Snapshot) -> None:
        pods = [pod for pod in seen.of(Role.LEARNER) if pod.phase == "Running" and pod.address]
        if not pods:
            self._followers.stop(key)
            return
        token = derive(self._key, seen.uid)[Secret.CONTROLLER_TO_LEARNER.value]
        self._followers.want(key, pods[0].uid, f"{pods[0].address}:{GRPC_PORT}", token)

    async def _write_status(self, key: Key, seen: Snapshot, decision: Decision) -> bool:
        """Writes the status if it differs; False if the job is not what it was any more."""
        try:
            await self._write(key, seen.uid, seen.status, without_empties(status_of(seen, decision)))
        except Conflict:
            return False
        return True

    async def _write(self, key: Key, uid: str, before: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        version = self._store.version(uid)
        if status == before or not version:
            return
        try:
            self._store.job(await self._api.apply_status(key.namespace, key.name, version, status))
        except Gone:
            return  # deleted meanwhile
        await self._events.tell(key, uid, before, status)

    def _look_again(self, seen: Snapshot, decision: Decision) -> float | None:
        speaking: Told | None = seen.speaking
        waits = [LOOK_AGAIN] if speaking is not None and decision.stage in {Stage.RUNNING, Stage.DRAINING} else []
        if decision.look_again is not None:
            waits.append(decision.look_again)
        if decision.stage is Stage.RUNNING:
            waits += self._lacks.waits(Key(seen.namespace, seen.name), seen)
        return min(waits, default=None)
