"""One pass over one job: observe, decide, render, apply, follow, write the status. The only path by which a job is ever touched.

Level-based: a pass looks at what is, never at what happened, so any number of events may be missed or doubled, and any process may take
over after any line of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from time import time
from typing import Any

from kestrl.credentials import Secret
from kestrl.errors import KestrlError, UserInputError
from kestrl.plan.components import Role
from kestrl.spec import AgentRLJob
from kestrl_operator.accelerators import Node
from kestrl_operator.api import DEPLOYMENT, JOB, POD, STATEFUL_SET, Api, ApiProblem, Conflict, Gone
from kestrl_operator.applying import HEARD_OF, Applier, Due
from kestrl_operator.at_work import AtWork
from kestrl_operator.cluster import GRPC_PORT, Cluster
from kestrl_operator.conditions import QUARANTINED, Type
from kestrl_operator.credentials import derive
from kestrl_operator.drawing import Drawing, Drawn, Parsed, rendered_from
from kestrl_operator.events import Events
from kestrl_operator.follow import FIRST_WORD, Followers
from kestrl_operator.lacks import Lacks
from kestrl_operator.observe import ACCEPTED, RENDERED, Memory, Snapshot, Told, seconds_of
from kestrl_operator.policies import Decision, Stage, decide
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


class Reconciler:
    """All jobs of this operator."""

    def __init__(
        self,
        api: Api,
        store: Store,
        followers: Followers,
        events: Events,
        cluster: Cluster,
        key: bytes,
        at_work: AtWork,
    ) -> None:
        self._api, self._store, self._followers, self._events = api, store, followers, events
        self._drawing, self._key = Drawing(cluster, key), key
        self._at_work = at_work
        self._parsed: dict[Key, Parsed] = {}
        self._drawn: dict[Key, Drawn] = {}
        self._fallbacks: dict[Key, tuple[str, int, str, AgentRLJob | None]] = {}
        """The last accepted jobs of those whose newest spec is not in force, by uid, generation and what was accepted."""
        self._applier = Applier(api, store)
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
        self._applier.forget(key)
        self._fallbacks.pop(key, None)
        self._lacks.forget(key)
        self._memory.pop(key, None)
        self._drifted.discard(key)

    async def reconcile(self, key: Key) -> float | None:
        """One pass; returns the seconds after which time alone calls for another.

        Raises:
            ApiProblem: The apiserver did not do what was asked; another pass is due later.
        """
        raw = self._store.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self.forget(key)
            return None
        if self._is_quarantined(raw):
            await self._quarantine(key, raw)
            return None
        with self._at_work.on(raw):
            seen = self._snapshot(key, raw)
        left = self._store.strangers(key, seen.uid)
        if left:
            await self._tell_of_strangers(key, seen, left, since=seconds_of(raw["metadata"].get("creationTimestamp")))
            return STRANGER_LOOK
        if self._awaits_a_word(key, seen):
            return FIRST_WORD
        seen = replace(seen, unmade=await self._lacks.unmade(key, seen))
        with self._at_work.on(raw):
            decision = decide(seen)
            due = self._due(key, seen, decision)
        refused = "" if due is None else await self._applier.dry_run(key, seen, due)
        if refused:
            # Nothing of it was written: the job goes on as it was accepted last.
            with self._at_work.on(raw):
                seen = replace(self._snapshot(key, raw, refused), unmade=seen.unmade)
                decision = decide(seen)
                due = self._due(key, seen, decision)
        self._memory[key] = decision.memory
        if decision.delete:
            await self._api.delete(JOB, *key, uid=seen.uid)
            return None
        if not await self._carried_out(key, seen, decision, due):
            return None
        seen = replace(
            seen, problem=seen.problem or self._applier.refused_now(key, seen.uid, seen.generation, seen.now)
        )
        self._follow(key, seen, decision)
        with self._at_work.on(raw):
            status = without_empties(status_of(seen, decision))
        if not await self._write_status(key, seen, status):
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

    def _is_quarantined(self, raw: Mapping[str, Any]) -> bool:
        """Whether this very spec killed an operator: this one, as its record says, or another, as the job's status says."""
        metadata, killed_by = raw["metadata"], self._at_work.killed_by
        generation = metadata.get("generation", 0)
        if killed_by is not None and (killed_by.uid, killed_by.generation) == (metadata["uid"], generation):
            return True
        return any(
            item["type"] == Type.READY
            and item["reason"] == QUARANTINED
            and item.get("observedGeneration") == generation
            for item in raw.get("status", {}).get("conditions", ())
        )

    async def _quarantine(self, key: Key, raw: Mapping[str, Any]) -> None:
        """Says so in the job's status; nothing else of it is looked at."""
        self._followers.stop(key)
        metadata, before = raw["metadata"], raw.get("status", {})
        generation = metadata.get("generation", 0)
        why = (
            f"an operator was killed while it handled generation {generation} of the spec; the job is left as it is until its spec "
            "changes, any field of it: see the operator's memory limit and log, and report the spec if it is not absurd"
        )
        if any(
            item["type"] == Type.READY and item["reason"] == QUARANTINED and item["message"] == why
            for item in before.get("conditions", ())
        ):
            return
        status = with_failure(before, why, generation=generation, now=time(), reason=QUARANTINED)
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
        await self._write_status(key, waiting, without_empties(status_of(waiting, decide(waiting))))

    def _snapshot(self, key: Key, raw: Mapping[str, Any], refused: str = "") -> Snapshot:
        """What is known of a job now; `refused` is why the apiserver refuses the newest spec, if it has just said so."""
        metadata = raw["metadata"]
        parsed, workloads, nodes = self._read(key, raw), self._store.workloads(key), self.nodes
        job, now = parsed.job, time()
        problem = parsed.problem or refused or self._applier.refused_now(key, parsed.uid, parsed.generation, now)
        if problem:
            kept: Mapping[str, str] = workloads[Role.LEARNER].annotations if Role.LEARNER in workloads else {}
            job = self._last_accepted(key, raw, kept) or (job if workloads else None)
        return Snapshot(
            now=now,
            name=key.name,
            namespace=key.namespace,
            uid=metadata["uid"],
            generation=metadata.get("generation", 0),
            job=job,
            problem=problem,
            labels=metadata.get("labels", {}),
            status=raw.get("status", {}),
            pods=self._store.pods(key, metadata["uid"]),
            workloads=workloads,
            told=self._followers.told(key),
            silent=self._followers.silent(key),
            unsatisfiable="" if job is None or nodes is None or problem else self._drawing.unsatisfiable(job, nodes),
            memory=self._memory.get(key, Memory()),
        )

    def _read(self, key: Key, raw: Mapping[str, Any]) -> Parsed:
        """A manifest, read once a generation."""
        uid, generation = raw["metadata"]["uid"], raw["metadata"].get("generation", 0)
        known = self._parsed.get(key)
        if known is not None and (known.uid, known.generation) == (uid, generation):
            return known
        try:
            parsed = Parsed(uid, generation, self._drawing.read(key, raw), "", rendered_from(raw.get("spec") or {}))
        except UserInputError as error:
            parsed = Parsed(uid, generation, None, str(error), "")
        self._parsed[key] = parsed
        return parsed

    def _last_accepted(self, key: Key, raw: Mapping[str, Any], kept: Mapping[str, str]) -> AgentRLJob | None:
        """The last accepted job with the newest lifecycle, parsed once a generation."""
        metadata = raw["metadata"]
        made_of = (metadata["uid"], metadata.get("generation", 0), kept.get(ACCEPTED, ""))
        known = self._fallbacks.get(key)
        if known is None or known[:3] != made_of:
            known = self._fallbacks[key] = (*made_of, self._drawing.last_accepted(key, raw, kept))
        return known[3]

    async def _carried_out(self, key: Key, seen: Snapshot, decision: Decision, due: Due | None) -> bool:
        """Does what was decided; False if the job is not there any more."""
        if decision.drain:
            await self._drain(key)
        if due is not None and not await self._apply(key, seen, decision, due):
            return False
        if decision.parked:
            await self._park(key)
        for name, uid in decision.remove:
            await self._api.delete(POD, key.namespace, name, uid=uid)
        return True

    def _due(self, key: Key, seen: Snapshot, decision: Decision) -> Due | None:
        """The objects to apply; None if all stand as they are to be."""
        if seen.job is None:
            return None
        if self._lacks.until_mended(key, seen) == 0:
            self._lacks.mended(key, seen)
            self._drifted.add(key)
        kept: Mapping[str, str] = seen.learner.annotations if seen.learner is not None else {}
        if seen.problem and ACCEPTED not in kept:
            return None  # what was applied of it stays as it is
        accepted = kept[ACCEPTED] if seen.problem else self._parsed[key].accepted
        wanted = Drawn(
            seen.uid,
            seen.generation,
            decision.parked,
            decision.attempts,
            decision.restarts,
            decision.forgiven,
            seen.queue,
            bool(seen.problem),
        )
        known, standing = self._drawn.get(key), kept.get(RENDERED, "")
        there, untouched = self._store.children(key), key not in self._drifted
        same = known is not None and known == wanted._replace(digest=standing, children=known.children)
        if untouched and known is not None and same and known.children <= there:
            return None
        try:
            objects = self._drawing.objects(
                key, seen.uid, seen.job, decision, queue=seen.queue, kept=kept, accepted=accepted
            )
        except UserInputError:
            if seen.problem:
                return None  # the administrator's choices have changed since; `problem` says what is wrong now
            raise
        digest = objects[-1]["metadata"]["annotations"][RENDERED]
        children = frozenset(
            Child(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] in HEARD_OF
        )
        self._drawn[key] = wanted._replace(digest=digest, children=children)
        whole, refusal = untouched and children <= there, self._applier.refusal(key, seen.uid, seen.generation)
        waits = refusal is not None and refusal.digest == digest and seen.now < refusal.until
        return (
            None
            if waits or (whole and digest == standing)
            else Due(objects, digest, standing, RENDERED in kept, there, whole)
        )

    async def _apply(self, key: Key, seen: Snapshot, decision: Decision, due: Due) -> bool:
        """Applies all objects; False if the job is not there any more."""
        if not due.whole and seen.status and not await self._still_there(key, seen):
            return False
        self._drifted.discard(key)
        try:
            await self._applier.apply(key, seen, decision, due)
        except ApiProblem:
            self._drifted.add(key)
            raise
        return True

    async def _park(self, key: Key) -> None:
        """Scales workloads to no pod that could not be applied so: pods are let go whatever else the apiserver refuses."""
        for child in self._store.scaled_up(key):
            kind = STATEFUL_SET if child.kind == STATEFUL_SET.name else DEPLOYMENT
            log.warning("%s: %s %s is scaled to 0 alone", key, child.kind, child.name)
            await self._api.merge(kind, key.namespace, child.name, {"spec": {"replicas": 0}})

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

    async def _write_status(self, key: Key, seen: Snapshot, status: Mapping[str, Any]) -> bool:
        """Writes the status if it differs; False if the job is not what it was any more."""
        try:
            await self._write(key, seen.uid, seen.status, status)
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
        refusal = self._applier.refusal(Key(seen.namespace, seen.name), seen.uid, seen.generation)
        if refusal is not None and refusal.until > seen.now:
            waits.append(refusal.until - seen.now)
        if decision.stage is Stage.RUNNING:
            waits += self._lacks.waits(Key(seen.namespace, seen.name), seen)
        return min(waits, default=None)
