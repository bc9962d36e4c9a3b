"""The decision about a job, from its snapshot. Pure: every rule of a job's lifecycle is in this module.

A job that has ended stays ended, as recorded in its `Succeeded` condition, like a Kubernetes Job. Everything else is
decided anew in each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kestrl.errors import Failure
from kestrl.plan.components import Role
from kestrl.plan.planning import group_seconds
from kestrl.spec.job import FailureRule, JobSpec
from kestrl_operator.conditions import ConditionStatus, Type
from kestrl_operator.snapshot import NOTHING, Ended, Memory, Pod, Snapshot, seconds_of

FIRST_WAIT, LONGEST_WAIT = 10.0, 300.0
"""First and longest wait in seconds before the learner is restarted after a failure that it reported; doubled each
time."""
STABLE_STEPS = 10
"""Steps since a start of the learner after which the earlier restarts no longer count against `backoffLimit`."""
DRAIN_SECONDS = 180.0
"""Seconds that a drain may take, beside the deadline of a group; after that, pods are deleted with the last
checkpoint."""
CAUSED_BY_KUBERNETES = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of container ends that the container did not cause: the kubelet lost it, or its node restarted."""
BUILT_IN = (
    # Training on rollouts of another policy than the recorded one is a defect that a retry does not fix.
    FailureRule(role="learner", reason="engine/logprob_gap", action="Fail"),
    # The learner has retried for minutes, and the job is not at fault: it is restarted without a limit.
    FailureRule(role="learner", reason="infrastructure/storage_unavailable", action="Ignore"),
)
"""Rules that apply after the user's own."""


class Stage(StrEnum):
    """The stage of a job's lifecycle."""

    REJECTED = "rejected"
    RUNNING = "running"
    DRAINING = "draining"
    """Suspended, and the learner still has state to save."""
    RELEASING = "releasing"
    """Suspended with all state saved, while pods terminate."""
    RELEASED = "released"
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


def decide(seen: Snapshot) -> Decision:
    """The decision for a snapshot."""
    if has_ended(seen):
        return _after_the_end(seen, None if seen.job is None else seen.job.spec)
    if seen.job is None:
        return _standing(seen, Stage.REJECTED)
    end = _end(seen, seen.job.spec)
    if end is not None:
        return replace(_standing(seen, Stage.ENDED, parked=True), ended=end)
    if seen.job.spec.suspend:
        return _suspended(seen, seen.job.spec)
    return _running(seen, seen.job.spec)


def _standing(seen: Snapshot, stage: Stage, *, parked: bool = False) -> Decision:
    """A decision that restarts nothing."""
    return Decision(stage=stage, parked=parked, attempts=seen.attempts, restarts=seen.restarts, forgiven=seen.forgiven)


def has_ended(seen: Snapshot) -> bool:
    """Whether the end of the job is recorded in its status."""
    status, reason = seen.condition(Type.SUCCEEDED)
    return status == "True" or (status == "False" and reason != "Running")


def began(seen: Snapshot) -> float | None:
    """When it last began to run; None while it is suspended, since the deadline of a suspended job does not run, like a
    Kubernetes Job's.
    """
    if seen.condition(Type.SUSPENDED)[0] == ConditionStatus.TRUE:
        return None
    return seconds_of(seen.status.get("startedAt"))


def _after_the_end(seen: Snapshot, spec: JobSpec | None) -> Decision:
    ended = seconds_of(seen.status.get("finishedAt"))
    left = None
    if spec is not None and spec.ttl_after_finished is not None and ended is not None:
        left = ended + spec.ttl_after_finished - seen.now
    return replace(
        _standing(seen, Stage.ENDED, parked=True),
        delete=left is not None and left <= 0,
        requeue_after=left if left is not None and left > 0 else None,
    )


def _end(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """Reason and message of the job's end, if it ends now."""
    live = seen.live_report
    if live is not None and live.report.phase == "succeeded":
        return (
            "Completed",
            f"{live.report.step} steps; the adapter is {live.report.policy_uri}",
        )
    failed = _failed(seen, spec)
    if failed is not None:
        return failed
    for item, role in _container_failures(seen):
        if _rule(spec, role, item.reason).action == "Fail":
            return "LearnerFailed" if role is Role.LEARNER else "BackoffExceeded", f"{role}: {item}"
    if spec.suspend:
        return None
    if seen.counted >= spec.failure_policy.backoff_limit:
        for item in _job_restart_causes(seen, spec):
            return "BackoffExceeded", f"{_too_often(seen, spec, 'a component failed')}: {item}"
    return _past_a_deadline(seen, spec)


def _past_a_deadline(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    since, waiting = began(seen), pending(seen)
    if spec.active_deadline is not None and since is not None and seen.now >= since + spec.active_deadline:
        return "DeadlineExceeded", f"activeDeadline ({spec.active_deadline:g} s) passed"
    if spec.pending_deadline is not None and waiting is not None and seen.now >= waiting[0] + spec.pending_deadline:
        return "PendingTooLong", f"for longer than pendingDeadline ({spec.pending_deadline:g} s): {waiting[1]}"
    return None


def pending(seen: Snapshot) -> tuple[float, str] | None:
    """Since when the job waits for a pod that cannot start or has not been created, and why; None if it waits for
    none.
    """
    if held(seen):
        return None
    admitted = 0.0 if seen.queue is None else began(seen) or seen.now
    waiting = [(max(pod.made, admitted), f"{pod.name}: {_waits_for(pod)}") for pod in stuck(seen)[:1]]
    if seen.unmade is not None:
        waiting.append(seen.unmade)
    return min(waiting, default=None)


def _waits_for(pod: Pod) -> str:
    """The reason why a pod has not started."""
    if pod.unstartable or pod.unscheduled or pod.ended:
        return pod.unstartable or pod.unscheduled or str(pod.ended[0])
    return "its containers are not created; see its events" if pod.scheduled else "it is not scheduled"


def held(seen: Snapshot) -> bool:
    """Whether a queue has not admitted the job yet. No deadline of the job runs during that wait."""
    if seen.queue is None or seen.unmade is not None:
        return False  # pods that cannot be created are not waiting for a queue
    return not seen.present or any(pod.gated for pod in seen.staying)


def short_of_pods_since(seen: Snapshot) -> float | None:
    """Since when pods cannot start or have not been created, which a missing object that is not watched may cause; None
    if all have started.
    """
    since = [pod.made for pod in stuck(seen) if pod.scheduled]
    if seen.unmade is not None:
        since.append(seen.unmade[0])
    return min(since, default=None)


def _too_often(seen: Snapshot, spec: JobSpec, what: str) -> str:
    limit = spec.failure_policy.backoff_limit
    since = f" since {STABLE_STEPS} successful steps in a row" if seen.forgiven else ""
    return f"{what} {seen.counted + 1} times{since}, failurePolicy.backoffLimit is {limit}; the last time"


def _failed(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """Reason and message of the end that a learner failure causes, by its rule or because the limit is reached; None if
    it causes none.
    """
    failure = reported_failure(seen)
    if failure is None:
        return None
    rule = rule_for(spec, failure)
    if rule.action == "Fail":
        return "LearnerFailed", str(failure)
    if rule.action != "Ignore" and seen.counted >= spec.failure_policy.backoff_limit:
        return "BackoffExceeded", f"{_too_often(seen, spec, 'the learner failed')}: {failure}"
    return None


def reported_failure(seen: Snapshot) -> Failure | None:
    """The failure that the learner of this attempt reported, if any."""
    live = seen.live_report
    if live is None:
        return None
    pod = next((pod for pod in seen.of(Role.LEARNER) if pod.uid == live.pod), None)
    return live.failure if pod is not None and pod.attempts == seen.attempts else None


def rule_for(spec: JobSpec, failure: Failure) -> FailureRule:
    """The first rule that matches a failure reported by the learner."""
    return _rule(spec, Role.LEARNER, f"{failure.boundary}/{failure.code}")


def _rule(spec: JobSpec, role: Role, reason: str) -> FailureRule:
    default = FailureRule(action="RestartComponent")
    rules = (*spec.failure_policy.rules, *BUILT_IN)
    return next((rule for rule in rules if rule.role in {None, role.value} and _fits(rule.reason, reason)), default)


def _fits(pattern: str, reason: str) -> bool:
    return pattern in {"*", reason} or (pattern.endswith("/*") and reason.startswith(pattern[:-1]))


def _container_failures(seen: Snapshot) -> Iterator[tuple[Ended, Role]]:
    for pod in seen.staying:
        for item in pod.ended:
            if item.reason not in CAUSED_BY_KUBERNETES and pod.job_restarts == seen.restarts:
                yield item, pod.role


def _job_restart_causes(seen: Snapshot, spec: JobSpec) -> Iterator[str]:
    """Container failures for which a rule restarts the whole job."""
    for item, role in _container_failures(seen):
        if _rule(spec, role, item.reason).action == "RestartJob":
            yield f"{role}: {item}"


def stuck(seen: Snapshot) -> list[Pod]:
    """Pods that have not started and wait for a node, an image, a volume or a secret, or whose preparation fails; the
    longest waiting first.

    A pod that a queue holds back waits for none of these.
    """
    waiting = [
        pod
        for pod in seen.staying
        if pod.phase == "Pending" and not pod.gated and (pod.unstartable or pod.ended or not pod.begun)
    ]
    return sorted(waiting, key=lambda pod: (pod.made, pod.name))


def _suspended(seen: Snapshot, spec: JobSpec) -> Decision:
    """The decision for a suspended job: drain, checkpoint, confirm, and only then delete the pods."""
    standing = _standing(seen, Stage.RELEASING, parked=True)
    if not seen.present:
        return replace(standing, stage=Stage.RELEASED)
    if not _must_drain(seen):
        return standing
    since = seen.now if seen.memory.draining is None else seen.memory.draining
    left = since + DRAIN_SECONDS + group_seconds(spec) - seen.now
    if left <= 0:
        return standing
    memory = Memory(draining=since, failed=seen.memory.failed)
    return replace(standing, stage=Stage.DRAINING, parked=False, drain=True, memory=memory, requeue_after=left)


def _must_drain(seen: Snapshot) -> bool:
    if seen.learner is not None and seen.learner.replicas == 0:
        return False  # it was scaled down before: the remaining pods are terminating
    live = seen.live_report
    return live is not None and live.report.phase not in {"starting", "suspended", "failed", "succeeded"}


def _running(seen: Snapshot, spec: JobSpec) -> Decision:
    deadline = _until_a_deadline(seen, spec)
    failure = reported_failure(seen)
    if failure is None:
        return _restarted_pods(seen, spec, deadline)
    standing = _standing(seen, Stage.RUNNING)
    action = rule_for(spec, failure).action
    what = "the whole job" if action == "RestartJob" else "the learner"
    nth = f", for time {seen.counted + 1} of {spec.failure_policy.backoff_limit}"
    if action == "Ignore":
        nth = "; this failure does not count"
    since = seen.now if seen.memory.failed is None else seen.memory.failed
    left = since + backoff(seen.counted) - seen.now
    if left > 0:
        retry = f"{what} is restarted in {left:.0f} s{nth}"
        return replace(standing, retry=retry, memory=Memory(failed=since), requeue_after=_earliest(left, deadline))
    again = replace(standing, retry=f"{what} is restarted{nth}", requeue_after=deadline)
    if action == "Ignore":
        return replace(again, remove=_reporting_pod(seen))
    return replace(again, attempts=seen.attempts + 1, restarts=seen.restarts + int(action == "RestartJob"))


def backoff(counted: int) -> float:
    """Seconds between a failure that the learner reported and its restart, after `counted` failures that count."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(counted, 16))


def _restarted_pods(seen: Snapshot, spec: JobSpec, deadline: float | None) -> Decision:
    """The decision for a running job without a learner failure: the whole job is restarted if a rule asks for that
    after a container failure.
    """
    again = int(any(_job_restart_causes(seen, spec)))
    return replace(
        _standing(seen, Stage.RUNNING),
        attempts=seen.attempts + again,
        restarts=seen.restarts + again,
        forgiven=seen.attempts if _is_stable(seen) else seen.forgiven,
        remove=_resumed(seen),
        requeue_after=deadline,
    )


def _is_stable(seen: Snapshot) -> bool:
    """Whether the learner has done enough steps since its last start for earlier restarts to no longer count."""
    live = seen.live_report
    pod = None if live is None else next((pod for pod in seen.of(Role.LEARNER) if pod.uid == live.pod), None)
    return live is not None and live.gained >= STABLE_STEPS and pod is not None and pod.attempts == seen.attempts


def _resumed(seen: Snapshot) -> tuple[tuple[str, str], ...]:
    """The learner's pod, if it drained for a suspension that was revoked before the pod was deleted."""
    live = seen.live_report
    return _reporting_pod(seen) if live is not None and live.report.phase == "suspended" else ()


def _reporting_pod(seen: Snapshot) -> tuple[tuple[str, str], ...]:
    live = seen.live_report
    return tuple((pod.name, pod.uid) for pod in seen.of(Role.LEARNER) if live is not None and pod.uid == live.pod)


def _until_a_deadline(seen: Snapshot, spec: JobSpec) -> float | None:
    since, waiting = began(seen), pending(seen)
    active = (
        None if spec.active_deadline is None or since is None else max(0.0, since + spec.active_deadline - seen.now)
    )
    stands = (
        None
        if spec.pending_deadline is None or waiting is None
        else max(0.0, waiting[0] + spec.pending_deadline - seen.now)
    )
    return _earliest(active, stands)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
