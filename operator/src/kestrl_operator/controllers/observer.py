"""The snapshot of a job, from its manifest, the objects in the store and the learner's reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import time
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.spec import AgentRLJob
from kestrl.errors import UserInputError
from kestrl_operator.controllers.job_state import Fallback, JobState, ParsedManifest, Requested
from kestrl_operator.controllers.manifests import Manifests, rendered_from
from kestrl_operator.state.admission import PRIORITY_LABEL, Quota, QuotaRequest
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import ACCEPTED, QUEUE_LABEL, Pod, Snapshot, Workload
from kestrl_operator.state.store import Store
from kestrl_operator.status.build import remembered
from kestrl_operator.status.conditions import Type
from kestrl_operator.status.waiting import PARTLY_SECONDS, is_partly_scheduled


class Observer:
    """Builds snapshots."""

    def __init__(self, store: Store, manifests: Manifests, *, kueue: bool = False) -> None:
        self._store, self._manifests, self._kueue = store, manifests, kueue
        self.yielded_at = -PARTLY_SECONDS
        """When a job last gave its pods back to older ones: they get some time before another does."""

    def snapshot(self, state: JobState, raw: Mapping[str, Any]) -> Snapshot:
        """The current snapshot of a job.

        Args:
            state: State of the job, which keeps what was parsed.
            raw: The job object.
        """
        metadata, now, key = raw["metadata"], time(), state.key
        present_pods, lost_nodes = self._store.pods(key, state.uid), self._store.lost_nodes()
        pods = _needed(present_pods)
        parsed, workloads, nodes = self._parsed(state, raw), self._store.workloads(key), self._store.nodes
        job = parsed.job
        problem = parsed.problem or state.refused_now(parsed.generation, now)
        if problem:
            job = self._last_accepted(state, raw, workloads) or (job if workloads else None)
        return Snapshot(
            now=now,
            name=key.name,
            namespace=key.namespace,
            uid=state.uid,
            generation=metadata.get("generation", 0),
            job=job,
            problem=problem,
            labels=metadata.get("labels", {}),
            status=raw.get("status", {}),
            pods=pods,
            followers=[pod for pod in present_pods if pod.role is Role.MLFLOW],
            workloads=workloads,
            last_report=None if state.stream is None else state.stream.report,
            unreachable="" if state.stream is None else state.stream.unreachable,
            unsatisfiable="" if job is None or nodes is None or problem else self._manifests.unsatisfiable(job, nodes),
            lost_nodes={pod.node: lost_nodes[pod.node] for pod in present_pods if pod.node in lost_nodes},
            yields=is_partly_scheduled(pods) and self._yields(key, now),
            memory=remembered(raw.get("status", {})) if state.memory is None else state.memory,
            quota=self._quota(state, metadata.get("labels", {}), job) if self._kueue else None,
        )

    def _quota(self, state: JobState, labels: Mapping[str, str], job: AgentRLJob | None) -> Quota | None:
        """What the job asks Kueue for, and the answer; None if it asks for nothing."""
        queue, admission = labels.get(QUEUE_LABEL), self._store.admission(state.key, state.uid)
        if queue is None:
            return None if admission is None else Quota(request=None, admission=admission)
        request = None if job is None else self._request(state, job, queue, labels.get(PRIORITY_LABEL, ""))
        return Quota(request=request, admission=admission, refused=state.quota.refused)

    def _request(self, state: JobState, job: AgentRLJob, queue: str, priority_class: str) -> QuotaRequest | None:
        """The request of a job. A parsed job is the same object until its manifest changes."""
        requested = state.requested
        if (
            requested is not None
            and requested.job is job
            and (requested.queue, requested.priority_class) == (queue, priority_class)
        ):
            return requested.request
        try:
            request = self._manifests.quota_request(state.key, state.uid, job, queue, priority_class)
        except UserInputError:  # the last accepted spec, which the administrator's settings do not allow any more
            request = None
        state.requested = Requested(job, queue, priority_class, request)
        return request

    def _yields(self, key: Key, now: float) -> bool:
        """Whether this job is the youngest of several that have nodes for some of their pods and wait for others."""
        waiting = {
            job_key: (raw["metadata"].get("creationTimestamp", ""), raw["metadata"]["uid"])
            for job_key, raw in self._store.jobs.items()
            if job_key == key
            or (not _trains(raw) and is_partly_scheduled(_needed(self._store.pods(job_key, raw["metadata"]["uid"]))))
        }
        youngest = max(waiting, key=lambda job_key: waiting[job_key], default=None)
        return len(waiting) > 1 and youngest == key and now >= self.yielded_at + PARTLY_SECONDS

    def _parsed(self, state: JobState, raw: Mapping[str, Any]) -> ParsedManifest:
        """The parsed manifest, cached by generation."""
        generation = raw["metadata"].get("generation", 0)
        if state.parsed is None or state.parsed.generation != generation:
            try:
                job = self._manifests.read(state.key, raw)
                state.parsed = ParsedManifest(generation, job, "", rendered_from(raw.get("spec") or {}))
            except UserInputError as error:
                state.parsed = ParsedManifest(generation, None, str(error), "")
        return state.parsed

    def _last_accepted(
        self, state: JobState, raw: Mapping[str, Any], workloads: Mapping[Role, Workload]
    ) -> AgentRLJob | None:
        """The last accepted job with the newest lifecycle fields, cached by generation."""
        annotations: Mapping[str, str] = workloads[Role.LEARNER].annotations if Role.LEARNER in workloads else {}
        generation, accepted = raw["metadata"].get("generation", 0), annotations.get(ACCEPTED, "")
        fallback = state.fallback
        if fallback is None or (fallback.generation, fallback.accepted) != (generation, accepted):
            job = self._manifests.last_accepted(state.key, raw, annotations)
            fallback = state.fallback = Fallback(generation, accepted, job)
        return fallback.job


def _needed(pods: Sequence[Pod]) -> list[Pod]:
    """The pods that a job needs: all but those that send its run to an experiment tracker."""
    return [pod for pod in pods if pod.role is not Role.MLFLOW]


def _trains(raw: Mapping[str, Any]) -> bool:
    conditions = raw.get("status", {}).get("conditions", ())
    return any(item["type"] == Type.LEARNER_PROGRESSING and item["status"] == "True" for item in conditions)
