"""The status of a job, from what was observed: conditions, progress, lineage and what `kubectl get` prints. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from kestrl.api.common.v1.common_pb2 import PolicyVersion as PolicyMessage
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.plan.components import Role
from kestrl.rpc.codec import policy_from_proto
from kestrl.spec.job import JobSpec
from kestrl.spec.status import Condition, EngineStatus, JobStatus, PolicyStatus, ProgressStatus, Shown
from kestrl_operator.conditions import NOT_OBSERVED, Observed, Truth, Type, joined, phase
from kestrl_operator.observe import Pod, Snapshot, Told, is_input
from kestrl_operator.policies import Decision, Stage, has_ended, stuck, told_failure
from kestrl_operator.render.job import QUEUE_LABEL
from kestrl_operator.render.network import selector

HISTORY = 10
ENGINES_TOLD = 100
"""More of them are counted, not listed: an object has a largest size."""
STALL_FLOOR, STALL_FACTOR = 300.0, 5.0
"""No step for so long, and for so many times the longest of the last steps, is a stall."""


def status_of(seen: Snapshot, decision: Decision) -> dict[str, Any]:
    """The status as it is to be written.

    Args:
        seen: What is known.
        decision: What is done about it.
    """
    before = JobStatus.model_validate(dict(seen.status))
    now = written(seen.now)
    conditions = joined(before.conditions, observed(seen, decision), generation=seen.generation, now=now)
    told = seen.speaking
    policy, history = _lineage(before, told, now)
    running = decision.stage is Stage.RUNNING
    status = JobStatus(
        observed_generation=seen.generation,
        conditions=conditions,
        progress=before.progress if told is None else _progress(told),
        policy=policy,
        history=history,
        engines=[] if decision.parked else _engines(seen, before),
        rollout_replicas=len([pod for pod in seen.of(Role.ROLLOUT) if pod.phase in {"Pending", "Running"}]),
        rollout_selector=",".join(f"{name}={value}" for name, value in selector(seen.name, Role.ROLLOUT).items()),
        started_at=_started(seen, before, running=running, now=now),
        finished_at=before.finished_at if has_ended(seen) else now if decision.ended else None,
        restarts=decision.attempts,
    )
    status = status.model_copy(update={"shown": _shown(status, conditions, told)})
    return status.model_dump(by_alias=True, exclude_none=True)


def _started(seen: Snapshot, before: JobStatus, *, running: bool, now: str) -> str | None:
    """When it last began to run: a suspended job's deadline does not run on, as a Kubernetes Job's does not."""
    if running:
        return before.started_at if before.started_at is not None and not _was_suspended(seen) else now
    return before.started_at


def _was_suspended(seen: Snapshot) -> bool:
    return seen.condition(Type.SUSPENDED)[0] == Truth.TRUE


def written(seconds: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def observed(seen: Snapshot, decision: Decision) -> Iterator[Observed]:
    """All that was observed now."""
    if decision.stage is Stage.REJECTED:
        yield Observed(type=Type.ACCEPTED, truth=Truth.FALSE, reason="Invalid", message=seen.problem)
        return
    assert seen.job is not None
    spec = seen.job.spec
    made = [
        _accepted(seen),
        _quota(seen),
        _suspension(seen, decision),
        *(_released(seen) if decision.parked else _at_work(seen, decision, spec)),
        *_of_storage(seen.speaking),
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
    for pod in seen.pods:
        for item in pod.ended:
            if item.container == "prepare":
                return _not(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {item.message or item}")
        if "CreateContainerConfigError" in pod.unstartable:
            return _not(Type.ACCEPTED, "Unresolvable", f"{pod.name}: {pod.unstartable}")
    failure = told_failure(seen)
    if failure is not None and is_input(failure):
        return _not(Type.ACCEPTED, "Unresolvable", f"the learner: {failure.message}")
    return _is(Type.ACCEPTED, "Valid")


def _quota(seen: Snapshot) -> Observed:
    if QUEUE_LABEL not in seen.labels:
        return _is(Type.QUOTA_RESERVED, "NotQueued")
    gated = [pod.name for pod in seen.pods if pod.gated]
    if gated:
        return _not(Type.QUOTA_RESERVED, "Waiting", f"{len(gated)} pods wait for queue {seen.labels[QUEUE_LABEL]}")
    return _is(Type.QUOTA_RESERVED, "Admitted")


def _suspension(seen: Snapshot, decision: Decision) -> Observed:
    if decision.stage is Stage.DRAINING:
        return _not(Type.SUSPENDED, "Draining", "rollouts end and the learner checkpoints")
    if decision.stage is Stage.RELEASING:
        return _not(Type.SUSPENDED, "Draining", f"{len(seen.pods)} pods are going")
    if decision.stage is Stage.RELEASED:
        step = seen.status.get("progress", {}).get("step", 0)
        return _is(Type.SUSPENDED, "Released", f"at step {step}; suspend: false goes on from there")
    return _not(Type.SUSPENDED, "Running")


def _released(seen: Snapshot) -> Iterator[Observed]:
    """Of a job whose pods are not to run. Nobody serves a policy then, so nobody has converged."""
    left = f"{len(seen.pods)} pods are going" if seen.pods else ""
    yield _not(Type.SCHEDULED, "Released", left)
    yield _not(Type.ENGINES_READY, "Released", left)
    yield _unknown(Type.POLICY_CONVERGED, "no engine is to run")
    yield _not(Type.ROLLOUTS_FLOWING, "Drained")
    yield _not(Type.LEARNER_PROGRESSING, "Released")


def _at_work(seen: Snapshot, decision: Decision, spec: JobSpec) -> Iterator[Observed]:
    yield _scheduled(seen, spec)
    yield _engines_ready(seen, spec)
    yield _converged(seen)
    yield _flowing(seen, decision)
    yield _progressing(seen, decision)
    told = seen.speaking
    if told is not None:
        yield from _reward(told)


def expected(spec: JobSpec) -> int:
    """Pods of a job that runs: engines with their agents, workers, tools, judge and learner."""
    return spec.inference.replicas + spec.rollout.replicas + 3


def _scheduled(seen: Snapshot, spec: JobSpec) -> Observed:
    if seen.unsatisfiable:
        return _not(Type.SCHEDULED, "Unsatisfiable", seen.unsatisfiable)
    placed = len([pod for pod in seen.pods if not pod.deleting and pod.scheduled])
    if placed >= expected(spec):
        return _is(Type.SCHEDULED, "PodsScheduled")
    waiting = [pod for pod in stuck(seen) if not pod.scheduled]
    why = next((f"{pod.name}: {pod.unscheduled}" for pod in waiting if pod.unscheduled), "")
    return _not(Type.SCHEDULED, "Pending", why or f"{placed} of {expected(spec)} pods have a node")


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
    wrong = trouble(pods)
    if wrong:
        return _not(Type.ENGINES_READY, "Unavailable", f"{ready}/{wanted}; {wrong}")
    return _not(Type.ENGINES_READY, "Starting", f"{ready}/{wanted}")


def _converged(seen: Snapshot) -> Observed:
    told = seen.speaking
    if told is None:
        return _unknown(Type.POLICY_CONVERGED, "the learner, which hears it from every engine, does not answer")
    report = told.report
    newest = told.policy.name if told.policy else "no version yet"
    proved = f"{report.engines_converged}/{report.engines_total} engines have proved {newest}"
    if told.converged:
        return _is(Type.POLICY_CONVERGED, "AllProved", proved)
    lying = [engine for engine in report.engines if engine.state == "quarantined"]
    if lying:
        return _not(Type.POLICY_CONVERGED, "Quarantined", f"{proved}; {lying[0].name}: {lying[0].message}")
    return _not(Type.POLICY_CONVERGED, "Loading", proved)


def _flowing(seen: Snapshot, decision: Decision) -> Observed:
    told = seen.speaking
    wrong = next(filter(None, (trouble(seen.of(role)) for role in (Role.ROLLOUT, Role.TOOLS, Role.JUDGE))), "")
    if decision.stage is Stage.DRAINING:
        return _not(Type.ROLLOUTS_FLOWING, "Drained")
    if wrong:
        return _not(Type.ROLLOUTS_FLOWING, "Failing", wrong)
    if told is None or told.report.phase == "starting":
        return _not(Type.ROLLOUTS_FLOWING, "Starting")
    if told.report.phase in {"succeeded", "failed", "suspended", "draining"}:
        return _not(Type.ROLLOUTS_FLOWING, "Drained")
    if told.report.workers == 0:
        return _not(Type.ROLLOUTS_FLOWING, "NoWorker", wrong)
    running, ready = told.report.groups_running, told.report.groups_ready
    return _is(Type.ROLLOUTS_FLOWING, "Flowing", f"{told.report.workers} workers, {running} groups run, {ready} wait")


def _progressing(seen: Snapshot, decision: Decision) -> Observed:
    kind, told = Type.LEARNER_PROGRESSING, seen.speaking
    if told is None:
        wrong = trouble(seen.of(Role.LEARNER))
        if wrong:
            return _not(kind, "Unavailable", wrong)
        ready = any(pod.ready for pod in seen.of(Role.LEARNER))
        return _not(kind, "Unavailable", "it does not answer") if ready else _not(kind, "Starting")
    report = told.report
    if report.phase == "failed":
        what = told.failure or report.message
        return _not(kind, "Failed", f"{what}; {decision.retry}" if decision.retry else str(what))
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
    elif "reward" in report.means:
        yield _is(kind, "Scoring", f"mean {report.means['reward']:.3f}")
    elif judging:
        yield _not(kind, "JudgeFailing", ", ".join(f"{name} {count} times" for name, count in sorted(judging.items())))


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


def _progress(told: Told) -> ProgressStatus:
    report = told.report
    return ProgressStatus(
        step=report.step,
        total_steps=report.total_steps,
        reward=_mean(report, "reward"),
        answer_correct=_mean(report, "answer_correct"),
        episodes_per_second=round(report.episodes_per_second, 2) or None,
        tokens_per_second=round(report.tokens_per_second, 1) or None,
        eta_seconds=int(report.eta_seconds) or None,
        failures=dict(report.failures),
    )


def _mean(report: pb.WatchProgressResponse, name: str) -> float | None:
    return round(report.means[name], 4) if name in report.means else None


def _lineage(before: JobStatus, told: Told | None, now: str) -> tuple[PolicyStatus | None, list[PolicyStatus]]:
    """The newest version that every engine has proved, and the last ones; a version is dated when it was first seen so."""
    newest = None if told is None else told.policy
    if told is None or newest is None or not told.converged:
        return before.policy, before.history
    if before.policy is not None and before.policy.version == newest.name:
        return before.policy, before.history
    report = told.report
    policy = PolicyStatus(
        version=newest.name,
        parent=report.policy_parent or None,
        step=newest.step,
        sha256=newest.sha256,
        uri=report.policy_uri or None,
        converged_at=now,
    )
    return policy, [policy, *before.history][:HISTORY]


def _engines(seen: Snapshot, before: JobStatus) -> list[EngineStatus]:
    """As the learner tells; of what it does not answer for, nothing is claimed."""
    told = seen.speaking
    if told is None:
        return [EngineStatus(name=engine.name, state="unknown") for engine in before.engines]
    return [
        EngineStatus(
            name=engine.name,
            version=_name(engine.policy),
            lag=engine.lag,
            state=engine.state,
            message=engine.message,
        )
        for engine in report_engines(told.report)
    ]


def _name(message: PolicyMessage) -> str | None:
    policy = policy_from_proto(message)
    return None if policy is None else policy.name


def report_engines(report: pb.WatchProgressResponse) -> list[pb.EngineProgress]:
    """The engines that are told of: those with trouble first where there are too many."""
    engines = sorted(report.engines, key=lambda engine: (engine.state == "serving", -engine.lag))
    return sorted(engines[:ENGINES_TOLD], key=lambda engine: engine.name)


def _shown(status: JobStatus, conditions: list[Condition], told: Told | None) -> Shown:
    progress, policy = status.progress, status.policy
    return Shown(
        phase=phase(conditions),
        step=f"{progress.step}/{progress.total_steps}" if progress.total_steps else "",
        policy="" if policy is None else f"v{policy.step}",
        converged="" if told is None else f"{told.report.engines_converged}/{told.report.engines_total}",
        lag=max((engine.lag for engine in status.engines), default=0),
        reward="" if progress.reward is None else f"{progress.reward:.2f}",
    )
