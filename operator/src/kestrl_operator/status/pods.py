"""What is wrong with the pods of a role. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kestrl._shared.plan.components import Role
from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.scalars import format_duration
from kestrl_operator.state.snapshot import OUT_OF_MEMORY, Pod, Snapshot
from kestrl_operator.status.conditions import NOT_OBSERVED, ConditionStatus, Observation, Type

ROLLING = (Role.FILES, Role.ROLLOUT, Role.AGENT, Role.TOOLS, Role.JUDGE)
"""Roles without which no episode ends."""


class PodProblem(NamedTuple):
    """Why a pod does not do its work."""

    reason: str
    """The reason of `status.conditions.LOST`; empty if it is none of them."""
    message: str

    def reason_or(self, default: str) -> str:
        return self.reason or default


def pod_problem(pods: Sequence[Pod], lost_nodes: Mapping[str, str]) -> PodProblem | None:
    """What is wrong with the pods; None if nothing is.

    Args:
        pods: The pods of a role.
        lost_nodes: Nodes that are not ready, with what Kubernetes says of them.
    """
    for pod in pods:
        if not pod.ready and pod.node in lost_nodes:
            # What its containers last said is older than the loss of the node.
            return PodProblem("NodeNotReady", f"{pod.name}: node {pod.node}: {lost_nodes[pod.node]}")
    for pod in pods:
        if pod.unstartable:
            return PodProblem("", f"{pod.name}: {pod.unstartable}")
        for item in pod.ended:
            restart_text = f" (restarted {pod.restarts} times)" if pod.restarts else ""
            reason = OUT_OF_MEMORY if item.reason == OUT_OF_MEMORY else ""
            return PodProblem(reason, f"{pod.name}: {item}{restart_text}")
    return None


def downloading(pods: Sequence[Pod], spec: JobSpec) -> str:
    """What is said while the files that tools read are downloaded; empty once they are there."""
    if not spec.data.files or any(pod.ready for pod in pods):
        return ""
    limit = format_duration(sum(file.timeout for file in spec.data.files))
    many = f"{len(spec.data.files)} file{'s' * (len(spec.data.files) > 1)} of spec.data.files"
    where = f"; `kubectl logs {pods[0].name} -c prepare` says how far it is" if pods else ""
    return f"{many} of up to {spec.data.files_gib} GiB are downloaded within {limit}{where}"


def tracked(snapshot: Snapshot, *, parked: bool) -> Iterator[Observation]:
    """Whether the job's MLflow server has received the run.

    Args:
        snapshot: The snapshot of the job.
        parked: Whether no pod is to run. What failed until then stays as it was observed: it was not sent.
    """
    tracking = None if snapshot.job is None else snapshot.job.spec.telemetry.mlflow
    kind, followers = Type.TRACKED, [pod for pod in snapshot.followers if not pod.over and not pod.deleting]
    if tracking is None or parked:
        message = "the job names no MLflow server" if tracking is None else "no pod is to send the run"
        if tracking is None or snapshot.condition(kind)[1] != "Failing":
            yield Observation(type=kind, status=ConditionStatus.UNKNOWN, reason=NOT_OBSERVED, message=message)
        return
    problem = pod_problem(followers, snapshot.lost_nodes)
    if any(pod.ready for pod in followers):
        yield Observation(type=kind, status=ConditionStatus.TRUE, reason="Sending", message=f"to {tracking.uri}")
    elif problem is not None:
        yield Observation(type=kind, status=ConditionStatus.FALSE, reason="Failing", message=problem.message)
    else:
        unscheduled = next((pod.unscheduled for pod in followers if pod.unscheduled), "")
        yield Observation(type=kind, status=ConditionStatus.FALSE, reason="Starting", message=unscheduled)
