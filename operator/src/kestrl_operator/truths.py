"""What is true of a job now, condition by condition, from what was seen and decided. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kestrl.plan.components import Role
from kestrl.service import EXIT_INPUT
from kestrl.spec.job import JobSpec
from kestrl_operator.cluster import replicas
from kestrl_operator.conditions import NOT_OBSERVED, QUARANTINED, Observed, Truth, Type
from kestrl_operator.observe import Ended, Pod, Snapshot, Told, is_input
from kestrl_operator.policies import Decision, Stage, has_ended, stuck, told_failure

OVER = frozenset({"succeeded", "failed", "suspended"})
"""Phases of a learner whose run is over."""
STALL_FLOOR, STALL_FACTOR = 300.0, 5.0
"""No step for so long, and for so many times the longest of the last steps, is a stall."""


def observed(seen: Snapshot, decision: Decision) -> Iterator[Observed]:
    """All that was observed now."""
    if seen.job is None:
        yield _not(Type.ACCEPTED, "Invalid", seen.problem)
        if seen.condition(Type.READY)[1] in {"OperatorFailed", QUARANTINED}:
            yield _not(Type.READY, "NotReady", "not Accepted")  # the operator works again: it has just found that out
        return
    spec = seen.job.spec
    made = [
        *([] if has_ended(seen) else [_accepted(seen)]),  # who has ended looks for nothing any more
        _quota(seen),
        _suspension(seen, decision),
        *(_released(seen) if decision.parked else _at_work(seen, decision, spec)),
        *_of_storage(seen.speaking),
        *_learned(seen.speaking),
        _success(seen, decision),
    ]
    yield from made
    yield _ready(made, decision)


def _is(kind: Type, reason: str, message: str = "") -> Observed:
    return Observed(type=kind, truth=Truth.TRUE, reason=reason, message=message)


def _not(kind: Type, reason: str, message: str = "") -> Observed:
    return Observed(type=kind, truth=Truth.FALSE, reason=reason, message=message)


def _unknown(kind: Type, message: str) -> Observed:
    return Observed(type=kind, truth=Truth.UNKNOWN, reason=NOT_OBSERVED, message=message)


def _accepted(seen: Snapshot) -> Observed:
    """What a manifest names is looked for by the pods themselves, before their programs start."""
    if seen.problem:
        return _not(
            Type.ACCEPTED, "Invalid", f"{seen.problem}; until that is fixed, the job goes on as it was accepted last"
        )
    for pod in seen.staying:
        for item in pod.ended:
            if item.container == "prepare" and _is_missing(item):
                return _not(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {item.message or item}")
        if "CreateContainerConfigError" in pod.unstartable:
            return _not(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {pod.unstartable}")
    failure = told_failure(seen)
    if failure is not None and is_input(failure):
        return _not(Type.ACCEPTED, "Unresolvable", f"the learner: {failure.message}")
    return _is(Type.ACCEPTED, "Valid")


def _is_missing(item: Ended) -> bool:
    """Whether a preparation failed of something that is not there, rather than of a place that could not be asked."""
    return item.code == EXIT_INPUT or "/not_found]" in item.message


def _quota(seen: Snapshot) -> Observed:
    if seen.queue is None:
        return _is(Type.QUOTA_RESERVED, "NotQueued")
    gated = [pod.name for pod in seen.staying if pod.gated]
    if gated:
        return _not(Type.QUOTA_RESERVED, "Waiting", f"{len(gated)} pods wait for queue {seen.queue}")
    if not seen.present:
        return _unknown(Type.QUOTA_RESERVED, f"there is no pod that queue {seen.queue} could admit")
    return _is(Type.QUOTA_RESERVED, "Admitted")


def _suspension(seen: Snapshot, decision: Decision) -> Observed:
    if decision.stage is Stage.DRAINING:
        return _not(Type.SUSPENDED, "Draining", "rollouts end and the learner checkpoints")
    if decision.stage is Stage.RELEASING:
        return _not(Type.SUSPENDED, "Draining", f"{len(seen.present)} pods are going")
    if decision.stage is Stage.RELEASED:
        step = seen.status.get("progress", {}).get("step", 0)
        return _is(Type.SUSPENDED, "Released", f"at step {step}; suspend: false goes on from there")
    return _not(Type.SUSPENDED, "Running")


def _released(seen: Snapshot) -> Iterator[Observed]:
    """Of a job whose pods are not to run. Nobody serves a policy then, so nobody has converged."""
    left = f"{len(seen.present)} pods are going" if seen.present else ""
    yield _not(Type.SCHEDULED, "Released", left)
    yield _not(Type.ENGINES_READY, "Released", left)
    yield _unknown(Type.POLICY_CONVERGED, "no engine is to run")
    yield _not(Type.ROLLOUTS_FLOWING, "Drained")
    yield _not(Type.LEARNER_PROGRESSING, "Released")


def _at_work(seen: Snapshot, decision: Decision, spec: JobSpec) -> Iterator[Observed]:
    yield _scheduled(seen, spec)
    yield _engines_ready(seen, spec)
    yield _converged(seen, spec)
    yield _flowing(seen, decision, spec)
    yield _progressing(seen, decision)
    told = seen.speaking
    if told is not None:
        yield from _reward(told)


def _scheduled(seen: Snapshot, spec: JobSpec) -> Observed:
    wanted = replicas(spec)
    placed = {role: len([pod for pod in seen.of(role) if pod.scheduled]) for role in wanted}
    if all(placed[role] >= number for role, number in wanted.items()):
        return _is(Type.SCHEDULED, "PodsScheduled")
    if seen.unsatisfiable:
        return _not(Type.SCHEDULED, "Unsatisfiable", seen.unsatisfiable)
    waiting = [pod for pod in stuck(seen) if not pod.scheduled]
    why = next((f"{pod.name}: {pod.unscheduled}" for pod in waiting if pod.unscheduled), "")
    found = sum(min(placed[role], number) for role, number in wanted.items())
    return _not(
        Type.SCHEDULED,
        "Pending",
        why or (seen.unmade[1] if seen.unmade else "") or f"{found} of {sum(wanted.values())} pods have a node",
    )


def trouble(pods: list[Pod]) -> str:
    """What is wrong with pods of a role, if something is."""
    for pod in pods:
        if pod.unstartable:
            return f"{pod.name}: {pod.unstartable}"
        for item in pod.ended:
            again = f" (restarted {pod.restarts} times)" if pod.restarts else ""
            return f"{pod.name}: {item}{again}"
    return ""


def _engines_ready(seen: Snapshot, spec: JobSpec) -> Observed:
    pods, wanted = seen.of(Role.INFERENCE), spec.inference.replicas
    ready = len([pod for pod in pods if pod.ready])
    if ready >= wanted:
        return _is(Type.ENGINES_READY, "AllReady", f"{ready}/{wanted}")
    wrong = trouble(pods) or _away(seen.speaking)
    if wrong:
        return _not(Type.ENGINES_READY, "Unavailable", f"{ready}/{wanted}; {wrong}")
    return _not(Type.ENGINES_READY, "Starting", f"{ready}/{wanted}")


def _away(told: Told | None) -> str:
    """The engine that answered the learner once and does not now, if there is one."""
    away = [engine for engine in told.report.engines if engine.state == "away"] if told is not None else []
    return f"{away[0].name} does not answer {away[0].message}".strip() if away else ""


def proved_by_all(seen: Snapshot, spec: JobSpec) -> bool:
    """Whether every engine that the job wants has proved the newest version."""
    told = seen.speaking
    return told is not None and told.proved >= max(told.report.engines_total, spec.inference.replicas)


def _converged(seen: Snapshot, spec: JobSpec) -> Observed:
    told = seen.speaking
    if told is None:
        return _unknown(Type.POLICY_CONVERGED, "the learner, which hears it from every engine, does not answer")
    report = told.report
    if report.phase in OVER:
        return _unknown(Type.POLICY_CONVERGED, "the learner has ended its run and hears of no engine")
    newest = told.policy.name if told.policy else "no version yet"
    total = max(report.engines_total, spec.inference.replicas)
    proved = f"{told.proved}/{total} engines have proved {newest}"
    if proved_by_all(seen, spec):
        return _is(Type.POLICY_CONVERGED, "AllProved", proved)
    lying = [engine for engine in report.engines if engine.state == "quarantined"]
    if lying:
        why = lying[0].message or "it does not say why"
        return _not(Type.POLICY_CONVERGED, "Quarantined", f"{proved}; {lying[0].name}: {why}")
    return _not(Type.POLICY_CONVERGED, "Loading", proved)


def _flowing(seen: Snapshot, decision: Decision, spec: JobSpec) -> Observed:
    told = seen.speaking
    wrong = next(filter(None, (trouble(seen.of(role)) for role in (Role.ROLLOUT, Role.TOOLS, Role.JUDGE))), "")
    if decision.stage is Stage.DRAINING:
        return _not(Type.ROLLOUTS_FLOWING, "Drained")
    if wrong:
        return _not(Type.ROLLOUTS_FLOWING, "Failing", wrong)
    if told is None and any(pod.ready for pod in seen.of(Role.LEARNER)):
        return _unknown(Type.ROLLOUTS_FLOWING, "the learner, which asks for them, does not answer")
    if told is None or told.report.phase == "starting":
        return _not(Type.ROLLOUTS_FLOWING, "Starting")
    if told.report.phase in {*OVER, "draining"}:
        return _not(Type.ROLLOUTS_FLOWING, "Drained")
    if told.report.workers == 0:
        ready = len([pod for pod in seen.of(Role.ROLLOUT) if pod.ready])
        return _not(Type.ROLLOUTS_FLOWING, "NoWorker", f"{ready} of {spec.rollout.replicas} workers' pods are ready")
    running, ready = told.report.groups_running, told.report.groups_ready
    return _is(Type.ROLLOUTS_FLOWING, "Flowing", f"{told.report.workers} workers, {running} groups run, {ready} wait")


def _progressing(seen: Snapshot, decision: Decision) -> Observed:
    kind, told = Type.LEARNER_PROGRESSING, seen.speaking
    if told is None:
        wrong = trouble(seen.of(Role.LEARNER))
        if wrong:
            return _not(kind, "Unavailable", wrong)
        ready = any(pod.ready for pod in seen.of(Role.LEARNER))
        why = f": {seen.silent}" if seen.silent else ""
        return _not(kind, "Unavailable", f"it does not answer{why}") if ready else _not(kind, "Starting")
    report = told.report
    if report.phase == "failed":
        what = told.failure or report.message
        return _not(kind, "Failed", f"{what}; {decision.retry}" if decision.retry else str(what))
    if report.storage_wait and report.phase not in OVER:
        return _not(kind, "StorageUnavailable", report.storage_wait)
    if report.phase in {"starting", "suspended"}:
        return _not(kind, "Starting", report.message)
    quiet = seen.now - told.stepped
    if report.phase == "training" and quiet > max(STALL_FLOOR, STALL_FACTOR * told.pace):
        why = ", ".join(f"{name} {count} times" for name, count in sorted(report.failures.items()))
        return _not(kind, "Stalled", f"no step for {quiet:.0f} s{': ' if why else ''}{why}")
    return _is(kind, "Stepping", report.message)


def _of_storage(told: Told | None) -> Iterator[Observed]:
    if told is None:
        return
    kind, report = Type.CHECKPOINT_DURABLE, told.report
    if report.storage_failure:
        yield _not(kind, "StorageFailed", report.storage_failure)
    elif report.HasField("checkpoint_step"):
        yield _is(kind, "Confirmed", f"step {report.checkpoint_step}")
    else:
        yield _not(kind, "None")


def _reward(told: Told) -> Iterator[Observed]:
    kind, report = Type.REWARD_HEALTHY, told.report
    judging = {name: count for name, count in report.failures.items() if name.startswith("judge/")}
    if report.degenerate:
        yield _not(kind, "Degenerate", "every group of the last steps had equal rewards")
    elif (mean := told.mean("reward")) is not None:
        yield _is(kind, "Scoring", f"mean {mean:.3f}")
    elif judging:
        yield _not(kind, "JudgeFailing", ", ".join(f"{name} {count} times" for name, count in sorted(judging.items())))


NOT_LEARNED = {
    "no_tool_call": "NoToolCall",
    "no_reward_spread": "NoRewardSpread",
    "zero_gradient": "ZeroGradient",
    "weights_unchanged": "WeightsUnchanged",
}
"""Reasons of the condition by the learner's own."""


def _learned(told: Told | None) -> Iterator[Observed]:
    """Kept after the end: a job may succeed and have learned nothing."""
    if told is None or not told.report.HasField("learned"):
        return
    report = told.report
    if report.learned:
        yield _is(Type.LEARNED, "WeightsChanged")
    else:
        reason = NOT_LEARNED.get(report.not_learned_reason, "WeightsUnchanged")
        yield _not(Type.LEARNED, reason, report.not_learned)


def _success(seen: Snapshot, decision: Decision) -> Observed:
    if decision.ended is not None:
        reason, message = decision.ended
        return (_is if reason == "Completed" else _not)(Type.SUCCEEDED, reason, message)
    if has_ended(seen):
        status, reason = seen.condition(Type.SUCCEEDED)
        message = next(
            (item.get("message", "") for item in seen.status["conditions"] if item["type"] == Type.SUCCEEDED), ""
        )
        return Observed(type=Type.SUCCEEDED, truth=Truth(status), reason=reason, message=message)
    return _not(Type.SUCCEEDED, "Running")


def _ready(made: list[Observed], decision: Decision) -> Observed:
    if decision.stage is Stage.ENDED:
        return _not(Type.READY, "Finished")
    needed = (Type.SCHEDULED, Type.ENGINES_READY, Type.ROLLOUTS_FLOWING, Type.LEARNER_PROGRESSING)
    missing = [item.type for item in made if item.type in needed and item.truth is not Truth.TRUE]
    if missing:
        return _not(Type.READY, "NotReady", f"not {', '.join(missing)}")
    return _is(Type.READY, "Training")
