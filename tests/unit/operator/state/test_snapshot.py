"""From objects as Kubernetes writes them to the operator's snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.samples import (
    NOW,
    all_pods,
    at,
    engine,
    failed,
    learner_report,
    over,
    pod,
    report,
    snapshot,
    version,
    workloads,
)

from kestrl._shared.plan.components import Role
from kestrl.api.learner.v1 import learner_pb2 as pb
from kestrl.errors import Boundary, Failure
from kestrl_operator.state.parsing import LONGEST_LOG, node_of, pod_of, termination_message, workload_of
from kestrl_operator.state.snapshot import ContainerEnd, Pod, is_input, seconds_of

MADE = "2026-03-01T10:00:00Z"


def written(
    *containers: dict[str, Any],
    init: dict[str, Any] | None = None,
    phase: str = "Running",
    conditions: dict[str, dict[str, str]] | None = None,
    node: str | None = "node-1",
    gates: tuple[str, ...] = (),
    metadata: dict[str, Any] | None = None,
    **status: Any,
) -> dict[str, Any]:
    """An engine pod as returned by the API server."""
    spec: dict[str, Any] = {"containers": [{"name": "engine"}, {"name": "inference"}]}
    if node is not None:
        spec["nodeName"] = node
    if gates:
        spec["schedulingGates"] = [{"name": name} for name in gates]
    progress = [{"type": kind, **rest} for kind, rest in (conditions or {}).items()]
    made: dict[str, Any] = {
        "name": "email-search-inference-0",
        "namespace": "team-a",
        "uid": "p-1",
        "creationTimestamp": MADE,
        "labels": {"kestrl.dev/job": "email-search", "kestrl.dev/role": "inference"},
        "annotations": {"kestrl.dev/restarts": "2"},
    }
    now: dict[str, Any] = {"phase": phase, "conditions": progress, **status}
    if init is not None:
        now["initContainerStatuses"] = [init]
    if containers:
        now["containerStatuses"] = list(containers)
    return {"metadata": {**made, **(metadata or {})}, "spec": spec, "status": now}


def container(name: str = "engine", *, ready: bool = False, restarts: int = 0, **states: Any) -> dict[str, Any]:
    return {"name": name, "ready": ready, "restartCount": restarts, "state": {}, "lastState": {}, **states}


def waits(reason: str, message: str | None = None, **others: Any) -> dict[str, Any]:
    state = {"reason": reason} if message is None else {"reason": reason, "message": message}
    return container(**({"state": {"waiting": state}} | others))


def terminated(code: int, reason: str = "Error", message: str | None = None) -> dict[str, Any]:
    state = {"exitCode": code, "reason": reason, "startedAt": MADE, "finishedAt": MADE, "containerID": "containerd://1"}
    return {"terminated": state if message is None else {**state, "message": message}}


RUNS = {"running": {"startedAt": MADE}}
READY = {"Ready": {"status": "True"}, "PodScheduled": {"status": "True"}}
NOT_READY = {"Ready": {"status": "False", "reason": "ContainersNotReady"}, "PodScheduled": {"status": "True"}}
NO_NODE = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
PREPARE_WORDS = """\
2026-03-01 10:00:01 INFO kestrl: fetching
error: spec.model.base: pvc://models/qwen does not exist in its claim
"""


STATES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("it was made just now", written(phase="Pending", node=None), {"phase": "Pending", "scheduled": False}),
    (
        "no node takes it",
        written(
            phase="Pending",
            node=None,
            conditions={"PodScheduled": {"status": "False", "reason": "Unschedulable", "message": NO_NODE}},
        ),
        {"scheduled": False, "unscheduled": NO_NODE},
    ),
    (
        "a queue holds it back",
        written(
            phase="Pending",
            node=None,
            gates=("kueue.x-k8s.io/admission",),
            conditions={
                "PodScheduled": {
                    "status": "False",
                    "reason": "SchedulingGated",
                    "message": "Scheduling is blocked due to non-empty scheduling gates",
                }
            },
        ),
        {"scheduled": False, "unscheduled": "", "gated": True},
    ),
    (
        "its image is pulled",
        written(waits("ContainerCreating"), phase="Pending", conditions=NOT_READY),
        {"scheduled": True, "unstartable": "", "ended": ()},
    ),
    (
        "it prepares",
        written(
            waits("PodInitializing"),
            init=container("prepare", state=RUNS),
            phase="Pending",
            conditions=NOT_READY,
        ),
        {"unstartable": "", "ended": ()},
    ),
    (
        "its preparation fails",
        written(
            waits("PodInitializing"),
            init=container(
                "prepare",
                restarts=3,
                state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed"}},
                lastState=terminated(2, message=PREPARE_WORDS),
            ),
            phase="Pending",
            conditions=NOT_READY,
        ),
        {
            "unstartable": "",
            "restarts": 3,
            "ended": (
                ContainerEnd(
                    container="prepare",
                    reason="Error",
                    code=2,
                    message="spec.model.base: pvc://models/qwen does not exist in its claim",
                ),
            ),
        },
    ),
    (
        "its preparation is tried again",
        written(init=container("prepare", restarts=1, state=RUNS, lastState=terminated(1)), phase="Pending"),
        {"ended": (ContainerEnd(container="prepare", reason="Error", code=1, message=""),), "restarts": 1},
    ),
    (
        "its preparation went well in the end",
        written(
            container(ready=True, state=RUNS),
            init=container(
                "prepare", ready=True, restarts=1, state=terminated(0, "Completed"), lastState=terminated(1)
            ),
            conditions=READY,
        ),
        {"ended": (), "ready": True, "restarts": 1},
    ),
    (
        "it runs",
        written(container(ready=True, state=RUNS), conditions=READY, podIP="10.0.0.9"),
        {"phase": "Running", "ready": True, "address": "10.0.0.9", "scheduled": True, "restarts": 0, "ended": ()},
    ),
    (
        "its engine was killed for memory and waits to be started again",
        written(
            container(
                restarts=4,
                state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 1m20s restarting failed"}},
                lastState=terminated(137, "OOMKilled"),
            ),
            container("inference", ready=True, state=RUNS),
            conditions=NOT_READY,
        ),
        {
            "ready": False,
            "unstartable": "",
            "restarts": 4,
            "ended": (ContainerEnd(container="engine", reason="OOMKilled", code=137, message=""),),
        },
    ),
    (
        "its engine ended this moment",
        written(container(state=terminated(1, message="Traceback:\nKeyError: 'x'")), conditions=NOT_READY),
        {"ended": (ContainerEnd(container="engine", reason="Error", code=1, message="KeyError: 'x'"),)},
    ),
    (
        "a signal ended it and there is no exit code",
        written(container(state={"terminated": {"signal": 9, "exitCode": 0}}), conditions=NOT_READY),
        {"ended": (ContainerEnd(container="engine", reason="Error", code=0, message=""),)},
    ),
    (
        "it runs again and is not ready yet",
        written(container(restarts=1, state=RUNS, lastState=terminated(137, "OOMKilled")), conditions=NOT_READY),
        {"ended": (ContainerEnd(container="engine", reason="OOMKilled", code=137, message=""),), "restarts": 1},
    ),
    (
        "it was killed after a line about something else",
        written(
            container(state=terminated(137, "OOMKilled", message="error: resumed at step 7")), conditions=NOT_READY
        ),
        {"ended": (ContainerEnd(container="engine", reason="OOMKilled", code=137, message=""),)},
    ),
    (
        "it runs again after a restart",
        written(
            container(ready=True, restarts=1, state=RUNS, lastState=terminated(137, "OOMKilled")), conditions=READY
        ),
        {"ended": (), "restarts": 1, "ready": True},
    ),
    (
        "it was asked to end and ended without an error",
        written(container(state=terminated(0, "Completed")), conditions=NOT_READY),
        {"ended": ()},
    ),
    (
        "it ends without an error again and again",
        written(
            container(
                restarts=5, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=terminated(0, "Completed")
            ),
            conditions=NOT_READY,
        ),
        {"ended": (ContainerEnd(container="engine", reason="Completed", code=0, message=""),)},
    ),
    (
        "kubelet evicted it",
        written(
            container(state=terminated(137)),
            phase="Failed",
            reason="Evicted",
            message="The node was low on resource: memory.",
            conditions={"DisruptionTarget": {"status": "True", "reason": "TerminationByKubelet"}, **NOT_READY},
        ),
        {"phase": "Failed", "over": True, "deleting": False},
    ),
    (
        "its node was shut down",
        written(
            container(state=terminated(0, "Completed")),
            phase="Failed",
            reason="Terminated",
            message="Pod was terminated in response to imminent node shutdown.",
        ),
        {"over": True},
    ),
    (
        "it is being deleted",
        written(container(ready=True, state=RUNS), conditions=READY, metadata={"deletionTimestamp": MADE}),
        {"deleting": True, "over": False},
    ),
    (
        "its node does not answer",
        written(phase="Unknown", conditions={"Ready": {"status": "Unknown"}}),
        {"ready": False, "over": False},
    ),
]


@pytest.mark.parametrize(("given", "known"), [state[1:] for state in STATES], ids=[state[0] for state in STATES])
def test_a_pod_is_read_with_its_state(given: dict[str, Any], known: dict[str, Any]) -> None:
    found = pod_of(given)
    assert found is not None
    assert {name: getattr(found, name) for name in known} == known
    assert (found.name, found.uid, found.role) == ("email-search-inference-0", "p-1", Role.INFERENCE)
    assert (found.made, found.job_restarts, found.attempts) == (seconds_of(MADE), 2, 0)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ErrImagePull", 'rpc error: code = NotFound desc = failed to resolve reference "r/engine:2": not found'),
        ("ImagePullBackOff", 'Back-off pulling image "r/engine:2"'),
        ("ErrImageNeverPull", 'Container image "r/engine:2" is not present with pull policy of Never'),
        ("InvalidImageName", 'Failed to apply default image tag "R/engine": repository name must be lowercase'),
        ("ImageInspectError", "Failed to inspect image"),
        ("RegistryUnavailable", "the registry is unavailable"),
        ("SignatureValidationFailed", "the image's signature is not valid"),
        ("CreateContainerConfigError", 'secret "s3" not found'),
        ("CreateContainerError", "failed to reserve container name"),
        ("RunContainerError", "failed to create shim task: OCI runtime create failed"),
    ],
)
def test_a_container_that_waiting_does_not_start_is_reported(reason: str, message: str) -> None:
    found = pod_of(written(waits(reason, message), container("inference", ready=True, state=RUNS), phase="Pending"))
    assert found is not None
    assert found.unstartable == f"engine: {reason}: {message}"


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing", "CrashLoopBackOff"])
def test_a_container_that_is_being_created_can_start(reason: str) -> None:
    found = pod_of(written(waits(reason), phase="Pending"))
    assert found is not None
    assert found.unstartable == ""


@pytest.mark.parametrize(
    ("annotation", "count"), [("7", 7), ("", 0), ("-1", 0), ("many", 0), ("²", 0), ("9" * 5000, 0), ("12 ", 0)]
)
def test_invalid_counts_are_zero(annotation: str, count: int) -> None:
    marks = {"kestrl.dev/attempts": annotation, "kestrl.dev/restarts": annotation}
    found = pod_of(written(metadata={"annotations": marks}))
    assert found is not None
    assert (found.attempts, found.job_restarts) == (count, count)
    learner = workload_of(
        {"metadata": {"labels": {"app.kubernetes.io/component": "learner"}, "annotations": marks}, "spec": {}}
    )
    assert learner is not None
    assert snapshot(workloads={Role.LEARNER: learner}).attempts == count


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
            'failed: unable to start container process: exec: "python3": executable file not found in $PATH',
            "its image has no program 'python3'; add it to the image",
        ),
        ("failed to create containerd task: exec format error", "failed to create containerd task: exec format error"),
    ],
)
def test_a_program_that_was_never_started_is_reported_with_the_runtimes_words(text: str, words: str) -> None:
    last = {"terminated": {"exitCode": 128, "reason": "StartError", "message": text}}
    crashed = container("agent", state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState=last)
    found = pod_of(written(crashed))
    assert found is not None
    assert [(item.reason, item.message) for item in found.ended] == [("StartError", words)]


@pytest.mark.parametrize("labels", [{}, {"app": "nginx"}, {"kestrl.dev/role": "cook"}])
def test_a_pod_of_no_job_is_ignored(labels: dict[str, str]) -> None:
    assert pod_of({"metadata": {"name": "x", "uid": "u", "labels": labels}}) is None
    assert pod_of({"metadata": {"name": "x", "uid": "u"}}) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ""),
        ("\n \n", ""),
        ("error: no space is left", "no space is left"),
        ("error: the first\nINFO going on\nerror: the last\nwarning: of no use\n", "the last"),
        ("Traceback (most recent call last):\n  File\nValueError: seven\n\n", "ValueError: seven"),
        ("(EngineCore pid=7) RuntimeError: no device\nINFO going down", "(EngineCore pid=7) RuntimeError: no device"),
        ("an error: in the middle", ""),
        ("INFO resumed at step 7; 4 scenarios are pending again", ""),
        (f"error: {'x' * 4000}", "x" * 500),
    ],
)
def test_the_termination_message_is_the_last_error(text: str, words: str) -> None:
    assert termination_message(text) == words


def test_a_container_end_has_a_readable_message() -> None:
    assert str(ContainerEnd(container="engine", reason="OOMKilled", code=137, message="")) == (
        "engine ended with OOMKilled (137)"
    )
    assert str(ContainerEnd(container="prepare", reason="Error", code=2, message="no model")) == (
        "prepare ended with Error (2): no model"
    )


def test_a_workload_keeps_only_the_operators_annotations() -> None:
    found = workload_of(
        {
            "metadata": {
                "name": "email-search-learner",
                "labels": {"app.kubernetes.io/component": "learner"},
                "annotations": {
                    "kestrl.dev/attempts": "2",
                    "kestrl.dev/restarts": "1",
                    "kestrl.dev/rendered": "0123",
                    "deployment.kubernetes.io/revision": "4",
                },
            },
            "spec": {"replicas": 0},
        }
    )
    assert found is not None
    assert (found.role, found.replicas, set(found.annotations)) == (
        Role.LEARNER,
        0,
        {"kestrl.dev/attempts", "kestrl.dev/restarts", "kestrl.dev/rendered"},
    )
    seen = snapshot(workloads={Role.LEARNER: found})
    assert (seen.attempts, seen.restarts) == (2, 1)
    assert workload_of({"metadata": {"name": "web", "labels": {"app.kubernetes.io/component": "web"}}}) is None


def test_a_job_without_a_learner_was_never_started_again() -> None:
    assert (snapshot(workloads={}).attempts, snapshot(workloads={}).restarts) == (0, 0)


def test_a_node_has_its_resources_and_no_transient_taints() -> None:
    found = node_of(
        {
            "metadata": {"name": "gpu-1", "labels": {"pool": "a100"}},
            "spec": {
                "unschedulable": True,
                "taints": [
                    {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
                    {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"},
                    {"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"},
                    {"key": "node.cloudprovider.kubernetes.io/uninitialized", "effect": "NoSchedule"},
                ],
            },
            "status": {"allocatable": {"cpu": "63500m", "nvidia.com/gpu": "8"}},
        }
    )
    assert (found.name, found.labels, found.schedulable) == ("gpu-1", {"pool": "a100"}, False)
    assert [taint["key"] for taint in found.taints] == ["nvidia.com/gpu"]
    assert found.allocatable["nvidia.com/gpu"] == "8"
    bare = node_of({"metadata": {"name": "new"}})
    assert (bare.labels, bare.taints, bare.allocatable, bare.schedulable) == ({}, [], {}, True)


GOING = pod(Role.LEARNER, deleting=True)


@pytest.mark.parametrize(
    ("pods", "connected", "counts"),
    [
        (all_pods(), True, True),
        (all_pods(), False, False),
        (all_pods(GOING), True, False),
        (all_pods(pod(Role.LEARNER, phase="Failed")), True, False),
        (all_pods(pod(Role.LEARNER, uid="another")), True, False),
        ([], True, False),
    ],
    ids=["it exists", "its stream broke", "it is being deleted", "it was evicted", "another was created", "it is gone"],
)
def test_only_reports_of_an_existing_learner_pod_count(pods: list[Pod], connected: bool, counts: bool) -> None:
    latest = learner_report(report(), connected=connected)
    assert snapshot(pods=pods, last_report=latest).live_report is (latest if counts else None)


def test_ended_pods_count_for_no_role() -> None:
    evicted, going = pod(Role.ROLLOUT, 1, phase="Failed"), pod(Role.ROLLOUT, 2, deleting=True)
    seen = snapshot(pods=[pod(Role.ROLLOUT), evicted, going])
    assert [item.name for item in seen.of(Role.ROLLOUT)] == ["email-search-rollout-0"]
    assert evicted not in seen.present
    assert going in seen.present
    assert going not in seen.staying


@pytest.mark.parametrize(
    ("given", "proved"),
    [
        (report(), 2),
        (report(engines_converged=1), 1),
        (report(engines=[engine(0), engine(1, 13)]), 1),
        (report(engines=[engine(0), engine(0)]), 1),
        (report(engines=[engine(0), engine(1, None)]), 1),
        (report(engines=[]), 0),
        (report(policy=None), 0),
        (pb.WatchProgressResponse(engines=[engine(0, None)], engines_converged=1), 0),
    ],
    ids=[
        "both",
        "the count says one",
        "one lags",
        "one twice",
        "one has none",
        "no engine is listed",
        "none new",
        "nothing",
    ],
)
def test_a_version_is_verified_by_each_engines_own_report(given: pb.WatchProgressResponse, proved: int) -> None:
    assert learner_report(given).verified == proved


def test_the_policy_is_the_one_in_the_report() -> None:
    assert learner_report(report()).policy == version(14)
    assert learner_report(report(policy=None)).policy is None


def test_a_learner_that_failed_without_a_reason_has_failed() -> None:
    failure = learner_report(over("failed", message="half a sentence")).failure
    assert failure is not None
    assert (str(failure.boundary), failure.code, failure.message) == ("infrastructure", "internal", "half a sentence")
    assert learner_report(report()).failure is None
    known = learner_report(failed(Boundary.ENGINE, "logprob_gap")).failure
    assert known is not None
    assert known.code == "logprob_gap"


def test_a_failure_of_a_running_learner_does_not_end_the_run() -> None:
    assert learner_report(report(failure=failed().failure)).failure is None


@pytest.mark.parametrize(
    ("boundary", "code", "persons"),
    [
        (Boundary.USER_CODE, "user_code_raised", True),
        (Boundary.INFRASTRUCTURE, "invalid_input", True),
        (Boundary.INFRASTRUCTURE, "place_unusable", True),
        (Boundary.INFRASTRUCTURE, "storage_inaccessible", True),
        (Boundary.INFRASTRUCTURE, "internal", False),
        (Boundary.ENGINE, "logprob_gap", False),
        (Boundary.TOOL, "tool_raised", False),
    ],
)
def test_user_errors_are_distinguished_from_other_failures(boundary: Boundary, code: str, persons: bool) -> None:
    assert is_input(Failure(boundary=boundary, code=code, message="")) is persons


def test_a_condition_that_is_not_in_the_status_is_unknown() -> None:
    stands = {"conditions": [{"type": "Ready", "status": "True", "reason": "Training"}]}
    assert snapshot(status=stands).condition("Ready") == ("True", "Training")
    assert snapshot(status=stands).condition("Suspended") == ("Unknown", "")
    assert snapshot().condition("Ready") == ("Unknown", "")


def test_times_are_seconds() -> None:
    assert seconds_of(at(0)) == NOW
    assert seconds_of("2026-03-01T10:00:00.5+01:00") == seconds_of("2026-03-01T09:00:00.5Z")
    assert seconds_of(None) is None


def test_counts_are_read_from_the_learners_workload() -> None:
    seen = snapshot(workloads=workloads(attempts=3, restarts=1))
    assert (seen.attempts, seen.restarts) == (3, 1)


@pytest.mark.parametrize(("state", "running"), [(RUNS, True), ({"waiting": {"reason": "CrashLoopBackOff"}}, False)])
def test_a_container_that_runs_again_is_no_waiting_one(state: dict[str, Any], running: bool) -> None:
    seen = pod_of(written(container(restarts=5, state=state, lastState=terminated(1)), conditions=NOT_READY))
    assert seen is not None
    assert [end.running for end in seen.ended] == [running]


def test_the_last_lines_of_a_crash_are_kept() -> None:
    end = {"exitCode": 1, "reason": "Error", "finishedAt": MADE, "message": "x" * 3000 + "KeyError: 'x'"}
    container = {"name": "engine", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    seen = pod_of(written({**container, "lastState": {"terminated": end}}))
    assert seen is not None
    assert seen.ended[0].at == MADE
    assert seen.ended[0].log.endswith("xKeyError: 'x'")
    assert len(seen.ended[0].log) == LONGEST_LOG
