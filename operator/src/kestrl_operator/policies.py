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
from kestrl_operator.conditions import Truth, Type
from kestrl_operator.observe import NOTHING, Ended, Memory, Pod, Snapshot, seconds_of

FIRST_WAIT, LONGEST_WAIT = 10.0, 300.0
"""Seconds before the learner is started again after a failure it told of; doubled each time."""
GOOD_STEPS = 10
"""Steps of one start of the learner after which the restarts before it count no more against `backoffLimit`."""
DRAIN_SECONDS = 180.0
"""A drain may take this and a group's deadline; then pods are ended with whatever is checkpointed."""
KUBERNETES_OWN = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Ends of a container that are none of its doing: kubelet lost it, or its node started anew."""
BUILT_IN = (
    # Training on rollouts of another policy than the one named is not a thing to try again.
    FailureRule(role="learner", reason="engine/logprob_gap", action="Fail"),
    # The learner has retried for minutes, and the fault is not the job's: started again as often as it takes.
    FailureRule(role="learner", reason="infrastructure/storage_unavailable", action="Ignore"),
)
"""Rules that apply after the user's own."""


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
    forgiven: int = 0
    """Attempts that count no more against `backoffLimit`."""
    drain: bool = False
    """Tell the learner to finish its step, checkpoint and stop."""
    delete: bool = False
    """Its time to live is over."""
    remove: tuple[tuple[str, str], ...] = ()
    """Pods to delete, by name and uid: their program has ended well and is to run again."""
    ended: tuple[str, str] | None = None
    """Reason and message of the end, if it ends now."""
    retry: str = ""
    """What follows a failure, for a person."""
    memory: Memory = NOTHING
    look_again: float | None = None
    """Seconds until time alone may change the decision."""


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
    """The decision that restarts nothing."""
    return Decision(stage=stage, parked=parked, attempts=seen.attempts, restarts=seen.restarts, forgiven=seen.forgiven)


def has_ended(seen: Snapshot) -> bool:
    """Whether its end is written down."""
    status, reason = seen.condition(Type.SUCCEEDED)
    return status == "True" or (status == "False" and reason != "Running")


def began(seen: Snapshot) -> float | None:
    """When it last began to run: a suspended job's deadline does not run on, as a Kubernetes Job's does not."""
    if seen.condition(Type.SUSPENDED)[0] == Truth.TRUE:
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
    if seen.counted >= spec.failure_policy.backoff_limit:
        for item in _endings_of_the_whole(seen, spec):
            return "BackoffExceeded", f"{_too_often(seen, spec, 'a part of the job failed')}: {item}"
    return _past_a_deadline(seen, spec)


def _past_a_deadline(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    since, waiting = began(seen), pending(seen)
    if spec.active_deadline is not None and since is not None and seen.now >= since + spec.active_deadline:
        return "DeadlineExceeded", f"activeDeadline ({spec.active_deadline:g} s) passed"
    if spec.pending_deadline is not None and waiting is not None and seen.now >= waiting[0] + spec.pending_deadline:
        return "PendingTooLong", f"for longer than pendingDeadline ({spec.pending_deadline:g} s): {waiting[1]}"
    return None


def pending(seen: Snapshot) -> tuple[float, str] | None:
    """Since when the job waits for a pod that cannot start or is not even made, and why; None if it waits for none."""
    if held(seen):
        return None
    admitted = 0.0 if seen.queue is None else began(seen) or seen.now
    waiting = [(max(pod.made, admitted), f"{pod.name}: {_what_for(pod)}") for pod in stuck(seen)[:1]]
    if seen.unmade is not None:
        waiting.append(seen.unmade)
    return min(waiting, default=None)


def _what_for(pod: Pod) -> str:
    """What a pod that has not started waits for."""
    if pod.unstartable or pod.unscheduled or pod.ended:
        return pod.unstartable or pod.unscheduled or str(pod.ended[0])
    return "its containers are not made; its events say why" if pod.scheduled else "it is not scheduled"


def held(seen: Snapshot) -> bool:
    """Whether a queue has not admitted the job yet: that wait is the queue's, and no deadline of the job's runs."""
    if seen.queue is None or seen.unmade is not None:
        return False  # pods that are refused wait for no queue
    return not seen.present or any(pod.gated for pod in seen.staying)


def lacking(seen: Snapshot) -> float | None:
    """Since when pods cannot start or are not even made, so that an object of ours that is not watched may be missing; None if none is."""
    since = [pod.made for pod in stuck(seen) if pod.scheduled]
    if seen.unmade is not None:
        since.append(seen.unmade[0])
    return min(since, default=None)


def _too_often(seen: Snapshot, spec: JobSpec, what: str) -> str:
    limit = spec.failure_policy.backoff_limit
    since = f" since {GOOD_STEPS} steps in a row went well" if seen.forgiven else ""
    return f"{what} {seen.counted + 1} times{since}, failurePolicy.backoffLimit is {limit}; the last time"


def _failed(seen: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """The end that a failure of the learner is, by its rule or because there were too many."""
    failure = told_failure(seen)
    if failure is None:
        return None
    rule = rule_for(spec, failure)
    if rule.action == "Fail":
        return "LearnerFailed", str(failure)
    if rule.action != "Ignore" and seen.counted >= spec.failure_policy.backoff_limit:
        return "BackoffExceeded", f"{_too_often(seen, spec, 'the learner failed')}: {failure}"
    return None


def told_failure(seen: Snapshot) -> Failure | None:
    """What the learner of this very attempt failed of."""
    told = seen.speaking
    if told is None:
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
    for pod in seen.staying:
        for item in pod.ended:
            if item.reason not in KUBERNETES_OWN and pod.job_restarts == seen.restarts:
                yield item, pod.role


def _endings_of_the_whole(seen: Snapshot, spec: JobSpec) -> Iterator[str]:
    """Those for which a rule wants the whole job started again."""
    for item, role in _endings(seen):
        if _rule(spec, role, item.reason).action == "RestartJob":
            yield f"{role}: {item}"


def stuck(seen: Snapshot) -> list[Pod]:
    """Pods that have not started and wait for a node, an image, a volume or a secret, or whose preparation fails; the longest first.

    One that a queue holds back waits for none of these.
    """
    waiting = [
        pod
        for pod in seen.staying
        if pod.phase == "Pending" and not pod.gated and (pod.unstartable or pod.ended or not pod.begun)
    ]
    return sorted(waiting, key=lambda pod: (pod.made, pod.name))


def _suspended(seen: Snapshot, spec: JobSpec) -> Decision:
    """Drain, checkpoint, confirm, and only then let go of the pods."""
    standing = _standing(seen, Stage.RELEASING, parked=True)
    if not seen.present:
        return replace(standing, stage=Stage.RELEASED)
    if not _has_something_to_put_away(seen):
        return standing
    since = seen.now if seen.memory.draining is None else seen.memory.draining
    left = since + DRAIN_SECONDS + group_seconds(spec) - seen.now
    if left <= 0:
        return standing
    memory = Memory(draining=since, failed=seen.memory.failed)
    return replace(standing, stage=Stage.DRAINING, parked=False, drain=True, memory=memory, look_again=left)


def _has_something_to_put_away(seen: Snapshot) -> bool:
    if seen.learner is not None and seen.learner.replicas == 0:
        return False  # it was let go before: pods that are still there are on their way out
    told = seen.speaking
    return told is not None and told.report.phase not in {"starting", "suspended", "failed", "succeeded"}


def _running(seen: Snapshot, spec: JobSpec) -> Decision:
    deadline = _until_a_deadline(seen, spec)
    failure = told_failure(seen)
    if failure is None:
        return _restarted_pods(seen, spec, deadline)
    standing = _standing(seen, Stage.RUNNING)
    action = rule_for(spec, failure).action
    what = "the whole job" if action == "RestartJob" else "the learner"
    nth = f", for time {seen.counted + 1} of {spec.failure_policy.backoff_limit}"
    if action == "Ignore":
        nth = "; this failure does not count"
    since = seen.now if seen.memory.failed is None else seen.memory.failed
    left = since + back_off(seen.counted) - seen.now
    if left > 0:
        retry = f"{what} is started again in {left:.0f} s{nth}"
        return replace(standing, retry=retry, memory=Memory(failed=since), look_again=_earliest(left, deadline))
    again = replace(standing, retry=f"{what} is started again{nth}", look_again=deadline)
    if action == "Ignore":
        return replace(again, remove=_who_speaks(seen))
    return replace(again, attempts=seen.attempts + 1, restarts=seen.restarts + int(action == "RestartJob"))


def back_off(counted: int) -> float:
    """Seconds between a failure that the learner reported and the next start, after so many that count."""
    return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(counted, 16))


def _restarted_pods(seen: Snapshot, spec: JobSpec, deadline: float | None) -> Decision:
    """Running; where a rule wants the whole job started again because a container ended, it is."""
    again = int(any(_endings_of_the_whole(seen, spec)))
    return replace(
        _standing(seen, Stage.RUNNING),
        attempts=seen.attempts + again,
        restarts=seen.restarts + again,
        forgiven=seen.attempts if _goes_well(seen) else seen.forgiven,
        remove=_resumed(seen),
        look_again=deadline,
    )


def _goes_well(seen: Snapshot) -> bool:
    """Whether the learner of the last start has done enough steps for the restarts before it to be forgiven."""
    told = seen.speaking
    pod = None if told is None else next((pod for pod in seen.of(Role.LEARNER) if pod.uid == told.pod), None)
    return told is not None and told.gained >= GOOD_STEPS and pod is not None and pod.attempts == seen.attempts


def _resumed(seen: Snapshot) -> tuple[tuple[str, str], ...]:
    """The learner's pod, if it drained for a suspension that was taken back before the pod was let go."""
    told = seen.speaking
    return _who_speaks(seen) if told is not None and told.report.phase == "suspended" else ()


def _who_speaks(seen: Snapshot) -> tuple[tuple[str, str], ...]:
    told = seen.speaking
    return tuple((pod.name, pod.uid) for pod in seen.of(Role.LEARNER) if told is not None and pod.uid == told.pod)


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
