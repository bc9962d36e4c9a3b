"""The status of a job, from what was observed: conditions, progress, lineage and what `kubectl get` prints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, cast

from kestrl.api.common.v1.common_pb2 import PolicyVersion as PolicyMessage
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.plan.components import Role
from kestrl.rpc.codec import policy_from_proto
from kestrl.spec.status import Condition, EngineStatus, JobStatus, PolicyStatus, ProgressStatus, ResultStatus, Shown
from kestrl_operator.conditions import Observed, Truth, Type, joined, phase, shortened
from kestrl_operator.observe import Snapshot, Told, number
from kestrl_operator.policies import Decision, Stage, began, has_ended, held
from kestrl_operator.render.network import selector
from kestrl_operator.truths import observed, proved_by_all

HISTORY = 10
ENGINES_TOLD = 100
"""More of them are counted, not listed: an object has a largest size."""
LONGEST_MESSAGE = 1000
"""Of an engine."""
FAILURES_TOLD = 64
"""Kinds of them: as many as the CRD takes, the most frequent ones."""
LONGEST_ETA = 1e9


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
    policy, history = _lineage(before, seen, now)
    running = decision.stage is Stage.RUNNING
    status = JobStatus(
        observed_generation=seen.generation,
        conditions=conditions,
        progress=before.progress if told is None else _progress(told),
        policy=policy,
        result=_result(before, seen, decision),
        history=history,
        engines=[] if decision.parked else _engines(seen, before),
        rollout_replicas=len(seen.of(Role.ROLLOUT)),
        rollout_selector=",".join(f"{name}={value}" for name, value in selector(seen.name, Role.ROLLOUT).items()),
        started_at=_started(seen, before, running=running, now=now),
        finished_at=before.finished_at if has_ended(seen) else now if decision.ended else None,
        restarts=decision.attempts,
    )
    status = status.model_copy(update={"shown": _shown(status, conditions, told)})
    return status.model_dump(by_alias=True, exclude_none=True)


def with_failure(
    status: Mapping[str, Any], why: str, *, generation: int, now: float, reason: str = "OperatorFailed"
) -> dict[str, Any]:
    """A status as it stands, but for one thing: the operator fails at its work on this job. Pure.

    Args:
        status: As it stands.
        why: What a person is to know.
        generation: Of the spec that it failed for.
        now: Seconds since 1970.
        reason: Of the condition Ready.
    """
    before = JobStatus.model_validate(dict(status))
    failed = Observed(type=Type.READY, truth=Truth.FALSE, reason=reason, message=why)
    conditions = joined(before.conditions, [failed], generation=generation, now=written(now))
    after = before.model_copy(
        update={"conditions": conditions, "shown": before.shown.model_copy(update={"phase": phase(conditions)})}
    )
    return after.model_dump(by_alias=True, exclude_none=True)


def without_empties(given: Mapping[str, Any]) -> dict[str, Any]:
    """A map without what is empty in it: what is not there means the same, and can always be applied. Pure."""
    made: dict[str, Any] = {}
    for name, value in given.items():
        kept = without_empties(cast("dict[str, Any]", value)) if isinstance(value, dict) else value
        if kept not in ({}, []):
            made[name] = kept
    return made


def _started(seen: Snapshot, before: JobStatus, *, running: bool, now: str) -> str | None:
    begins = running and began(seen) is None and not held(seen) and (not seen.problem or bool(seen.workloads))
    return now if begins else before.started_at


def written(seconds: float) -> str:
    """A time as Kubernetes writes it."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _progress(told: Told) -> ProgressStatus:
    report = told.report
    return ProgressStatus(
        step=report.step,
        total_steps=report.total_steps,
        reward=told.mean("reward"),
        answer_correct=told.mean("answer_correct"),
        episodes_per_second=number(report.episodes_per_second, 2) or None,
        tokens_per_second=number(report.tokens_per_second, 1) or None,
        eta_seconds=int(report.eta_seconds) or None if 0 < report.eta_seconds < LONGEST_ETA else None,
        failures=dict(sorted(report.failures.items(), key=lambda item: (-item[1], item[0]))[:FAILURES_TOLD]),
    )


def _result(before: JobStatus, seen: Snapshot, decision: Decision) -> ResultStatus | None:
    """The adapter of the run, from the moment the job succeeds."""
    told = seen.speaking
    if decision.ended is None or decision.ended[0] != "Completed" or told is None or told.policy is None:
        return before.result
    return ResultStatus(version=told.policy.name, sha256=told.policy.sha256, uri=told.report.policy_uri)


def _lineage(before: JobStatus, seen: Snapshot, now: str) -> tuple[PolicyStatus | None, list[PolicyStatus]]:
    """The newest version that every engine has proved, and the last ones; a version is dated when it was first seen so."""
    told = seen.speaking
    newest = None if told is None else told.policy
    if told is None or newest is None or seen.job is None or not proved_by_all(seen, seen.job.spec):
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
    if told is None or not told.report.engines:
        return [EngineStatus(name=engine.name, state="unknown") for engine in before.engines]
    return [
        EngineStatus(
            name=engine.name,
            version=_name(engine.policy),
            lag=engine.lag,
            state=engine.state,
            message=shortened(engine.message, LONGEST_MESSAGE),
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
        converged="" if told is None or not told.report.engines else f"{told.proved}/{told.report.engines_total}",
        lag=max((engine.lag for engine in status.engines), default=0),
        reward="" if progress.reward is None else f"{progress.reward:.2f}",
    )
