"""Sample data for tests of the operator's pure parts: a job, its pods, reports of its learner, and a snapshot of all of
it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl._shared.rpc.codec import run_phase_to_proto, serving_state_to_proto
from kestrl._shared.rpc.run_report import report_of, state_of
from kestrl._shared.spec import AgentRLJob, read_job
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import failure_to_proto, policy_to_proto
from kestrl.errors import Boundary, Failure
from kestrl.runstate.states import RunPhase, ServingState
from kestrl_operator.state.snapshot import (
    ATTEMPTS,
    FORGIVEN,
    RESTARTS,
    ContainerEnd,
    LearnerReport,
    Pod,
    Snapshot,
    Workload,
)

QUICKSTART = Path(__file__).parents[3] / "examples" / "email-search" / "quickstart.yaml"
NOW = 1_800_000_000.0
NAME, NAMESPACE, UID = "email-search", "team-a", "5f0c2a9b-0000-4000-8000-000000000000"


@cache
def job(*overrides: str) -> AgentRLJob:
    """The quickstart: two engines, one worker."""
    return read_job(QUICKSTART, overrides)


def at(seconds: float) -> str:
    """A time relative to that of all snapshots, in Kubernetes' format."""
    return datetime.fromtimestamp(NOW + seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def pod(role: Role, number: int = 0, **changes: Any) -> Pod:
    """A pod that runs and is ready."""
    plain: dict[str, Any] = {
        "name": f"{NAME}-{role}-{number}",
        "uid": f"{role}-{number}",
        "role": role,
        "phase": "Running",
        "ready": True,
        "address": "10.0.0.7",
        "scheduled": True,
        "unscheduled": "",
        "gated": False,
        "begun": True,
        "deleting": False,
        "made": NOW - 600,
        "attempts": 0,
        "job_restarts": 0,
        "unstartable": "",
        "ended": (),
        "restarts": 0,
    }
    return Pod(**(plain | changes))


def waiting(role: Role, number: int = 0, **changes: Any) -> Pod:
    """A pod without a node."""
    return pod(
        role,
        number,
        **({"phase": "Pending", "ready": False, "address": "", "scheduled": False, "begun": False} | changes),
    )


def ended(container: str, reason: str = "Error", code: int = 1, message: str = "") -> ContainerEnd:
    return ContainerEnd(container=container, reason=reason, code=code, message=message)


def all_pods(*others: Pod) -> list[Pod]:
    """Every pod of the job, with pods of the same name replaced by `others`."""
    roles = (Role.INFERENCE, Role.ROLLOUT, Role.TOOLS, Role.JUDGE, Role.LEARNER)
    made = {item.name: item for item in (*map(pod, roles), pod(Role.INFERENCE, 1))}
    return list((made | {item.name: item for item in others}).values())


def workloads(
    attempts: int = 0, restarts: int = 0, learner_replicas: int = 1, forgiven: int = 0
) -> dict[Role, Workload]:
    counts = {ATTEMPTS: str(attempts), RESTARTS: str(restarts), FORGIVEN: str(forgiven)}
    learner = Workload(role=Role.LEARNER, replicas=learner_replicas, annotations=counts)
    others = (Role.INFERENCE, Role.ROLLOUT, Role.TOOLS, Role.JUDGE)
    return {Role.LEARNER: learner, **{role: Workload(role=role, replicas=1, annotations={}) for role in others}}


def version(step: int, digest: str = "1f0c") -> PolicyVersion:
    return PolicyVersion(job=NAME, step=step, sha256=digest * 16)


def engine(number: int, step: int | None = 14, **changes: Any) -> pb.EngineProgress:
    """The learner's report of an engine that has verified the version of a step; None for no version."""
    proved = None if step is None else policy_to_proto(version(step))
    plain = {"name": f"engine-{number}", "policy": proved, "state": ServingState.SERVING} | changes
    return pb.EngineProgress(**plain | {"state": serving_state_to_proto(ServingState(plain["state"]))})


def report(phase: str = "training", **changes: Any) -> pb.WatchProgressResponse:
    """A learner's report at step 14 of 26, with both engines on its newest version."""
    plain: dict[str, Any] = {
        "phase": run_phase_to_proto(RunPhase(phase)) if phase else None,
        "step": 14,
        "total_steps": 26,
        "means": {"reward": 0.5, "answer_correct": 0.25},
        "policy": policy_to_proto(version(14)),
        "policy_uri": "s3://bucket/email-search/adapters/14",
        "policy_parent": version(13).name,
        "engines_converged": 2,
        "engines_total": 2,
        "engines": [engine(0), engine(1)],
        "workers": 1,
        "groups_running": 8,
        "checkpoint_step": 10,
    }
    return pb.WatchProgressResponse(**(plain | changes))


def refused(wait: str, **changes: Any) -> pb.WatchProgressResponse:
    """A report of a learner that waits for a tool's credential."""
    state = state_of(report(**changes))
    return report_of(state.but(tools=state.tools.but(wait=wait)))


def over(phase: str, **changes: Any) -> pb.WatchProgressResponse:
    """The last report of a run that is over: engines and workers are no longer listed."""
    return report(phase, **({"engines": [], "workers": 0, "groups_running": 0} | changes))


def failed(boundary: Boundary = Boundary.ENGINE, code: str = "no_engine_proved", **changes: Any) -> Any:
    """The last report of a failed run."""
    failure = Failure(boundary=boundary, code=code, message="it went wrong", component="learner-0")
    return over("failed", **({"failure": failure_to_proto(failure), "message": "it went wrong"} | changes))


def learner_report(given: pb.WatchProgressResponse, number: int = 0, **changes: Any) -> LearnerReport:
    """A report from the learner's pod of that number."""
    plain: dict[str, Any] = {
        "pod": f"learner-{number}",
        "at": NOW,
        "state": state_of(given),
        "stepped": NOW - 20,
        "pace": 30.0,
    }
    return LearnerReport(**(plain | changes))


def condition(kind: str, status: str, reason: str, seconds: float = -300, **changes: Any) -> dict[str, Any]:
    plain = {"type": kind, "status": status, "reason": reason, "message": "", "observedGeneration": 1}
    return {**plain, "lastTransitionTime": at(seconds), **changes}


def status(*conditions: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A current status."""
    return {"conditions": list(conditions), **fields}


def snapshot(**changes: Any) -> Snapshot:
    """A job that trains."""
    plain: dict[str, Any] = {
        "now": NOW,
        "name": NAME,
        "namespace": NAMESPACE,
        "uid": UID,
        "generation": 3,
        "job": job(),
        "pods": all_pods(),
        "workloads": workloads(),
        "last_report": learner_report(report()),
    }
    return Snapshot(**(plain | changes))
