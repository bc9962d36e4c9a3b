"""What a job reports of its queue, and what is done next with its request for quota. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from kestrl._shared.spec.job import KIND
from kestrl_operator.state.admission import (
    ADMITTED,
    DEACTIVATED,
    EVICTED,
    FINISHED,
    PODS_READY,
    QUOTA_RESERVED,
    REQUEUED,
    REQUEUES,
    Quota,
    QuotaHolder,
    QuotaUse,
    WorkloadAdmission,
)
from kestrl_operator.state.cluster import replicas
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import Snapshot
from kestrl_operator.status.conditions import CHECKING, NOT_OBSERVED, ConditionStatus, Observation, Type
from kestrl_operator.status.lifecycle import Decision, Stage


class QuotaStep(StrEnum):
    """The next change of a job's Workload."""

    APPLY = "apply"
    """It is created, or asks for what the job needs now."""
    DELETE = "delete"
    """The job asks for nothing, or for something else than it holds quota for."""
    RELEASE = "release"
    """The pods of an evicted job are gone: Kueue may give the quota to others."""
    FINISH = "finish"
    """The job has ended, and its pods are gone."""
    READY = "ready"
    """All pods are ready for the first time since the admission."""


def quota_step(use: QuotaUse) -> QuotaStep | None:
    """What is to be done with the Workload; None if it is as it should be, or the job's pods have to go first."""
    quota = use.quota
    if quota is None or (quota.admission is not None and quota.admission.deleting):
        return None
    if use.asks_for_nothing:
        return None if quota.admission is None else QuotaStep.DELETE
    if use.end:
        return _after_the_end(use, quota.admission)
    if quota.request is None or use.suspended:
        return None
    if quota.admission is None:
        return QuotaStep.APPLY
    return _of_a_job_in_its_queue(use, quota, quota.admission)


def _after_the_end(use: QuotaUse, admission: WorkloadAdmission | None) -> QuotaStep | None:
    if admission is None or admission.has(FINISHED) or use.occupied:
        return None
    return QuotaStep.FINISH


def _of_a_job_in_its_queue(use: QuotaUse, quota: Quota, admission: WorkloadAdmission) -> QuotaStep | None:
    reserved = admission.has(QUOTA_RESERVED)
    if admission.has(FINISHED) or (quota.outdated and reserved):
        return None if use.occupied else QuotaStep.DELETE  # Kueue changes neither
    if quota.outdated:
        return QuotaStep.APPLY
    if _is_taken_back(admission):
        return None if use.occupied else QuotaStep.RELEASE
    if quota.request is not None and admission.priority_class != quota.request.priority_class and not reserved:
        return QuotaStep.APPLY
    if admission.lets_run and not admission.has(PODS_READY) and use.ready:
        return QuotaStep.READY
    return None


def quota_use(snapshot: Snapshot, decision: Decision) -> QuotaUse:
    """What an AgentRLJob does with its quota."""
    key, end = Key(snapshot.namespace, snapshot.name), ""
    if decision.stage is Stage.ENDED:
        end = snapshot.condition(Type.SUCCEEDED)[1] if decision.ended is None else decision.ended[0]
    return QuotaUse(
        holder=QuotaHolder(kind=KIND, key=key, uid=snapshot.uid),
        now=snapshot.now,
        queue=snapshot.queue or "",
        quota=snapshot.quota,
        occupied=bool(snapshot.present),
        ready=_all_ready(snapshot),
        end=end,
        suspended=snapshot.job is not None and snapshot.job.spec.suspend,
    )


def _all_ready(snapshot: Snapshot) -> bool:
    if snapshot.job is None or snapshot.learner is None or snapshot.learner.replicas == 0:
        return False
    needed = replicas(snapshot.job.spec, snapshot.workloads)
    return all(
        len([pod for pod in snapshot.of(role) if pod.ready]) >= number
        for role, number in needed.items()
        if role in snapshot.workloads
    )


def released(admission: WorkloadAdmission, now: float) -> Mapping[str, Any]:
    """The status by which an evicted Workload gives its quota back, as Kueue's own integrations write it."""
    eviction = admission.condition(EVICTED)
    reason, message = eviction.get("reason", ""), eviction.get("message", "")
    if reason.startswith(DEACTIVATED):
        reason = DEACTIVATED  # the only one of its kind after which an activated Workload queues again
    requeues = "True" if reason in REQUEUES else "False"
    changes = {
        QUOTA_RESERVED: ("False", "Pending", message),
        ADMITTED: ("False", "NoReservation", "The workload has no reservation"),
        REQUEUED: (requeues, reason, message),
        PODS_READY: ("False", "WaitForStart", "The pods of the job are gone"),
    }
    return {"admission": None, "conditions": _with(admission.conditions, changes, now)}


def finished(admission: WorkloadAdmission, use: QuotaUse) -> Mapping[str, Any]:
    """The status of the Workload of a job that has ended."""
    reason = "Succeeded" if use.end == "Completed" else "Failed"
    changes = {FINISHED: ("True", reason, f"The {use.holder.kind} has ended: {use.end}")}
    return {"conditions": _with(admission.conditions, changes, use.now)}


def started(admission: WorkloadAdmission, now: float) -> Mapping[str, Any]:
    """The status of a Workload of which all pods are ready, which Kueue may wait for (`waitForPodsReady`)."""
    return {"conditions": _with(admission.conditions, {PODS_READY: ("True", "Started", "All pods are ready")}, now)}


def _with(
    conditions: Sequence[Mapping[str, Any]], changes: Mapping[str, tuple[str, str, str]], now: float
) -> list[Mapping[str, Any]]:
    """The conditions after some changes. A merge patch replaces all of them."""
    before = {condition["type"]: condition for condition in conditions}
    time = datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    for kind, (status, reason, message) in changes.items():
        same = before.get(kind, {}).get("status") == status
        since = before[kind]["lastTransitionTime"] if same else time
        entry = {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": since}
        before[kind] = entry
    return list(before.values())


def quota_reserved(snapshot: Snapshot, decision: Decision) -> Observation:
    """Condition QuotaReserved."""
    if snapshot.queue is None:
        return _unknown("the job names no queue")
    if snapshot.quota is not None:
        return answer(quota_use(snapshot, decision), snapshot.quota)
    gated = [pod.name for pod in snapshot.staying if pod.gated]
    if gated:
        return _false("Waiting", f"{len(gated)} pods wait for queue {snapshot.queue}")
    if not snapshot.present:
        return _unknown(f"there is no pod that queue {snapshot.queue} could admit")
    if not all(pod.admitted for pod in snapshot.present):
        return _unknown(f"no queue controller has marked the job's pods: does any serve queue {snapshot.queue}?")
    return Observation(type=Type.QUOTA_RESERVED, status=ConditionStatus.TRUE, reason="Admitted")


def answer(use: QuotaUse, quota: Quota) -> Observation:
    """Condition QuotaReserved of a job that asks for quota by a Workload of its own."""
    admission = quota.admission
    if use.end:
        return _unknown("the job has ended, and needs no quota")
    if use.suspended and (not use.occupied or admission is None):
        return _unknown("the job is suspended, and asks for no quota")
    if quota.refused:
        return _false("Refused", quota.refused)
    if admission is None or not admission.conditions:
        return _false("Waiting", f"queue {use.queue} has not answered yet")
    if use.occupied and not quota.suffices:
        return _false("Draining", _why_given_back(admission, use.queue))
    if not admission.active:
        return _false("Inactive", f"{_deactivation(admission)}: {_activation(use, admission)}")
    if not quota.suffices:
        return _unadmitted(admission, use.queue)
    message = f"by ClusterQueue {admission.cluster_queue}"
    return Observation(type=Type.QUOTA_RESERVED, status=ConditionStatus.TRUE, reason="Admitted", message=message)


def _activation(use: QuotaUse, admission: WorkloadAdmission) -> str:
    """How a job whose Workload is not active queues again."""
    activate = f"set spec.active of Workload {admission.name} to true"
    return activate if use.suspended is None else f"{activate}, or suspend the job and resume it"


def _unadmitted(admission: WorkloadAdmission, queue: str) -> Observation:
    """The condition of a job without pods that Kueue has not admitted."""
    if _is_taken_back(admission):
        return _false("Waiting", _why_given_back(admission, queue))
    if not admission.has(QUOTA_RESERVED) or admission.has(ADMITTED):
        answer = admission.condition(QUOTA_RESERVED).get("message", "it has not answered yet")
        return _false("Waiting", f"queue {queue}: {answer}")
    checks = "; ".join(f"admission check {check}" for check in admission.unfinished_checks)
    message = f"ClusterQueue {admission.cluster_queue} has reserved it; {checks or 'the admission follows'}"
    return Observation(type=Type.QUOTA_RESERVED, status=ConditionStatus.TRUE, reason=CHECKING, message=message)


def _deactivation(admission: WorkloadAdmission) -> str:
    """Why a Workload is not active."""
    if admission.eviction.startswith(DEACTIVATED):
        message: str = admission.condition(EVICTED)["message"]
        return message
    return "the Workload is deactivated"


def _is_taken_back(admission: WorkloadAdmission) -> bool:
    """Whether Kueue waits for the quota of an evicted job. The Workload still says that it is reserved."""
    return admission.has(EVICTED) and admission.has(QUOTA_RESERVED)


def _why_given_back(admission: WorkloadAdmission, queue: str) -> str:
    if admission.eviction:
        return f"queue {queue} takes the quota back: {admission.eviction}"
    if not admission.lets_run:
        return f"queue {queue} has not admitted the job, and its pods go"
    return f"the job needs something else than queue {queue} has admitted, and waits for it without pods"


def _false(reason: str, message: str) -> Observation:
    return Observation(type=Type.QUOTA_RESERVED, status=ConditionStatus.FALSE, reason=reason, message=message)


def _unknown(message: str) -> Observation:
    kind, status = Type.QUOTA_RESERVED, ConditionStatus.UNKNOWN
    return Observation(type=kind, status=status, reason=NOT_OBSERVED, message=message)
