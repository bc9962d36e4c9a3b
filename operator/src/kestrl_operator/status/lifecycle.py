"""The decision about a job, from its snapshot. Pure: every rule of a job's lifecycle is here or in `failures`.

A job that has ended stays ended, as recorded in its `Succeeded` condition, like a Kubernetes Job. Everything else is
decided anew in each pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.planning import group_seconds
from kestrl._shared.spec.job import JobSpec
from kestrl.runstate.states import RunPhase
from kestrl_operator.state.snapshot import NOTHING, Memory, Snapshot, seconds_of
from kestrl_operator.status.conditions import CHECKING, ConditionStatus, Type
from kestrl_operator.status.failures import (
    backoff,
    end_by_failure,
    is_stable,
    job_restart_causes,
    reported_failure,
    rule_for,
)
from kestrl_operator.status.waiting import refused_since, rest_of, seconds_to_rest, stuck, waits_for

CONTACT_SECONDS = 60.0
"""Seconds in which a learner that has become ready answers for the first time; before, a refused connection is part of
its start."""


class Stage(StrEnum):
    """The stage of a job's lifecycle."""

    REJECTED = "rejected"
    RUNNING = "running"
    DRAINING = "draining"
    """Suspended, and the learner still has state to save."""
    RELEASING = "releasing"
    """Suspended with all state saved, while pods terminate."""
    RELEASED = "released"
    PARKED = "parked"
    """Without pods for a while, since it held some and could not start."""
    QUEUED = "queued"
    """Without pods until its queue admits it."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the next pass does with a job."""

    stage: Stage
    parked: bool
    """Whether no pod is to run."""
    attempts: int = 0
    restarts: int = 0
    forgiven: int = 0
    """Attempts that no longer count against `backoffLimit`."""
    drain: bool = False
    """Whether the learner is asked to finish its step, checkpoint and stop."""
    delete: bool = False
    """Whether the job object is deleted because `ttlAfterFinished` has passed."""
    remove: tuple[tuple[str, str], ...] = ()
    """Pods to delete, by name and uid: their program has exited normally and is to run again."""
    ended: tuple[str, str] | None = None
    """Reason and message of the end, if it ends now."""
    retry: str = ""
    """What follows a failure, for the condition's message."""
    memory: Memory = NOTHING
    requeue_after: float | None = None
    """Seconds after which another pass is due without an event."""


def decide(snapshot: Snapshot) -> Decision:
    """The decision for a snapshot."""
    if has_ended(snapshot):
        return _after_the_end(snapshot, None if snapshot.job is None else snapshot.job.spec)
    if snapshot.job is None:
        return _unchanged(snapshot, Stage.REJECTED)
    end = _end(snapshot, snapshot.job.spec)
    if end is not None:
        return replace(_unchanged(snapshot, Stage.ENDED, parked=True), ended=end)
    if snapshot.job.spec.suspend:
        return _suspended(snapshot, snapshot.job.spec)
    if snapshot.awaits_quota:
        return _queued(snapshot, snapshot.job.spec)
    return _parked(snapshot, snapshot.job.spec) or _running(snapshot, snapshot.job.spec)


def _parked(snapshot: Snapshot, spec: JobSpec) -> Decision | None:
    """The decision for a job that rests; None if it does not."""
    rest = rest_of(snapshot)
    if rest is None or rest.until <= snapshot.now:
        return None
    seconds_left = _earliest(rest.until - snapshot.now, _until_a_deadline(snapshot, spec))
    return replace(
        _unchanged(snapshot, Stage.PARKED, parked=True), memory=Memory(rest=rest), requeue_after=seconds_left
    )


def _unchanged(snapshot: Snapshot, stage: Stage, *, parked: bool = False) -> Decision:
    """A decision that restarts nothing."""
    return Decision(
        stage=stage, parked=parked, attempts=snapshot.attempts, restarts=snapshot.restarts, forgiven=snapshot.forgiven
    )


def has_ended(snapshot: Snapshot) -> bool:
    """Whether the end of the job is recorded in its status."""
    status, reason = snapshot.condition(Type.SUCCEEDED)
    return status == "True" or (status == "False" and reason != "Running")


def running_since(snapshot: Snapshot) -> float | None:
    """When it last began to run; None while it is suspended or its queue has not admitted it, since the deadline of a
    suspended job does not run, like a Kubernetes Job's.
    """
    status, reason = snapshot.condition(Type.QUOTA_RESERVED)
    queued = snapshot.quota is not None and (status == ConditionStatus.FALSE or reason == CHECKING)
    if queued or snapshot.condition(Type.SUSPENDED)[0] == ConditionStatus.TRUE:
        return None
    return seconds_of(snapshot.status.get("startedAt"))


def _after_the_end(snapshot: Snapshot, spec: JobSpec | None) -> Decision:
    finished_at = seconds_of(snapshot.status.get("finishedAt"))
    seconds_left = None
    if spec is not None and spec.ttl_after_finished is not None and finished_at is not None:
        seconds_left = finished_at + spec.ttl_after_finished - snapshot.now
    return replace(
        _unchanged(snapshot, Stage.ENDED, parked=True),
        delete=seconds_left is not None and seconds_left <= 0,
        requeue_after=seconds_left if seconds_left is not None and seconds_left > 0 else None,
    )


def _end(snapshot: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """Reason and message of the job's end, if it ends now."""
    live = snapshot.live_report
    # First: what fails while the components of a run that has succeeded go away is no failure of the job.
    if live is not None and live.phase is RunPhase.SUCCEEDED:
        return (
            "Completed",
            f"{live.state.steps.done} steps; the adapter is {live.state.policy.uri}",
        )
    failed = end_by_failure(snapshot, spec)
    if failed is not None or spec.suspend:
        return failed  # the deadlines of a suspended job do not run
    return _past_a_deadline(snapshot, spec)


def _past_a_deadline(snapshot: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    since, waiting = running_since(snapshot), pending(snapshot)
    if spec.active_deadline is not None and since is not None and snapshot.now >= since + spec.active_deadline:
        return "DeadlineExceeded", f"activeDeadline ({spec.active_deadline:g} s) passed"
    if spec.pending_deadline is not None and waiting is not None and snapshot.now >= waiting[0] + spec.pending_deadline:
        return "PendingTooLong", f"for longer than pendingDeadline ({spec.pending_deadline:g} s): {waiting[1]}"
    return None


def pending(snapshot: Snapshot) -> tuple[float, str] | None:
    """Since when the job waits for a pod that cannot start or has not been created, and why; None if it waits for
    none. A time without pods counts, and what was before it.
    """
    if waits_for_admission(snapshot):
        return None
    # A pod's time in its queue is not the cluster's: what counts begins with the admission.
    admitted = 0.0 if snapshot.queue is None else running_since(snapshot) or snapshot.now
    waiting = [(max(pod.made, admitted), f"{pod.name}: {waits_for(pod)}") for pod in stuck(snapshot)[:1]]
    if snapshot.not_created is not None:
        waiting.append(snapshot.not_created)
    rest = snapshot.memory.rest
    if rest is not None and (waiting or snapshot.now < rest.until):
        waiting.append((rest.since, rest.why))
    return min(waiting, default=None)


def waits_for_admission(snapshot: Snapshot) -> bool:
    """Whether a queue has not admitted the job yet. No deadline of the job runs during that wait."""
    if snapshot.quota is not None:
        return snapshot.awaits_quota
    if snapshot.queue is None or snapshot.not_created is not None:
        return False  # pods that cannot be created are not waiting for a queue
    return not snapshot.present or any(pod.gated for pod in snapshot.staying)


def short_of_pods_since(snapshot: Snapshot) -> float | None:
    """Since when pods cannot start or have not been created, which a missing object that is not watched may cause; None
    if all have started.
    """
    since = [pod.made for pod in stuck(snapshot) if pod.scheduled]
    if snapshot.not_created is not None:
        since.append(snapshot.not_created[0])
    return min(since, default=None)


def _suspended(snapshot: Snapshot, spec: JobSpec) -> Decision:
    """The decision for a suspended job: drain, checkpoint, confirm, and only then delete the pods. After the learner's
    grace and the deadline of a group, pods are deleted with the last checkpoint.
    """
    standing = _unchanged(snapshot, Stage.RELEASING, parked=True)
    if not snapshot.present:
        return replace(standing, stage=Stage.RELEASED)
    if not _must_drain(snapshot):
        return standing
    since = snapshot.now if snapshot.memory.draining is None else snapshot.memory.draining
    seconds_left = since + spec.learner.termination_grace + group_seconds(spec) - snapshot.now
    if seconds_left <= 0:
        return standing
    # The beginning is remembered for as long as it drains: another pass must not begin the time anew.
    memory = Memory(draining=since, failed=snapshot.memory.failed)
    return replace(standing, stage=Stage.DRAINING, parked=False, drain=True, memory=memory, requeue_after=seconds_left)


def _queued(snapshot: Snapshot, spec: JobSpec) -> Decision:
    """The decision for a job without quota: what still runs ends as that of a suspended one does."""
    ending = _suspended(snapshot, spec)
    return replace(ending, stage=Stage.QUEUED) if ending.stage is Stage.RELEASED else ending


def _must_drain(snapshot: Snapshot) -> bool:
    if snapshot.learner is not None and snapshot.learner.replicas == 0:
        return False  # it was scaled down before: the remaining pods are terminating
    live = snapshot.live_report
    # A learner that starts has done nothing since the checkpoint that it starts from.
    return live is not None and live.phase is not RunPhase.STARTING and not live.over


def _running(snapshot: Snapshot, spec: JobSpec) -> Decision:
    deadline = _until_a_deadline(snapshot, spec)
    failure = reported_failure(snapshot)
    if failure is None:
        return _restarted_pods(snapshot, spec, deadline)
    standing = _unchanged(snapshot, Stage.RUNNING)
    action = rule_for(spec, failure).action
    target = "the whole job" if action == "RestartJob" else "the learner"
    nth = f", for time {snapshot.counted + 1} of {spec.failure_policy.backoff_limit}"
    if action == "Ignore":
        nth = "; this failure does not count"
    since = snapshot.now if snapshot.memory.failed is None else snapshot.memory.failed
    seconds_left = since + backoff(snapshot.counted) - snapshot.now
    if seconds_left > 0:
        retry = f"{target} is restarted in {seconds_left:.0f} s{nth}"
        memory = Memory(failed=since, rest=rest_of(snapshot))
        return replace(standing, retry=retry, memory=memory, requeue_after=_earliest(seconds_left, deadline))
    restarting = replace(standing, retry=f"{target} is restarted{nth}", requeue_after=deadline)
    restarting = replace(restarting, memory=Memory(rest=rest_of(snapshot)))
    if action == "Ignore":
        # Deleted, and not rolled by a new number of attempts, which would count.
        return replace(restarting, remove=_reporting_pod(snapshot))
    return replace(restarting, attempts=snapshot.attempts + 1, restarts=snapshot.restarts + int(action == "RestartJob"))


def _restarted_pods(snapshot: Snapshot, spec: JobSpec, deadline: float | None) -> Decision:
    """The decision for a running job without a learner failure: the whole job is restarted if a rule asks for that
    after a container failure.
    """
    one_more = int(any(job_restart_causes(snapshot, spec)))
    return replace(
        _unchanged(snapshot, Stage.RUNNING),
        attempts=snapshot.attempts + one_more,
        restarts=snapshot.restarts + one_more,
        forgiven=snapshot.attempts if is_stable(snapshot) else snapshot.forgiven,
        remove=_resumed(snapshot),
        memory=Memory(rest=rest_of(snapshot), refused=refused_since(snapshot)),
        requeue_after=deadline,
    )


def _resumed(snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
    """The learner's pod, if it drained for a suspension that was revoked before the pod was deleted."""
    live = snapshot.live_report
    return _reporting_pod(snapshot) if live is not None and live.phase is RunPhase.SUSPENDED else ()


def _reporting_pod(snapshot: Snapshot) -> tuple[tuple[str, str], ...]:
    live = snapshot.live_report
    return tuple((pod.name, pod.uid) for pod in snapshot.of(Role.LEARNER) if live is not None and pod.uid == live.pod)


def contact_ends(snapshot: Snapshot) -> float | None:
    """Until when a learner that is ready and has never answered is considered to start; None if there is none."""
    last = snapshot.last_report
    fresh = [pod for pod in snapshot.of(Role.LEARNER) if pod.ready and (last is None or last.pod != pod.uid)]
    return max((pod.ready_since + CONTACT_SECONDS for pod in fresh), default=None)


def is_silent(snapshot: Snapshot) -> bool:
    """Whether a learner that should answer does not."""
    until = contact_ends(snapshot)
    ready = any(pod.ready for pod in snapshot.of(Role.LEARNER))
    return ready and (until is None or snapshot.now >= until)


def _until_a_deadline(snapshot: Snapshot, spec: JobSpec) -> float | None:
    since, waiting = running_since(snapshot), pending(snapshot)
    active = (
        None if spec.active_deadline is None or since is None else max(0.0, since + spec.active_deadline - snapshot.now)
    )
    stands = (
        None
        if spec.pending_deadline is None or waiting is None
        else max(0.0, waiting[0] + spec.pending_deadline - snapshot.now)
    )
    contact = contact_ends(snapshot)
    answers = contact - snapshot.now if contact is not None and contact > snapshot.now else None
    return _earliest(active, stands, answers, seconds_to_rest(snapshot))


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
