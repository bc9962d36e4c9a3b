"""One pass over one job: observe, decide, render, apply, follow, write the status. Jobs are changed nowhere else.

Level-based: a pass uses the current state, so events may be lost or duplicated and another process may take over.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.planning import has_rank_pods
from kestrl.errors import KestrlError
from kestrl_operator.apiserver.client import Api, ApiProblem
from kestrl_operator.apiserver.kinds import DEPLOYMENT, JOB, POD, STATEFUL_SET
from kestrl_operator.controllers import missing_pods
from kestrl_operator.controllers.applier import Applier
from kestrl_operator.controllers.due_objects import Due, due_objects
from kestrl_operator.controllers.job_state import JobState, JobStates
from kestrl_operator.controllers.learner_stream import FIRST_REPORT_SECONDS
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.controllers.missing_pods import MissingPods
from kestrl_operator.controllers.observer import Observer
from kestrl_operator.controllers.status_writer import StatusWriter
from kestrl_operator.credentials import derive
from kestrl_operator.events import Events
from kestrl_operator.state.cluster import GRPC_PORT, workload
from kestrl_operator.state.snapshot import Snapshot, seconds_of
from kestrl_operator.state.store import OwnedObject, Store
from kestrl_operator.status.build import status_of
from kestrl_operator.status.conditions import QUARANTINED
from kestrl_operator.status.lifecycle import Decision, Stage, decide
from kestrl_operator.work import quarantine
from kestrl_operator.work.work_record import WorkRecord

if TYPE_CHECKING:
    from kestrl_operator.state.chart_values import Cluster
    from kestrl_operator.state.jobs import Key

log = logging.getLogger(__name__)
RECHECK_SECONDS = 60.0
"""Seconds between two passes over a job whose learner reports: a stall is detected by time alone."""
LEFTOVER_RECHECK_SECONDS, LEFTOVER_SECONDS = 1.0, 20.0
"""Interval of the search for objects of a deleted job of the same name, and seconds until they are reported."""


class Planned(NamedTuple):
    """What a pass is going to do."""

    snapshot: Snapshot
    decision: Decision
    due: Due | None


class Reconciler:
    """Reconciles all jobs of this operator."""

    def __init__(
        self,
        api: Api,
        store: Store,
        states: JobStates,
        events: Events,
        cluster: Cluster,
        key: bytes,
        work_record: WorkRecord,
        *,
        kueue: bool = False,
    ) -> None:
        self._api, self._store, self._states = api, store, states
        self._key, self._work_record = key, work_record
        self._manifests = Manifests(cluster, key)
        self._observer = Observer(store, self._manifests, kueue=kueue)
        self._missing_pods, self._applier = MissingPods(api), Applier(api, store, events)
        self._statuses = StatusWriter(api, store, events)

    async def reconcile(self, key: Key) -> float | None:
        """Runs one pass; returns the seconds after which another is due without an event.

        Raises:
            ApiProblem: The API server did not do what was asked; the caller retries later.
        """
        raw = self._job(key)
        if raw is None:
            self._states.drop(key)
            return None
        state = self._states.of(key, raw["metadata"]["uid"])
        if quarantine.is_quarantined(raw, self._work_record.killed_by):
            return await self._leave_alone(state, raw)
        with self._work_record.on(raw):
            snapshot = self._observer.snapshot(state, raw)
        leftovers = self._store.leftovers(key, state.uid)
        if leftovers:
            return await self._await_deletion(state, raw, snapshot, leftovers)
        if self._awaits_first_report(state, snapshot):
            return FIRST_REPORT_SECONDS
        snapshot = replace(snapshot, not_created=await self._missing_pods.not_created(state, snapshot))
        await self._applier.quota.look_up_places(
            state.quota, None if snapshot.quota is None else snapshot.quota.admission
        )
        planned = await self._accepted_plan(state, raw, snapshot)
        return await self._carry_out(state, raw, planned)

    def leave(self, key: Key) -> None:
        """Stops following a job that another installation reconciles."""
        self._states.drop(key)

    async def report_failure(self, key: Key, message: str) -> None:
        """Writes into a job's status that a pass over it failed.

        Raises:
            ApiProblem: The API server refuses that as well.
        """
        raw = self._job(key)
        if raw is not None:
            await self._statuses.write_failure(key, raw, message)

    def _job(self, key: Key) -> Mapping[str, Any] | None:
        """The job object; None if it is deleted, or about to be."""
        raw = self._store.jobs.get(key)
        return None if raw is None or "deletionTimestamp" in raw["metadata"] else raw

    async def _leave_alone(self, state: JobState, raw: Mapping[str, Any]) -> None:
        """Reports the quarantine in the job's status, and does nothing else."""
        state.stop_stream()
        message = quarantine.message(raw)
        if message:
            await self._statuses.write_failure(state.key, raw, message, QUARANTINED)

    async def _await_deletion(
        self, state: JobState, raw: Mapping[str, Any], snapshot: Snapshot, leftovers: Collection[OwnedObject]
    ) -> float:
        """Reports the remaining objects of a deleted job of the same name: they are being deleted, and must not be used
        for this job.
        """
        since = seconds_of(raw["metadata"].get("creationTimestamp"))
        if since is None or snapshot.now >= since + LEFTOVER_SECONDS:
            leftover_names = ", ".join(sorted(f"{child.kind} {child.name}" for child in leftovers))
            problem = (
                f"another job of this name has left {leftover_names}; Kubernetes "
                "deletes them, unless a finalizer blocks that: remove it"
            )
            waiting = replace(snapshot, job=None, problem=problem)
            await self._statuses.write(state.key, waiting, status_of(waiting, decide(waiting)))
        return LEFTOVER_RECHECK_SECONDS

    async def _accepted_plan(self, state: JobState, raw: Mapping[str, Any], snapshot: Snapshot) -> Planned:
        """The plan for the newest spec; if the API server refuses its objects in a dry run, nothing of it is written,
        and the plan is for the spec that was accepted last.
        """
        with self._work_record.on(raw):
            planned = self._plan(state, snapshot)
        if planned.due is None or not await self._applier.refuses(state, snapshot, planned.due):
            return planned
        with self._work_record.on(raw):
            return self._plan(state, replace(self._observer.snapshot(state, raw), not_created=snapshot.not_created))

    def _plan(self, state: JobState, snapshot: Snapshot) -> Planned:
        decision = decide(snapshot)
        if snapshot.job is not None:
            missing_pods.reapply_if_due(state, snapshot)
        rendering = due_objects(state, snapshot, decision, self._store.children(state.key), self._manifests)
        return Planned(snapshot, decision, rendering)

    async def _carry_out(self, state: JobState, raw: Mapping[str, Any], planned: Planned) -> float | None:
        """Carries out a plan and writes the status; returns the seconds until the next pass."""
        snapshot, decision, decision_seconds = planned
        if decision.stage is Stage.PARKED and snapshot.memory.rest != decision.memory.rest and snapshot.yields:
            self._observer.yielded_at = snapshot.now
        state.memory = decision.memory
        if decision.delete:
            await self._api.delete(JOB, *state.key, uid=snapshot.uid)
            return None
        if decision.drain:
            await self._drain(state)
        if decision_seconds is not None and not await self._apply(state, snapshot, decision, decision_seconds):
            return None
        if decision.parked:
            await self._park(state.key)
        else:
            await self._applier.engines.keep_within(state.key, snapshot)
        if not decision.parked and snapshot.job is not None and not has_rank_pods(snapshot.job.spec):
            await self._release_ranks(state.key)
        for name, uid in decision.remove:
            await self._api.delete(POD, state.key.namespace, name, uid=uid)
        quota_seconds = await self._applier.settle_quota(state, snapshot, decision)
        problem = snapshot.problem or state.refused_now(snapshot.generation, snapshot.now)
        snapshot = replace(snapshot, problem=problem)
        self._follow(state, snapshot, decision)
        with self._work_record.on(raw):
            status = status_of(snapshot, decision)
        write_seconds = await self._statuses.write_due(state, snapshot, status)
        decision_seconds = requeue_after(state, snapshot, decision)
        waits = (write_seconds, decision_seconds, quota_seconds)
        return min((seconds for seconds in waits if seconds is not None), default=None)

    async def _apply(self, state: JobState, snapshot: Snapshot, decision: Decision, rendering: Due) -> bool:
        """Applies all objects; False if the job no longer exists: after a missed deletion its objects vanish, and must
        not be created again.
        """
        has_conditions = bool(snapshot.status.get("conditions"))
        if has_conditions and not rendering.whole and not await self._statuses.job_exists(state.key, snapshot):
            self._store.drop(state.key, snapshot.uid)
            self._states.drop(state.key)
            return False
        state.drifted = False
        try:
            await self._applier.apply(state, snapshot, decision, rendering)
        except ApiProblem:
            state.drifted = True
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

    async def _release_ranks(self, key: Key) -> None:
        """Ends the pods of ranks of a job that has none any more, since no object is rendered for them."""
        ranks = self._store.workloads(key).get(Role.RANKS)
        if ranks is not None and ranks.replicas > 0:
            name = workload(key.name, Role.RANKS)
            log.info("%s: %s is scaled to 0, since spec.learner.replicas is 1", key, name)
            await self._api.merge(STATEFUL_SET, key.namespace, name, {"spec": {"replicas": 0}})

    async def _drain(self, state: JobState) -> None:
        if state.stream is None:
            return
        try:
            await state.stream.drain()
        except KestrlError as error:
            log.warning("%s: the learner did not accept the drain request, which is repeated: %s", state.key, error)

    def _awaits_first_report(self, state: JobState, snapshot: Snapshot) -> bool:
        """Whether the learner may still send its first report: a process that has just started must not report an
        unreachable learner, nor act on that.
        """
        if snapshot.learner is not None and snapshot.learner.replicas > 0:
            self._listen(state, snapshot)
        return state.stream is not None and state.stream.awaits_first_report

    def _follow(self, state: JobState, snapshot: Snapshot, decision: Decision) -> None:
        """Follows the learner while it should run."""
        if decision.parked and decision.stage is not Stage.ENDED:
            state.stop_stream()
        else:
            self._listen(state, snapshot)

    def _listen(self, state: JobState, snapshot: Snapshot) -> None:
        pods = [pod for pod in snapshot.of(Role.LEARNER) if pod.phase == "Running" and pod.address]
        if not pods:
            state.stop_stream()
            return

        def token() -> str:
            return derive(self._key, snapshot.uid)[Secret.CONTROLLER_TO_LEARNER.value]

        self._states.follow(state, pods[0].uid, f"{pods[0].address}:{GRPC_PORT}", token)


def requeue_after(state: JobState, snapshot: Snapshot, decision: Decision) -> float | None:
    """Seconds after which another pass is due without an event; None if none is. Pure."""
    waits: list[float] = []
    if snapshot.live_report is not None and decision.stage in {Stage.RUNNING, Stage.DRAINING}:
        waits.append(RECHECK_SECONDS)
    if decision.requeue_after is not None:
        waits.append(decision.requeue_after)
    refusal = state.refusal_of(snapshot.generation)
    if refusal is not None and refusal.until > snapshot.now:
        waits.append(refusal.until - snapshot.now)
    if decision.stage is Stage.RUNNING:
        waits += missing_pods.waits(state, snapshot)
    return min(waits, default=None)
