"""The status of an SFTJob from what was observed of its Job and its pods. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrl._shared.conventions import EXIT_INPUT
from kestrl._shared.spec.status import Condition, SFTJobStatus, SFTShown
from kestrl_operator.state.admission import JOB_UID_LABEL, QuotaUse
from kestrl_operator.state.sft import CONTAINER, BatchJob, SFTPod
from kestrl_operator.status.conditions import (
    NOT_OBSERVED,
    QUARANTINED,
    SFT_REASONS,
    ConditionStatus,
    Observation,
    Type,
    joined,
    phase,
)
from kestrl_operator.status.observations import is_missing
from kestrl_operator.status.quota import answer
from kestrl_operator.status.summary import distance, left_alone


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSnapshot:
    """What a pass observed."""

    generation: int
    now: str
    """RFC 3339."""
    problem: str = ""
    """What is wrong with the manifest, or refused by Kubernetes; empty if nothing is."""
    unsatisfiable: str = ""
    """Why no node could ever take the pod."""
    not_created: str = ""
    """Why Kubernetes creates no pod, if that is known."""
    queue: str = ""
    """The queue of Kueue that the job's label names now; empty for none."""
    use: QuotaUse | None = None
    """What the job does with its quota; None where it asks for none by a Workload of its own."""
    batch: BatchJob | None = None
    pods: Sequence[SFTPod] = ()

    @property
    def newest(self) -> SFTPod | None:
        return max(self.pods, key=lambda pod: pod.made, default=None)


def sft_status(before: Mapping[str, Any], snapshot: SFTSnapshot) -> dict[str, Any]:
    """The complete status to write.

    Args:
        before: The current status.
        snapshot: What was observed.
    """
    old, batch = SFTJobStatus.model_validate(dict(before)), snapshot.batch
    conditions = joined(
        old.conditions, observed(snapshot), generation=snapshot.generation, now=snapshot.now, kinds=tuple(SFT_REASONS)
    )
    status = SFTJobStatus(
        observed_generation=snapshot.generation,
        conditions=conditions,
        shown=SFTShown(phase=phase(conditions)),
        result=old.result or next((pod.result for pod in snapshot.pods if pod.result is not None), None),
        started_at=old.started_at or (None if batch is None else batch.started),
        finished_at=None if batch is None or not batch.outcome else batch.finished,
        restarts=0 if batch is None else batch.failed,
        installation=old.installation,
    )
    return status.model_dump(by_alias=True, exclude_none=True)


def with_sft_failure(before: Mapping[str, Any], snapshot: SFTSnapshot, reason: str) -> dict[str, Any]:
    """The current status with a failed pass in condition Ready, and no other change.

    Args:
        before: The current status.
        snapshot: Its `problem` is the message.
        reason: Reason of condition Ready.
    """
    old = SFTJobStatus.model_validate(dict(before))
    quarantined = reason == QUARANTINED
    failed = [Observation(type=Type.READY, status=ConditionStatus.FALSE, reason=reason, message=snapshot.problem)]
    observations = left_alone(snapshot.problem) if quarantined else failed
    conditions = joined(
        old.conditions, observations, generation=snapshot.generation, now=snapshot.now, kinds=tuple(SFT_REASONS)
    )
    after = old.model_copy(
        update={
            "conditions": conditions,
            "shown": SFTShown(phase=phase(conditions)),
            "observed_generation": snapshot.generation if quarantined else old.observed_generation,
        }
    )
    return after.model_dump(by_alias=True, exclude_none=True)


def has_ended(status: Mapping[str, Any]) -> bool:
    """Whether a job has ended, which it never ceases to have."""
    return bool(end_of(status))


def end_of(status: Mapping[str, Any]) -> str:
    """The reason with which a job has ended; empty before."""
    conditions = [
        Condition.model_validate(item) for item in status.get("conditions", ()) if item["type"] == Type.SUCCEEDED
    ]
    ends = (item.reason for item in conditions if item.status == "True" or _is_failure(item))
    return next(ends, "")


def _is_failure(succeeded: Condition) -> bool:
    return succeeded.status == "False" and succeeded.reason != "Running"


def observed(snapshot: SFTSnapshot) -> Iterator[Observation]:
    """Everything observed in a pass."""
    yield _accepted(snapshot)
    is_over = snapshot.batch is not None and bool(snapshot.batch.outcome)
    yield _quota_reserved(snapshot, is_over=is_over)
    if snapshot.batch is not None or not snapshot.problem:
        yield _scheduled(snapshot, is_over=is_over)
        yield _succeeded(snapshot)
    ready = _ready(snapshot, is_over=is_over)
    yield ready
    if is_over:
        yield from distance(ready, "Failed" if ready.reason == "Finished" else "", _succeeded(snapshot).message)
    else:
        yield from distance(ready, "Rejected" if snapshot.problem else "", snapshot.problem)


def _accepted(snapshot: SFTSnapshot) -> Observation:
    if snapshot.problem:
        return _false(Type.ACCEPTED, "Invalid", snapshot.problem)
    pod = snapshot.newest
    if pod is not None:
        for item in pod.ended:
            if item.container == CONTAINER and item.code == EXIT_INPUT:
                return _false(Type.ACCEPTED, "Invalid", item.message or str(item))
            if item.container != CONTAINER and is_missing(item):
                return _false(Type.ACCEPTED, "Unresolvable", item.message or str(item))
        if "CreateContainerConfigError" in pod.unstartable:
            return _false(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {pod.unstartable}")
    return _true(Type.ACCEPTED, "Valid")


def _quota_reserved(snapshot: SFTSnapshot, *, is_over: bool) -> Observation:
    """What Kueue answers the job, or does with a Job that has a label of its own integration of Jobs."""
    batch, use = snapshot.batch, snapshot.use
    if batch is None or is_over:
        return _unobserved("the job has ended, and needs no quota" if is_over else "there is no Job yet")
    if use is not None and use.quota is not None:
        return answer(use, use.quota)
    later = f"the label now names {snapshot.queue!r}, which counts for a new SFTJob only"
    notice = f"; {later}" if snapshot.queue != batch.queue and not batch.unplaced else ""
    if batch.suspended:
        observation = _held(snapshot, batch)
        return replace(observation, message=f"{observation.message}{notice}")
    if not batch.queue:
        return _unobserved(f"the job names no queue{notice}")
    if not batch.resumed:
        return _unobserved(f"no queue controller holds its Job: does any serve queue {batch.queue}?{notice}")
    return _true(Type.QUOTA_RESERVED, "Admitted", f"by queue {batch.queue}{notice}")


def _held(snapshot: SFTSnapshot, batch: BatchJob) -> Observation:
    """The condition of a job whose Job is suspended by others, or by an operator that used Kueue."""
    kind = Type.QUOTA_RESERVED
    if any(pod.running for pod in snapshot.pods):
        return _false(kind, "Draining", "its Job is suspended")
    if batch.unplaced and not batch.queue:
        message = "its Job waits for quota, which needs kueue.enabled of the chart; set that, or resume the Job"
        return _false(kind, "Waiting", message)
    if not batch.queue:
        message = "its Job is suspended, though the job names no queue: Kueue may manage jobs without one"
        return _false(kind, "Waiting", message)
    command = f"kubectl get workloads -l {JOB_UID_LABEL}={batch.uid}"
    return _false(kind, "Waiting", f"queue {batch.queue}: `{command}` shows its answer")


def _is_held(snapshot: SFTSnapshot) -> bool:
    """Whether no pod is to run until the Job is resumed."""
    return snapshot.batch is not None and snapshot.batch.suspended and not any(pod.running for pod in snapshot.pods)


def _scheduled(snapshot: SFTSnapshot, *, is_over: bool) -> Observation:
    pod = snapshot.newest
    if is_over or _is_held(snapshot):
        return _false(Type.SCHEDULED, "Released")
    if pod is not None and pod.scheduled:
        return _true(Type.SCHEDULED, "PodsScheduled")
    if snapshot.unsatisfiable:
        return _false(Type.SCHEDULED, "Unsatisfiable", snapshot.unsatisfiable)
    if pod is None:
        return _false(Type.SCHEDULED, "Pending", snapshot.not_created or "the pod is not created yet")
    return _false(Type.SCHEDULED, "Pending", f"{pod.name}: {pod.unscheduled}" if pod.unscheduled else "")


def _succeeded(snapshot: SFTSnapshot) -> Observation:
    batch, result = snapshot.batch, next((pod.result for pod in snapshot.pods if pod.result is not None), None)
    if batch is None or not batch.outcome:
        return _false(Type.SUCCEEDED, "Running")
    if batch.outcome == "Complete":
        fallback = "the pod that reported the result's address is gone; summary.json in the job's storage has it"
        return _true(Type.SUCCEEDED, "Completed", fallback if result is None else result.uri)
    reason = "LearnerFailed" if batch.reason == "PodFailurePolicy" else "BackoffExceeded"
    return _false(Type.SUCCEEDED, reason, _failure(snapshot.newest) or batch.message)


def _ready(snapshot: SFTSnapshot, *, is_over: bool) -> Observation:
    pod = snapshot.newest
    if is_over:
        succeeded = snapshot.batch is not None and snapshot.batch.outcome == "Complete"
        return _true(Type.READY, "Completed") if succeeded else _false(Type.READY, "Finished")
    if pod is not None and pod.running:
        return _true(Type.READY, "Training", pod.name)
    if snapshot.problem:
        return _false(Type.READY, "NotReady", "not Accepted")
    if _is_held(snapshot):
        return _false(Type.READY, "NotReady", "it waits for quota")
    message = "no pod" if pod is None else pod.unstartable or _failure(pod) or "it starts"
    return _false(Type.READY, "NotReady", message if pod is None else f"{pod.name}: {message}")


def _failure(pod: SFTPod | None) -> str:
    """How the pod's containers failed; empty if none did."""
    return "" if pod is None else "; ".join(str(item) for item in pod.ended)


def _true(kind: Type, reason: str, message: str = "") -> Observation:
    return Observation(type=kind, status=ConditionStatus.TRUE, reason=reason, message=message)


def _unobserved(message: str) -> Observation:
    kind, status = Type.QUOTA_RESERVED, ConditionStatus.UNKNOWN
    return Observation(type=kind, status=status, reason=NOT_OBSERVED, message=message)


def _false(kind: Type, reason: str, message: str = "") -> Observation:
    return Observation(type=kind, status=ConditionStatus.FALSE, reason=reason, message=message)
