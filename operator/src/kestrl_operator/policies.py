"""What is to be done with a job, from what is seen of it. Pure: every rule of its life is here, and nowhere else.

A job that has ended stays ended: its `Succeeded` condition says so, as a Kubernetes Job's does. Everything else is decided anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kestrl.errors import Failure
from kestrl.plan.components import Role
from kestrl.plan.planning import group_seconds
from kestrl.spec.job import FailureRule, JobSpec
from kestrl_operator.conditions import Type
from kestrl_operator.observe import NOTHING, Ended, Memory, Pod, Snapshot, seconds_of

FIRST_WAIT, LONGEST_WAIT = 10.0, 300.0
"""Seconds before the learner is started again after a failure it told of; doubled each time."""
DRAIN_SECONDS = 180.0
"""A drain may take this and a group's deadline; then pods are ended with whatever is checkpointed."""
KUBERNETES_OWN = frozenset(
    {"Evicted", "Preempting", "NodeShutdown", "NodeAffinity", "Terminated", "UnexpectedAdmissionError"}
)
"""Ends of a pod that are none of its doing."""
BUILT_IN = (FailureRule(role="learner", reason="engine/logprob_gap", action="Fail"),)
"""After the user's own rules: training on rollouts of another policy than the one named is not a thing to try again."""


class Stage(StrEnum):
    """Where a job is."""

    REJECTED = "rejected"
    RUNNING = "running"
    DRAINING = "draining"
    """Suspended, and the learner still has something to put away."""
    RELEASING = "releasing"
    """Suspended, nothing left to put away, pods still going."""
    RELEASED = "released"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done."""

    stage: Stage
    parked: bool
    """Whether no pod is to run."""
    attempts: int = 0
    restarts: int = 0
    drain: bool = False
    """Tell the learner to finish its step, checkpoint and stop."""
    delete: bool = False
    """Its time to live is over."""
    remove: tuple[str, ...] = ()
    """Pods to delete: their program has ended well and is to run again."""
    ended: tuple[str, str] | None = None
    """Reason and message of the end, if it ends now."""
    retry: str = ""
    """What follows a failure, for a person."""
    memory: Memory = NOTHING
    look_again: float | None = None
    """Seconds until time alone may change the decision."""


def decide(seen: Snapshot) -> Decision:
    """The decision for a snapshot."""
    if seen.job is None:
        return Decision(stage=Stage.REJECTED, parked=False, attempts=seen.attempts, restarts=seen.restarts)
    if has_ended(seen):
        return _after_the_end(seen, seen.job.spec)
    end = _end(seen, seen.job.spec)
    if end is not None:
        return Decision(stage=Stage.ENDED, parked=True, attempts=seen.attempts, restarts=seen.restarts, ended=end)
    if seen.job.spec.suspend:
        return _suspended(seen, seen.job.spec)
    return _running(seen, seen.job.spec)


def has_ended(seen: Snapshot) -> bool:
    """Whether its end is written down."""
    status, reason = seen.condition(Type.SUCCEEDED)
    return status == "True" or (status == "False" and reason != "Running")


def _after_the_end(seen: Snapshot, spec: JobSpec) -> Decision:
    ended = seconds_of(seen.status.get("finishedAt"))
    left = None
    if spec.ttl_after_finished is not None and ended is not None:
        left = ended + spec.ttl_after_finished - seen.now
    return Decision(
        stage=Stage.ENDED,
        parked=True,
        attempts=seen.attempts,
        restarts=seen.restarts,
        delete=left is not None and left <= 0,
        look_again=left if left is not None and left > 0 else None,
    )


def _end(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """Reason and message of the job's end, if it ends now."""
    told = seen.speaking
    if told is not None and told.report.phase == "succeeded":
        return (
            "Completed",
            f"{told.report.step} steps; the adapter is {told.report.policy_uri}",
        )
    failed = _failed(seen, spec)
    if failed is not None:
        return failed
    for item, role in _endings(seen):
        if _rule(spec, role, item.reason).action == "Fail":
            return "LearnerFailed" if role is Role.LEARNER else "BackoffExceeded", f"{role}: {item}"
    if spec.suspend:
        return None
    began = seconds_of(seen.status.get("startedAt"))
    if spec.active_deadline is not None and began is not None and seen.now >= began + spec.active_deadline:
        return "DeadlineExceeded", f"activeDeadline ({spec.active_deadline:g} s) passed"
    waiting = stuck(seen)
    if spec.pending_deadline is not None and waiting and seen.now >= waiting[0].made + spec.pending_deadline:
        pod = waiting[0]
        why = pod.unstartable or pod.unscheduled or "it is not scheduled"
        return (
            "PendingTooLong",
            f"{pod.name} waits for longer than pendingDeadline ({spec.pending_deadline:g} s): {why}",
        )
    return None


def _failed(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """The end that a failure of the learner is, by its rule or because there were too many."""
    failure = told_failure(seen)
    if failure is None:
        return None
    rule = rule_for(spec, failure)
    if rule.action == "Fail":
        return "LearnerFailed", str(failure)
    if rule.action != "Ignore" and seen.attempts >= spec.failure_policy.backoff_limit:
        times = f"{seen.attempts + 1} times, failurePolicy.backoffLimit is {spec.failure_policy.backoff_limit}"
        return "BackoffExceeded", f"the learner failed {times}; the last time: {failure}"
    return None


def told_failure(seen: Snapshot) -> Failure | None:
    """What the learner of this very attempt failed of."""
    told = seen.speaking
    if told is None or told.report.phase != "failed":
        return None
    pod = next((pod for pod in seen.of(Role.LEARNER) if pod.uid == told.pod), None)
    return told.failure if pod is not None and pod.attempts == seen.attempts else None


def rule_for(spec: JobSpec, failure: Failure) -> FailureRule:
    """The first rule that fits a failure the learner told of."""
    return _rule(spec, Role.LEARNER, f"{failure.boundary}/{failure.code}")


def _rule(spec: JobSpec, role: Role, reason: str) -> FailureRule:
    default = FailureRule(action="RestartComponent")
    rules = (*spec.failure_policy.rules, *BUILT_IN)
    return next((rule for rule in rules if rule.role in {None, role.value} and _fits(rule.reason, reason)), default)


def _fits(pattern: str, reason: str) -> bool:
    return pattern in {"*", reason} or (pattern.endswith("/*") and reason.startswith(pattern[:-1]))


def _endings(seen: Snapshot) -> Iterator[tuple[Ended, Role]]:
    for pod in seen.pods:
        for item in pod.ended:
            if item.reason not in KUBERNETES_OWN and not pod.deleting and pod.job_restarts == seen.restarts:
                yield item, pod.role


def stuck(seen: Snapshot) -> list[Pod]:
    """Pods that wait for a node, or whose image or secret is not there; the longest first."""
    waiting = [
        pod
        for pod in seen.pods
        if not pod.deleting and not pod.gated and (pod.unstartable or (not pod.scheduled and pod.phase == "Pending"))
    ]
    return sorted(waiting, key=lambda pod: (pod.made, pod.name))


def _suspended(seen: Snapshot, spec: JobSpec) -> Decision:
    """Drain, checkpoint, confirm, and only then let go of the pods."""
    standing = Decision(stage=Stage.RELEASING, parked=True, attempts=seen.attempts, restarts=seen.restarts)
    if not seen.pods:
        return replace(standing, stage=Stage.RELEASED)
    if not _has_something_to_put_away(seen):
        return standing
    began = seen.now if seen.memory.draining is None else seen.memory.draining
    left = began + DRAIN_SECONDS + group_seconds(spec) - seen.now
    if left <= 0:
        return standing
    memory = Memory(draining=began, failed=seen.memory.failed)
    return replace(standing, stage=Stage.DRAINING, parked=False, drain=True, memory=memory, look_again=left)


def _has_something_to_put_away(seen: Snapshot) -> bool:
    if seen.learner is not None and seen.learner.replicas == 0:
        return False  # it was let go before: pods that are still there are on their way out
    told = seen.speaking
    return told is not None and told.report.phase not in {"starting", "suspended", "failed", "succeeded"}


def _running(seen: Snapshot, spec: JobSpec) -> Decision:
    deadline = _until_a_deadline(seen, spec)
    failure = told_failure(seen)
    if failure is None or rule_for(spec, failure).action == "Ignore":
        return _restarted_pods(seen, spec, deadline)
    whole = rule_for(spec, failure).action == "RestartJob"
    began = seen.now if seen.memory.failed is None else seen.memory.failed
    wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0**seen.attempts)
    left = began + wait - seen.now
    what = "the whole job" if whole else "the learner"
    limit = spec.failure_policy.backoff_limit
    if left > 0:
        retry = f"{what} is started again in {left:.0f} s, for time {seen.attempts + 1} of {limit}"
        return Decision(
            stage=Stage.RUNNING,
            parked=False,
            attempts=seen.attempts,
            restarts=seen.restarts,
            retry=retry,
            memory=Memory(failed=began),
            look_again=_earliest(left, deadline),
        )
    return Decision(
        stage=Stage.RUNNING,
        parked=False,
        attempts=seen.attempts + 1,
        restarts=seen.restarts + int(whole),
        retry=f"{what} is started again, for time {seen.attempts + 1} of {limit}",
        look_again=deadline,
    )


def _restarted_pods(seen: Snapshot, spec: JobSpec, deadline: float | None) -> Decision:
    """Running; where a rule wants the whole job started again because a container ended, it is."""
    whole = any(_rule(spec, role, item.reason).action == "RestartJob" for item, role in _endings(seen))
    again = int(whole and seen.attempts < spec.failure_policy.backoff_limit)
    return Decision(
        stage=Stage.RUNNING,
        parked=False,
        attempts=seen.attempts + again,
        restarts=seen.restarts + again,
        remove=_resumed(seen),
        look_again=deadline,
    )


def _resumed(seen: Snapshot) -> tuple[str, ...]:
    """The learner's pod, if it drained for a suspension that was taken back before the pod was let go."""
    told = seen.speaking
    if told is None or told.report.phase != "suspended":
        return ()
    return tuple(pod.name for pod in seen.of(Role.LEARNER) if pod.uid == told.pod)


def _until_a_deadline(seen: Snapshot, spec: JobSpec) -> float | None:
    began = seconds_of(seen.status.get("startedAt"))
    active = (
        None if spec.active_deadline is None or began is None else max(0.0, began + spec.active_deadline - seen.now)
    )
    waiting = stuck(seen)
    pending = (
        None
        if spec.pending_deadline is None or not waiting
        else max(0.0, waiting[0].made + spec.pending_deadline - seen.now)
    )
    return _earliest(active, pending)


def _earliest(*times: float | None) -> float | None:
    return min((time for time in times if time is not None), default=None)
