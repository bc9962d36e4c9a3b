"""The observed state of a job, condition by condition, from a snapshot and the decision about it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime

from kestrl._shared.conventions import EXIT_INPUT
from kestrl._shared.plan.components import Role
from kestrl._shared.plan.tools import runtime_class
from kestrl._shared.spec.job import JobSpec
from kestrl.runstate.states import RunPhase, ServingState
from kestrl_operator.state.cluster import replicas
from kestrl_operator.state.snapshot import STORAGE_AWAY, ContainerEnd, LearnerReport, Snapshot, is_input
from kestrl_operator.status.conditions import (
    CREDENTIAL_REFUSED,
    NOT_OBSERVED,
    QUARANTINED,
    ConditionStatus,
    Observation,
    Type,
)
from kestrl_operator.status.failures import reported_failure
from kestrl_operator.status.lifecycle import Decision, Stage, has_ended, is_silent
from kestrl_operator.status.pods import ROLLING, downloading, pod_problem, tracked
from kestrl_operator.status.quota import quota_reserved
from kestrl_operator.status.summary import distance, summed_up
from kestrl_operator.status.waiting import stuck

STALL_FLOOR, STALL_FACTOR = 300.0, 5.0
"""A training run is stalled after this many seconds without a step, and this many times the duration of the longest
recent step."""
UPDATE_SECONDS = 30.0
"""Seconds after a step in which engines that load its version are as usual."""


def observed(snapshot: Snapshot, decision: Decision) -> Iterator[Observation]:
    """Everything observed in this pass."""
    if snapshot.job is None:
        yield _false(Type.ACCEPTED, "Invalid", snapshot.problem)
        yield from _without_job(snapshot)
        return
    spec = snapshot.job.spec
    observations = [
        # A job that has ended or rests resolves nothing now.
        *([] if has_ended(snapshot) or _rests(snapshot, decision) else [_accepted(snapshot)]),
        quota_reserved(snapshot, decision),
        _suspension(snapshot, decision),
        *(_released(snapshot, decision) if decision.parked else _components(snapshot, decision, spec)),
        *_checkpoint(snapshot.live_report),
        *_reward(snapshot.live_report),
        *_learned(snapshot.live_report),
        *tracked(snapshot, parked=decision.parked),
        _success(snapshot, decision),
    ]
    yield from observations
    yield from summed_up(observations, snapshot, decision)


def _rests(snapshot: Snapshot, decision: Decision) -> bool:
    return decision.stage is Stage.PARKED and not snapshot.problem


def _without_job(snapshot: Snapshot) -> Iterator[Observation]:
    """What follows from the absence of any spec that could be in force."""
    if has_ended(snapshot):
        succeeded = snapshot.condition(Type.SUCCEEDED)[0] == ConditionStatus.TRUE
        ready = _true(Type.READY, "Completed") if succeeded else _false(Type.READY, "Finished")
        yield ready
        yield from distance(ready, "" if succeeded else "Failed", condition_message(snapshot, Type.SUCCEEDED))
        return
    if snapshot.condition(Type.READY)[1] in {"OperatorFailed", QUARANTINED}:
        # The operator works again: this pass has just found that out.
        yield _false(Type.READY, "NotReady", "not Accepted")
    yield from distance(None, "Rejected", snapshot.problem)


def _true(kind: Type, reason: str, message: str = "") -> Observation:
    return Observation(type=kind, status=ConditionStatus.TRUE, reason=reason, message=message)


def _false(kind: Type, reason: str, message: str = "") -> Observation:
    return Observation(type=kind, status=ConditionStatus.FALSE, reason=reason, message=message)


def _unknown(kind: Type, message: str) -> Observation:
    return Observation(type=kind, status=ConditionStatus.UNKNOWN, reason=NOT_OBSERVED, message=message)


def _accepted(snapshot: Snapshot) -> Observation:
    """Whether the manifest is valid and everything it names exists; pods resolve those names before their programs
    start.
    """
    if snapshot.problem:
        return _false(
            Type.ACCEPTED,
            "Invalid",
            f"{snapshot.problem}; until this is fixed, the job continues with the spec accepted last",
        )
    for pod in snapshot.staying:
        for item in pod.ended:
            if item.container == "prepare" and is_missing(item):
                return _false(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {item.message or item}")
        if "CreateContainerConfigError" in pod.unstartable:
            return _false(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {pod.unstartable}")
    if absent := absent_runtime_class(snapshot):
        return _false(Type.ACCEPTED, "Unresolvable", absent)
    failure = reported_failure(snapshot)
    if failure is not None and is_input(failure):
        return _false(Type.ACCEPTED, "Unresolvable", f"the learner: {failure.message}")
    return _true(Type.ACCEPTED, "Valid")


NO_RUNTIME_CLASS = re.compile(r'RuntimeClass "([^"]+)" not found')
"""What Kubernetes' admission says of a pod with a RuntimeClass that does not exist, in an event of its workload."""


def absent_runtime_class(snapshot: Snapshot) -> str:
    """Message for a RuntimeClass that does not exist, with the field that names it; empty if none is missing."""
    match = NO_RUNTIME_CLASS.search(snapshot.not_created[1]) if snapshot.not_created is not None else None
    if match is None or snapshot.job is None:
        return ""
    spec = snapshot.job.spec
    runtime_classes = [runtime_class(spec, role) for role in (Role.TOOLS, Role.AGENT)]
    fields = [pair[1] for pair in runtime_classes if pair is not None and pair[0] == match[1]]
    field = fields[0] if fields else "the chart's jobs.toolsRuntimeClass or accelerators"
    return f"{field}: there is no RuntimeClass {match[1]!r}; create it, or name one of `kubectl get runtimeclass`"


def is_missing(item: ContainerEnd) -> bool:
    """Whether preparation failed because something does not exist, rather than because its location did not answer."""
    return item.code == EXIT_INPUT or "/not_found]" in item.message


def _suspension(snapshot: Snapshot, decision: Decision) -> Observation:
    if decision.stage is Stage.DRAINING:
        return _false(Type.SUSPENDED, "Draining", "rollouts end and the learner checkpoints")
    if decision.stage is Stage.RELEASING:
        return _false(Type.SUSPENDED, "Draining", f"{len(snapshot.present)} pods are terminating")
    if decision.stage is Stage.RELEASED:
        step = snapshot.status.get("progress", {}).get("step", 0)
        return _true(Type.SUSPENDED, "Released", f"at step {step}; suspend: false resumes from there")
    return _false(Type.SUSPENDED, "Running")


def _released(snapshot: Snapshot, decision: Decision) -> Iterator[Observation]:
    """Observations for a job whose pods are not to run. No engine serves a policy then, so none has converged. A
    credential that a resting job waits for stays as it was observed.
    """
    pods_message = f"{len(snapshot.present)} pods are terminating" if snapshot.present else ""
    rest = decision.memory.rest
    if decision.stage is Stage.PARKED and rest is not None:
        retry = datetime.fromtimestamp(rest.until, UTC)
        message = f"it has given its pods back, and tries again at {retry:%H:%M:%S} UTC: {rest.why}"
        yield _false(Type.SCHEDULED, "Parked", message)
    else:
        yield _false(Type.SCHEDULED, "Released", pods_message)
    yield _false(Type.ENGINES_READY, "Released", pods_message)
    yield _unknown(Type.POLICY_CONVERGED, "no engine is to run")
    yield _false(Type.ROLLOUTS_FLOWING, "Drained")
    if decision.stage is not Stage.PARKED or snapshot.condition(Type.LEARNER_PROGRESSING)[1] != CREDENTIAL_REFUSED:
        yield _false(Type.LEARNER_PROGRESSING, "Released")


def _components(snapshot: Snapshot, decision: Decision, spec: JobSpec) -> Iterator[Observation]:
    yield _scheduled(snapshot, spec)
    yield _engines_ready(snapshot, spec)
    yield _converged(snapshot, spec)
    yield _flowing(snapshot, decision, spec)
    yield _progressing(snapshot, decision)
    live = snapshot.live_report
    if live is not None:
        yield from _tools(live, spec)


def _scheduled(snapshot: Snapshot, spec: JobSpec) -> Observation:
    desired_replicas = replicas(spec, snapshot.workloads)
    placed = {role: len([pod for pod in snapshot.of(role) if pod.scheduled]) for role in desired_replicas}
    if all(placed[role] >= number for role, number in desired_replicas.items()):
        return _true(Type.SCHEDULED, "PodsScheduled")
    if snapshot.unsatisfiable:
        return _false(Type.SCHEDULED, "Unsatisfiable", snapshot.unsatisfiable)
    waiting = [pod for pod in stuck(snapshot) if not pod.scheduled]
    message = next((f"{pod.name}: {pod.unscheduled}" for pod in waiting if pod.unscheduled), "")
    scheduled_pods = sum(min(placed[role], number) for role, number in desired_replicas.items())
    message = message or (snapshot.not_created[1] if snapshot.not_created else "")
    total = f"{scheduled_pods} of {sum(desired_replicas.values())} pods have a node{_awaited_end(snapshot)}"
    return _false(Type.SCHEDULED, "Pending", message or total)


def _awaited_end(snapshot: Snapshot) -> str:
    """The pods whose end their successors wait for, as those of a StatefulSet do; empty if there are none."""
    names = sorted(pod.name for pod in snapshot.pods if pod.deleting and not pod.over)
    return f"; {', '.join(names)} end{'s' * (len(names) == 1)} first" if names else ""


def _engines_ready(snapshot: Snapshot, spec: JobSpec) -> Observation:
    pods, desired = snapshot.of(Role.INFERENCE), replicas(spec, snapshot.workloads)[Role.INFERENCE]
    ready = len([pod for pod in pods if pod.ready])
    if ready >= desired:
        return _true(Type.ENGINES_READY, "AllReady", f"{ready}/{desired}")
    problem = pod_problem(pods, snapshot.lost_nodes)
    if problem is not None:
        return _false(Type.ENGINES_READY, problem.reason_or("Unavailable"), f"{ready}/{desired}; {problem.message}")
    if away := _unresponsive_engine(snapshot.live_report):
        return _false(Type.ENGINES_READY, "Unavailable", f"{ready}/{desired}; {away}")
    return _false(Type.ENGINES_READY, "Starting", f"{ready}/{desired}")


def _unresponsive_engine(live: LearnerReport | None) -> str:
    """The engine that answered the learner before and does not now; empty if there is none."""
    reports = () if live is None else live.state.engines.reports
    away = next((engine for engine in reports if engine.state is ServingState.AWAY), None)
    return "" if away is None else f"{away.name} does not answer {away.message}".strip()


def verified_by_all(snapshot: Snapshot, spec: JobSpec) -> bool:
    """Whether every engine that the job needs has verified the newest version."""
    live = snapshot.live_report
    return live is not None and live.verified >= _engines(snapshot, spec, live)


def _engines(snapshot: Snapshot, spec: JobSpec, live: LearnerReport) -> int:
    """Engines that the job needs, and those that the learner still has beyond them."""
    return max(live.state.engines.total, replicas(spec, snapshot.workloads)[Role.INFERENCE])


def _converged(snapshot: Snapshot, spec: JobSpec) -> Observation:
    live = snapshot.live_report
    if live is None:
        return _unknown(Type.POLICY_CONVERGED, "the learner, which reports it for every engine, does not answer")
    if live.over:
        return _unknown(Type.POLICY_CONVERGED, "the learner has ended its run and no longer reports engines")
    version = live.policy.name if live.policy else "no version yet"
    total = _engines(snapshot, spec, live)
    verified = f"{live.verified}/{total} engines have verified {version}"
    if verified_by_all(snapshot, spec):
        return _true(Type.POLICY_CONVERGED, "AllProved", verified)
    if _updating(live, total):
        return _true(Type.POLICY_CONVERGED, "AllProved", f"all have verified the version before; {verified}")
    lying = [engine for engine in live.state.engines.reports if engine.state is ServingState.QUARANTINED]
    if lying:
        message = lying[0].message or "no reason was reported"
        return _false(Type.POLICY_CONVERGED, "Quarantined", f"{verified}; {lying[0].name}: {message}")
    return _false(Type.POLICY_CONVERGED, "Loading", verified)


def _updating(live: LearnerReport, engines: int) -> bool:
    """Whether all engines load a version that was published a moment ago, and have verified the one before."""
    fleet = live.state.engines
    is_recent = live.policy is not None and live.at < live.stepped + UPDATE_SECONDS
    return is_recent and fleet.updating and fleet.total >= engines


def _flowing(snapshot: Snapshot, decision: Decision, spec: JobSpec) -> Observation:
    live = snapshot.live_report
    problems = (pod_problem(snapshot.of(role), snapshot.lost_nodes) for role in ROLLING)
    problem = next(filter(None, problems), None)
    if decision.stage is Stage.DRAINING:
        return _false(Type.ROLLOUTS_FLOWING, "Drained")
    if problem is not None:
        return _false(Type.ROLLOUTS_FLOWING, problem.reason_or("Failing"), problem.message)
    if live is None and any(pod.ready for pod in snapshot.of(Role.LEARNER)):
        return _unknown(Type.ROLLOUTS_FLOWING, "the learner, which requests them, does not answer")
    if live is None or live.phase is RunPhase.STARTING:
        return _false(Type.ROLLOUTS_FLOWING, "Starting", downloading(snapshot.of(Role.FILES), spec))
    if live.over or live.phase is RunPhase.DRAINING:
        return _false(Type.ROLLOUTS_FLOWING, "Drained")
    if live.state.gauges.workers == 0:
        ready = len([pod for pod in snapshot.of(Role.ROLLOUT) if pod.ready])
        loading = downloading(snapshot.of(Role.FILES), spec)
        message = f"{ready} of {spec.rollout.replicas} workers' pods are ready"
        return _false(Type.ROLLOUTS_FLOWING, "NoWorker", f"{message}; {loading}" if loading else message)
    return _true(Type.ROLLOUTS_FLOWING, "Flowing", f"{live.state.gauges.workers} workers")


def _progressing(snapshot: Snapshot, decision: Decision) -> Observation:
    kind, live = Type.LEARNER_PROGRESSING, snapshot.live_report
    if live is None:
        problem = pod_problem(snapshot.of(Role.LEARNER), snapshot.lost_nodes)
        if problem is not None:
            return _false(kind, problem.reason_or("Unavailable"), problem.message)
        detail = f": {snapshot.unreachable}" if snapshot.unreachable else ""
        if is_silent(snapshot):
            return _false(kind, "Unavailable", f"it does not answer{detail}")
        return _false(kind, "Starting", f"it does not answer yet{detail}" if detail else "")
    state, message = live.state, live.state.activity.message
    if live.phase is RunPhase.FAILED:
        failure = live.failure or message
        away = live.failure is not None and live.failure.code in STORAGE_AWAY and decision.ended is None
        detail = f"{failure}; {decision.retry}" if decision.retry else str(failure)
        return _false(kind, "StorageUnavailable" if away else "Failed", detail)
    if state.storage.wait and not live.over:
        return _false(kind, "StorageUnavailable", state.storage.wait)
    if state.tools.wait and not live.over:
        return _false(kind, CREDENTIAL_REFUSED, state.tools.wait)
    if live.phase in {RunPhase.STARTING, RunPhase.SUSPENDED}:
        return _waiting_for_ranks(snapshot) or _false(kind, "Starting", message)
    quiet = snapshot.now - live.stepped
    if live.phase is RunPhase.TRAINING and quiet > max(STALL_FLOOR, STALL_FACTOR * live.pace):
        detail = ", ".join(f"{name} {count} times" for name, count in sorted(state.history.failures.items()))
        return _false(kind, "Stalled", f"no step for {quiet:.0f} s{': ' if detail else ''}{detail}")
    return _true(kind, "Stepping", message)


def _waiting_for_ranks(snapshot: Snapshot) -> Observation | None:
    """What is observed while pods of ranks are missing; None if all are ready, or the job has none."""
    pods = snapshot.of(Role.RANKS)
    desired_replicas = 0 if snapshot.job is None else replicas(snapshot.job.spec, snapshot.workloads).get(Role.RANKS, 0)
    ready = len([pod for pod in pods if pod.ready])
    if ready >= desired_replicas:
        return None
    problem = pod_problem(pods, snapshot.lost_nodes)
    wrong = "" if problem is None else f"; {problem.message}"
    message = f"{ready} of {desired_replicas} pods of ranks are ready{wrong}"
    return _false(Type.LEARNER_PROGRESSING, "WaitingForRanks", message)


def _checkpoint(live: LearnerReport | None) -> Iterator[Observation]:
    if live is None:
        return
    kind, storage = Type.CHECKPOINT_DURABLE, live.state.storage
    if storage.failure:
        yield _false(kind, "StorageFailed", storage.failure)
    elif storage.checkpoint is not None:
        yield _true(kind, "Confirmed", f"step {storage.checkpoint}")
    else:
        yield _false(kind, "None")


def _reward(live: LearnerReport | None) -> Iterator[Observation]:
    """Whether rewards teach. Observed at the end, too: a short run may end before its rewards were seen."""
    if live is None:
        return
    kind, failures = Type.REWARD_HEALTHY, live.state.history.failures
    judging = {name: count for name, count in failures.items() if name.startswith("judge/")}
    if live.state.steps.degenerate:
        yield _false(kind, "Degenerate", "every group of the last steps had equal rewards")
    elif (mean := live.mean("reward")) is not None:
        yield _true(kind, "Scoring", f"mean {mean:.3f}")
    elif judging:
        yield _false(
            kind, "JudgeFailing", ", ".join(f"{name} {count} times" for name, count in sorted(judging.items()))
        )


TOOL_WARNINGS = {"no_tool_call": "NoToolCall", "calls_failing": "CallsFailing"}
"""Condition reasons by the reason that the learner reports."""


def _tools(live: LearnerReport, spec: JobSpec) -> Iterator[Observation]:
    kind, tools = Type.TOOLS_HEALTHY, live.state.tools
    if not spec.tools:
        yield _true(kind, "NoTools")
    elif tools.warning_reason:
        yield _false(kind, TOOL_WARNINGS.get(tools.warning_reason, "CallsFailing"), tools.warning)
    elif calls := live.mean("tool_calls"):
        sandboxes = [f"{name} in {item}" for name, item in sorted(tools.sandboxes.items())]
        yield _true(kind, "Calling", "; ".join([f"{calls:.2f} calls per episode", *sandboxes]))


NOT_LEARNED = {
    "no_tool_call": "NoToolCall",
    "no_reward_spread": "NoRewardSpread",
    "zero_gradient": "ZeroGradient",
    "weights_unchanged": "WeightsUnchanged",
}
"""Condition reasons by the reason that the learner reports."""


def _learned(live: LearnerReport | None) -> Iterator[Observation]:
    """Whether the weights changed. Kept after the end: a job may succeed without having learned anything."""
    if live is None or live.state.learning.learned is None:
        return
    learning = live.state.learning
    if learning.learned:
        yield _true(Type.LEARNED, "WeightsChanged", learning.warning)
    else:
        yield _false(Type.LEARNED, NOT_LEARNED.get(learning.reason, "WeightsUnchanged"), learning.message)


def _success(snapshot: Snapshot, decision: Decision) -> Observation:
    if decision.ended is not None:
        reason, message = decision.ended
        return (_true if reason == "Completed" else _false)(Type.SUCCEEDED, reason, message)
    if has_ended(snapshot):
        status, reason = snapshot.condition(Type.SUCCEEDED)
        message = condition_message(snapshot, Type.SUCCEEDED)
        return Observation(type=Type.SUCCEEDED, status=ConditionStatus(status), reason=reason, message=message)
    return _false(Type.SUCCEEDED, "Running")


def condition_message(snapshot: Snapshot, kind: Type) -> str:
    """Message of a condition of the current status."""
    conditions = snapshot.status.get("conditions", ())
    return next((item.get("message", "") for item in conditions if item["type"] == kind), "")
