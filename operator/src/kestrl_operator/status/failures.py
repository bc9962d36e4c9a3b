"""What the failures of a job mean: the rule of its failurePolicy for each, and whether one ends the job. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl._shared.backoff import Backoff
from kestrl._shared.plan.components import Role
from kestrl._shared.spec.job import FailureRule, JobSpec
from kestrl.errors import Failure
from kestrl_operator.state.snapshot import STORAGE_AWAY, ContainerEnd, Snapshot

BACKOFF = Backoff(10.0, 300.0)
"""Pauses before the learner is restarted after a failure that it reported."""
STABLE_STEPS = 10
"""Steps since a start of the learner after which the earlier restarts no longer count against `backoffLimit`."""
CAUSED_BY_KUBERNETES = frozenset({"ContainerStatusUnknown", "Unknown"})
"""Reasons of container ends that the container did not cause: the kubelet lost it, or its node restarted."""
BUILT_IN = (
    # Training on rollouts of another policy than the recorded one is a defect that a retry does not fix.
    FailureRule(role="learner", reason="engine/logprob_gap", action="Fail"),
    # The learner has retried for minutes, and the job is not at fault: it is restarted without a limit.
    *(FailureRule(role="learner", reason=f"infrastructure/{code}", action="Ignore") for code in sorted(STORAGE_AWAY)),
)
"""Rules that apply after the user's own."""


def end_by_failure(snapshot: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """Reason and message of the end that failures cause, by their rules or because the limit of restarts is reached."""
    reported = _failed(snapshot, spec)
    if reported is not None:
        return reported
    for item, role in _container_failures(snapshot):
        if _rule(spec, role, item.reason).action == "Fail":
            return "LearnerFailed" if role is Role.LEARNER else "BackoffExceeded", f"{role}: {item}"
    if spec.suspend:
        return None  # it restarts nothing, so that no limit of restarts is reached
    if snapshot.counted >= spec.failure_policy.backoff_limit:
        for item in job_restart_causes(snapshot, spec):
            return "BackoffExceeded", f"{_too_often(snapshot, spec, 'a component failed')}: {item}"
    return None


def _too_often(snapshot: Snapshot, spec: JobSpec, event: str) -> str:
    limit = spec.failure_policy.backoff_limit
    since = f" since {STABLE_STEPS} successful steps in a row" if snapshot.forgiven else ""
    return f"{event} {snapshot.counted + 1} times{since}, failurePolicy.backoffLimit is {limit}; the last time"


def _failed(snapshot: Snapshot, spec: JobSpec) -> tuple[str, str] | None:
    """Reason and message of the end that a learner failure causes, by its rule or because the limit is reached; None if
    it causes none.
    """
    failure = reported_failure(snapshot)
    if failure is None:
        return None
    rule = rule_for(spec, failure)
    if rule.action == "Fail":
        return "LearnerFailed", str(failure)
    if rule.action != "Ignore" and snapshot.counted >= spec.failure_policy.backoff_limit:
        return "BackoffExceeded", f"{_too_often(snapshot, spec, 'the learner failed')}: {failure}"
    return None


def reported_failure(snapshot: Snapshot) -> Failure | None:
    """The failure that the learner of this attempt reported, if any."""
    live = snapshot.live_report
    if live is None:
        return None
    # After the decision to restart, the old pod is there for a while and would have its failure counted once more.
    pod = next((pod for pod in snapshot.of(Role.LEARNER) if pod.uid == live.pod), None)
    return live.failure if pod is not None and pod.attempts == snapshot.attempts else None


def rule_for(spec: JobSpec, failure: Failure) -> FailureRule:
    """The first rule that matches a failure reported by the learner."""
    return _rule(spec, Role.LEARNER, f"{failure.boundary}/{failure.code}")


def _rule(spec: JobSpec, role: Role, reason: str) -> FailureRule:
    default = FailureRule(action="RestartComponent")
    rules = (*spec.failure_policy.rules, *BUILT_IN)
    return next((rule for rule in rules if rule.role in {None, role.value} and _fits(rule.reason, reason)), default)


def _fits(pattern: str, reason: str) -> bool:
    return pattern in {"*", reason} or (pattern.endswith("/*") and reason.startswith(pattern[:-1]))


def _container_failures(snapshot: Snapshot) -> Iterator[tuple[ContainerEnd, Role]]:
    for pod in snapshot.staying:
        for item in pod.ended:
            if item.reason not in CAUSED_BY_KUBERNETES and pod.job_restarts == snapshot.restarts:
                yield item, Role.LEARNER if pod.role is Role.RANKS else pod.role


def job_restart_causes(snapshot: Snapshot, spec: JobSpec) -> Iterator[str]:
    """Container failures for which a rule restarts the whole job."""
    for item, role in _container_failures(snapshot):
        if _rule(spec, role, item.reason).action == "RestartJob":
            yield f"{role}: {item}"


def backoff(counted: int) -> float:
    """Seconds between a failure that the learner reported and its restart, after `counted` failures that count."""
    return BACKOFF.pause(counted + 1)


def is_stable(snapshot: Snapshot) -> bool:
    """Whether the learner has done enough steps since its last start for earlier restarts to no longer count."""
    live = snapshot.live_report
    pod = None if live is None else next((pod for pod in snapshot.of(Role.LEARNER) if pod.uid == live.pod), None)
    return live is not None and live.gained >= STABLE_STEPS and pod is not None and pod.attempts == snapshot.attempts
