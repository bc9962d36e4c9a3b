"""One pass over one job: observe, decide, render, apply, follow, write the status. Jobs are changed nowhere else.

Level-based: a pass uses the current state, so events may be lost or duplicated and another process may take over.
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
from kestrl_operator.applier import WATCHED_KINDS, Applier, Due
from kestrl_operator.cluster import GRPC_PORT, Cluster
from kestrl_operator.conditions import QUARANTINED, Type
from kestrl_operator.credentials import derive
from kestrl_operator.events import Events
from kestrl_operator.learner_stream import FIRST_REPORT_SECONDS, LearnerStreams
from kestrl_operator.lifecycle import Decision, Stage, decide
from kestrl_operator.manifests import Manifests, Parsed, Rendered, rendered_from
from kestrl_operator.missing_pods import MissingPods
from kestrl_operator.snapshot import ACCEPTED, RENDERED, LearnerReport, Memory, Snapshot, seconds_of
from kestrl_operator.status import status_of, with_failure, without_empties
from kestrl_operator.store import Child, Key, Store
from kestrl_operator.work_record import WorkRecord

log = logging.getLogger(__name__)
Object = dict[str, Any]
RECHECK_SECONDS = 60.0
"""Seconds between two passes over a job whose learner reports: a stall is detected by time alone."""
CONFLICT_RECHECK_SECONDS = 5.0
"""Seconds until the next pass over a job that changed while its status was computed, if no watch event causes one."""
LEFTOVER_RECHECK_SECONDS, LEFTOVER_SECONDS = 1.0, 20.0
"""Interval of the search for objects of a deleted job of the same name, and seconds until they are reported."""


class Reconciler:
    """Reconciles all jobs of this operator."""

    def __init__(
        self,
        api: Api,
        store: Store,
        learner_streams: LearnerStreams,
        events: Events,
        cluster: Cluster,
        key: bytes,
        work_record: WorkRecord,
    ) -> None:
        self._api, self._store, self._learner_streams, self._events = api, store, learner_streams, events
        self._manifests, self._key = Manifests(cluster, key), key
        self._work_record = work_record
        self._parsed: dict[Key, Parsed] = {}
        self._rendered: dict[Key, Rendered] = {}
        self._fallbacks: dict[Key, tuple[str, int, str, AgentRLJob | None]] = {}
        """The last accepted job where the newest spec is not in force, by uid, generation and accepted spec."""
        self._applier = Applier(api, store)
        self._memory: dict[Key, Memory] = {}
        self._drifted: set[Key] = set()
        self._missing_pods = MissingPods(api)
        self.nodes: Sequence[Node] | None = None
        """The nodes as last listed; None where this operator may not list them."""

    def drifted(self, key: Key) -> None:
        """Marks a job of which an object was changed or deleted by another manager: all objects are applied again."""
        self._drifted.add(key)

    def forget(self, key: Key) -> None:
        """Drops the state of a job that is deleted; Kubernetes deletes the objects it owned."""
        self._learner_streams.stop(key)
        self._parsed.pop(key, None)
        self._rendered.pop(key, None)
        self._applier.forget(key)
        self._fallbacks.pop(key, None)
        self._missing_pods.forget(key)
        self._memory.pop(key, None)
        self._drifted.discard(key)

    async def reconcile(self, key: Key) -> float | None:
        """Runs one pass; returns the seconds after which another is due without an event.

        Raises:
            ApiProblem: The API server did not do what was asked; the caller retries later.
        """
        raw = self._store.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self.forget(key)
            return None
        if self._is_quarantined(raw):
            await self._quarantine(key, raw)
            return None
        with self._work_record.on(raw):
            snapshot = self._snapshot(key, raw)
        left = self._store.leftovers(key, snapshot.uid)
        if left:
            await self._report_leftovers(
                key, snapshot, left, since=seconds_of(raw["metadata"].get("creationTimestamp"))
            )
            return LEFTOVER_RECHECK_SECONDS
        if self._awaits_first_report(key, snapshot):
            return FIRST_REPORT_SECONDS
        snapshot = replace(snapshot, not_created=await self._missing_pods.not_created(key, snapshot))
        with self._work_record.on(raw):
            decision = decide(snapshot)
            due = self._due(key, snapshot, decision)
        refused = "" if due is None else await self._applier.dry_run(key, snapshot, due)
        if refused:
            # Nothing of it was written: the job continues with the spec that was accepted last.
            with self._work_record.on(raw):
                snapshot = replace(self._snapshot(key, raw, refused), not_created=snapshot.not_created)
                decision = decide(snapshot)
                due = self._due(key, snapshot, decision)
        self._memory[key] = decision.memory
        if decision.delete:
            await self._api.delete(JOB, *key, uid=snapshot.uid)
            return None
        if not await self._carry_out(key, snapshot, decision, due):
            return None
        snapshot = replace(
            snapshot,
            problem=snapshot.problem or self._applier.refused_now(key, snapshot.uid, snapshot.generation, snapshot.now),
        )
        self._follow(key, snapshot, decision)
        with self._work_record.on(raw):
            status = without_empties(status_of(snapshot, decision))
        if not await self._write_status(key, snapshot, status):
            return CONFLICT_RECHECK_SECONDS
        return self._requeue_after(snapshot, decision)

    async def report_failure(self, key: Key, why: str) -> None:
        """Writes into a job's status that a pass over it failed.

        Raises:
            ApiProblem: The API server refuses that as well.
        """
        raw = self._store.jobs.get(key)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            return
        metadata, before = raw["metadata"], raw.get("status", {})
        status = with_failure(before, why, generation=metadata.get("generation", 0), now=time())
        await self._write(key, metadata["uid"], before, without_empties(status))

    def _is_quarantined(self, raw: Mapping[str, Any]) -> bool:
        """Whether this spec killed an operator: this one, according to its record, or another, according to the job's
        status.
        """
        metadata, killed_by = raw["metadata"], self._work_record.killed_by
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
        """Reports the quarantine in the job's status and leaves the rest of the job alone."""
        self._learner_streams.stop(key)
        metadata, before = raw["metadata"], raw.get("status", {})
        generation = metadata.get("generation", 0)
        why = (
            f"an operator was killed while it worked on generation {generation} of the spec; the job is left as it is "
            "until a field of its spec changes: see the operator's memory limit and log, and report the spec if it is "
            "a reasonable one"
        )
        if any(
            item["type"] == Type.READY and item["reason"] == QUARANTINED and item["message"] == why
            for item in before.get("conditions", ())
        ):
            return
        status = with_failure(before, why, generation=generation, now=time(), reason=QUARANTINED)
        await self._write(key, metadata["uid"], before, without_empties(status))

    async def _report_leftovers(
        self, key: Key, snapshot: Snapshot, left: Collection[Child], *, since: float | None
    ) -> None:
        """Reports the remaining objects of a deleted job of the same name: they are being deleted, and must not be used
        for this job.
        """
        if since is not None and snapshot.now < since + LEFTOVER_SECONDS:
            return
        what = ", ".join(sorted(f"{child.kind} {child.name}" for child in left))
        problem = (
            f"another job of this name has left {what}; Kubernetes "
            "deletes them, unless a finalizer blocks that: remove it"
        )
        waiting = replace(snapshot, job=None, problem=problem)
        await self._write_status(key, waiting, without_empties(status_of(waiting, decide(waiting))))

    def _snapshot(self, key: Key, raw: Mapping[str, Any], refused: str = "") -> Snapshot:
        """The current snapshot of a job; `refused` is why the API server refuses the newest spec, if this pass found
        that out.
        """
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
            last_report=self._learner_streams.report(key),
            unreachable=self._learner_streams.unreachable(key),
            unsatisfiable="" if job is None or nodes is None or problem else self._manifests.unsatisfiable(job, nodes),
            memory=self._memory.get(key, Memory()),
        )

    def _read(self, key: Key, raw: Mapping[str, Any]) -> Parsed:
        """The parsed manifest, cached by generation."""
        uid, generation = raw["metadata"]["uid"], raw["metadata"].get("generation", 0)
        known = self._parsed.get(key)
        if known is not None and (known.uid, known.generation) == (uid, generation):
            return known
        try:
            parsed = Parsed(uid, generation, self._manifests.read(key, raw), "", rendered_from(raw.get("spec") or {}))
        except UserInputError as error:
            parsed = Parsed(uid, generation, None, str(error), "")
        self._parsed[key] = parsed
        return parsed

    def _last_accepted(self, key: Key, raw: Mapping[str, Any], kept: Mapping[str, str]) -> AgentRLJob | None:
        """The last accepted job with the newest lifecycle fields, cached by generation."""
        metadata = raw["metadata"]
        made_of = (metadata["uid"], metadata.get("generation", 0), kept.get(ACCEPTED, ""))
        known = self._fallbacks.get(key)
        if known is None or known[:3] != made_of:
            known = self._fallbacks[key] = (*made_of, self._manifests.last_accepted(key, raw, kept))
        return known[3]

    async def _carry_out(self, key: Key, snapshot: Snapshot, decision: Decision, due: Due | None) -> bool:
        """Carries out a decision; False if the job no longer exists."""
        if decision.drain:
            await self._drain(key)
        if due is not None and not await self._apply(key, snapshot, decision, due):
            return False
        if decision.parked:
            await self._park(key)
        for name, uid in decision.remove:
            await self._api.delete(POD, key.namespace, name, uid=uid)
        return True

    def _due(self, key: Key, snapshot: Snapshot, decision: Decision) -> Due | None:
        """The objects to apply; None if all are up to date."""
        if snapshot.job is None:
            return None
        if self._missing_pods.seconds_until_reapply(key, snapshot) == 0:
            self._missing_pods.reapplied(key, snapshot)
            self._drifted.add(key)
        kept: Mapping[str, str] = snapshot.learner.annotations if snapshot.learner is not None else {}
        if snapshot.problem and ACCEPTED not in kept:
            return None  # what was applied stays as it is
        accepted = kept[ACCEPTED] if snapshot.problem else self._parsed[key].accepted
        wanted = Rendered(
            snapshot.uid,
            snapshot.generation,
            decision.parked,
            decision.attempts,
            decision.restarts,
            decision.forgiven,
            snapshot.queue,
            bool(snapshot.problem),
        )
        known, standing = self._rendered.get(key), kept.get(RENDERED, "")
        there, untouched = self._store.children(key), key not in self._drifted
        same = known is not None and known == wanted._replace(digest=standing, children=known.children)
        if untouched and known is not None and same and known.children <= there:
            return None
        try:
            objects = self._manifests.objects(
                key, snapshot.uid, snapshot.job, decision, queue=snapshot.queue, kept=kept, accepted=accepted
            )
        except UserInputError:
            if snapshot.problem:
                return None  # the administrator's settings have changed since; `problem` reports the current error
            raise
        digest = objects[-1]["metadata"]["annotations"][RENDERED]
        children = frozenset(
            Child(item["kind"], item["metadata"]["name"]) for item in objects if item["kind"] in WATCHED_KINDS
        )
        self._rendered[key] = wanted._replace(digest=digest, children=children)
        whole, refusal = untouched and children <= there, self._applier.refusal(key, snapshot.uid, snapshot.generation)
        waits = refusal is not None and refusal.digest == digest and snapshot.now < refusal.until
        return (
            None
            if waits or (whole and digest == standing)
            else Due(objects, digest, standing, RENDERED in kept, there, whole)
        )

    async def _apply(self, key: Key, snapshot: Snapshot, decision: Decision, due: Due) -> bool:
        """Applies all objects; False if the job no longer exists."""
        if not due.whole and snapshot.status and not await self._still_there(key, snapshot):
            return False
        self._drifted.discard(key)
        try:
            await self._applier.apply(key, snapshot, decision, due)
        except ApiProblem:
            self._drifted.add(key)
            raise
        return True

    async def _park(self, key: Key) -> None:
        """Scales workloads that could not be applied to 0 replicas, so that their pods end whatever else the API server
        refuses.
        """
        for child in self._store.scaled_up(key):
            kind = STATEFUL_SET if child.kind == STATEFUL_SET.name else DEPLOYMENT
            log.warning("%s: %s %s is scaled to 0 without its other changes", key, child.kind, child.name)
            await self._api.merge(kind, key.namespace, child.name, {"spec": {"replicas": 0}})

    async def _still_there(self, key: Key, snapshot: Snapshot) -> bool:
        """Whether the job still exists: after a missed deletion its objects vanish, and must not be created again."""
        version = self._store.version(snapshot.uid)
        try:
            await self._api.apply_status(key.namespace, key.name, version, snapshot.status)
        except Gone:
            self._store.drop(key, snapshot.uid)
            self.forget(key)
            return False
        return True

    async def _drain(self, key: Key) -> None:
        try:
            await self._learner_streams.drain(key)
        except KestrlError as error:
            log.warning("%s: the learner did not accept the drain request, which is repeated: %s", key, error)

    def _awaits_first_report(self, key: Key, snapshot: Snapshot) -> bool:
        """Whether the learner may still send its first report: a process that has just started must not report an
        unreachable learner, nor act on that.
        """
        if snapshot.learner is not None and snapshot.learner.replicas > 0:
            self._listen(key, snapshot)
        return self._learner_streams.awaits_first_report(key)

    def _follow(self, key: Key, snapshot: Snapshot, decision: Decision) -> None:
        """Follows the learner while it should run."""
        if decision.parked and decision.stage is not Stage.ENDED:
            self._learner_streams.stop(key)
        else:
            self._listen(key, snapshot)

    def _listen(self, key: Key, snapshot: Snapshot) -> None:
        pods = [pod for pod in snapshot.of(Role.LEARNER) if pod.phase == "Running" and pod.address]
        if not pods:
            self._learner_streams.stop(key)
            return
        token = derive(self._key, snapshot.uid)[Secret.CONTROLLER_TO_LEARNER.value]
        self._learner_streams.want(key, pods[0].uid, f"{pods[0].address}:{GRPC_PORT}", token)

    async def _write_status(self, key: Key, snapshot: Snapshot, status: Mapping[str, Any]) -> bool:
        """Writes the status if it differs; False if the job has changed meanwhile."""
        try:
            await self._write(key, snapshot.uid, snapshot.status, status)
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
        await self._events.publish(key, uid, before, status)

    def _requeue_after(self, snapshot: Snapshot, decision: Decision) -> float | None:
        live_report: LearnerReport | None = snapshot.live_report
        waits = (
            [RECHECK_SECONDS] if live_report is not None and decision.stage in {Stage.RUNNING, Stage.DRAINING} else []
        )
        if decision.requeue_after is not None:
            waits.append(decision.requeue_after)
        refusal = self._applier.refusal(Key(snapshot.namespace, snapshot.name), snapshot.uid, snapshot.generation)
        if refusal is not None and refusal.until > snapshot.now:
            waits.append(refusal.until - snapshot.now)
        if decision.stage is Stage.RUNNING:
            waits += self._missing_pods.waits(Key(snapshot.namespace, snapshot.name), snapshot)
        return min(waits, default=None)
