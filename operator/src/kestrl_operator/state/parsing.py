"""Typed records of pods, workloads and nodes, from the objects of the API server. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kestrl._shared.plan.components import Role
from kestrl_operator.state.accelerators import Node
from kestrl_operator.state.snapshot import (
    ATTEMPTS,
    MANAGER,
    OUT_OF_MEMORY,
    RESTARTS,
    UID_LABEL,
    ContainerEnd,
    Pod,
    Workload,
    count_of,
    seconds_of,
)

Object = Mapping[str, Any]
UNSTARTABLE = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError", "InvalidImageName",
     "RegistryUnavailable", "SignatureValidationFailed", "CreateContainerConfigError", "PreCreateHookError",
     "CreateContainerError", "PreStartHookError", "RunContainerError"}
)  # fmt: skip
"""Waiting reasons of a container that waiting alone does not resolve."""
GATES = "schedulingGates"
MANAGED_LABEL = "kueue.x-k8s.io/managed"
"""Label that Kueue puts on the pods that it admits."""
LONGEST_LOG = 2048
"""Characters of a log that are kept: the kubelet keeps as many bytes of it in a pod's status."""
NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of ends of containers whose program was never started: the message is the container runtime's, not a log."""
NO_PROGRAM = re.compile(r'exec: "([^"]+)": executable file not found')
"""What the container runtime says of an image without the program to run."""
FIRST_SIGNAL = 128
"""Exit codes above this one are of processes that a signal ended."""
CAUSE = re.compile(r"^(?:\([^)]*\) )?(?:error: |[\w.]*(?:Error|Exception|Exit|Interrupt)(?::|$))")
"""A line that says why a program ended: that of a kestrl program, or the last one of a traceback, before which vLLM
names its process."""
PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")
"""Prefixes of the taints that Kubernetes sets on a node that is not ready now; they do not affect what can ever be
scheduled."""


def pod_of(body: Object) -> Pod | None:
    """The pod of a job; None if it does not belong to one."""
    metadata, spec, status = body["metadata"], body.get("spec", {}), body.get("status", {})
    role = metadata.get("labels", {}).get("kestrl.dev/role")
    if role not in set(Role):
        return None
    conditions = {item["type"]: item for item in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    statuses = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        role=Role(role),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        address=status.get("podIP", ""),
        scheduled=bool(spec.get("nodeName")),
        unscheduled=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        gated=bool(spec.get(GATES)),
        begun=any(_has_begun(item) for item in statuses),
        deleting="deletionTimestamp" in metadata,
        made=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        attempts=count_of(metadata.get("annotations", {}).get(ATTEMPTS, "")),
        job_restarts=count_of(metadata.get("annotations", {}).get(RESTARTS, "")),
        unstartable=next(unstartable(statuses), ""),
        ended=tuple(ended(statuses)),
        restarts=sum(item.get("restartCount", 0) for item in statuses),
        owner=next(
            (_kind_and_uid(item) for item in metadata.get("ownerReferences", ()) if item.get("controller")), ("", "")
        ),
        job=metadata["labels"].get(UID_LABEL, ""),
        node=spec.get("nodeName", ""),
        ready_since=seconds_of(conditions.get("Ready", {}).get("lastTransitionTime")) or 0.0,
        admitted=metadata["labels"].get(MANAGED_LABEL) == "true",
    )


def _kind_and_uid(reference: Object) -> tuple[str, str]:
    return reference.get("kind", ""), reference.get("uid", "")


def _has_begun(status: Object) -> bool:
    return "waiting" not in status.get("state", {"waiting": {}}) or bool(status.get("lastState"))


def unstartable(statuses: Iterable[Object]) -> Iterator[str]:
    """Why containers cannot start."""
    for item in statuses:
        waiting = item.get("state", {}).get("waiting", {})
        if waiting.get("reason") in UNSTARTABLE:
            yield f"{item['name']}: {waiting['reason']}: {waiting.get('message', '')}"


def ended(statuses: Iterable[Object]) -> Iterator[ContainerEnd]:
    """Failed last runs. A container that is ready again is left out, since its restart count covers it. One that ends
    without an error is included if it keeps ending.
    """
    for item in statuses:
        state = item.get("state", {})
        last = state.get("terminated") or (
            item.get("lastState", {}).get("terminated") if not item.get("ready") else None
        )
        crash_looping = state.get("waiting", {}).get("reason") == "CrashLoopBackOff"
        if last and (last.get("exitCode") or last.get("signal") or crash_looping):
            yield ContainerEnd(
                container=item["name"],
                reason=last.get("reason", "Error"),
                code=last.get("exitCode", 0),
                message=_why_ended(last),
                at=last.get("finishedAt") or "",
                log=last.get("message", "")[-LONGEST_LOG:],
                running="running" in state,
            )


def _why_ended(last: Object) -> str:
    """Why a container ended, as far as its last state says."""
    reason, message = last.get("reason"), last.get("message", "")
    if reason in NOT_STARTED:
        absent = NO_PROGRAM.search(message)
        return message[-500:] if absent is None else f"its image has no program {absent[1]!r}; add it to the image"
    # What is killed says nothing of it: its last line is about something else.
    killed = last.get("signal") or reason == OUT_OF_MEMORY or last.get("exitCode", 0) > FIRST_SIGNAL
    return "" if killed else termination_message(message)


def termination_message(text: str) -> str:
    """Why a program ended, as its last lines say: the last line `error: ...` of a kestrl program, else the last one of
    a traceback. Empty if no line says why: the last line of a log is the cause of nothing.
    """
    causes = [line for line in text.splitlines() if CAUSE.match(line)]
    errors = [line for line in causes if line.startswith("error: ")]
    return (errors or causes or [""])[-1].removeprefix("error: ")[:500]


def workload_of(body: Object) -> Workload | None:
    """The workload of a job; None if it does not belong to one."""
    metadata = body["metadata"]
    role = metadata.get("labels", {}).get("app.kubernetes.io/component")
    if role not in set(Role):
        return None
    return Workload(
        role=Role(role),
        replicas=body.get("spec", {}).get("replicas", 1),
        applied_replicas=any(map(_applies_replicas, metadata.get("managedFields", ()))),
        annotations={
            name: text for name, text in metadata.get("annotations", {}).items() if name.startswith("kestrl.dev/")
        },
    )


def _applies_replicas(entry: Object) -> bool:
    applied = entry.get("operation") == "Apply" and entry.get("manager") == MANAGER
    return applied and "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})


def node_of(body: Object) -> Node:
    """The typed form of a node object."""
    metadata, spec = body["metadata"], body.get("spec", {})
    return Node(
        name=metadata["name"],
        labels=metadata.get("labels", {}),
        taints=[item for item in spec.get("taints", ()) if not item.get("key", "").startswith(PASSING_TAINTS)],
        allocatable=body.get("status", {}).get("allocatable", {}),
        schedulable=not spec.get("unschedulable", False),
        lost=_loss(body.get("status", {}).get("conditions", ())),
    )


def _loss(conditions: Iterable[Object]) -> str:
    """What Kubernetes says of a node that is not ready; empty if it is, or does not say."""
    ready = next((item for item in conditions if item["type"] == "Ready"), None)
    if ready is None or ready["status"] == "True":
        return ""
    return ready.get("message", "") or ready.get("reason", "") or "not ready"
