"""The status of a job: everything in it comes from the snapshot."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from jsonschema import Draft4Validator
from tests.unit.operator.generated import snapshots
from tests.unit.operator.samples import (
    NOW,
    all_pods,
    at,
    condition,
    ended,
    engine,
    failed,
    job,
    learner_report,
    over,
    pod,
    refused,
    report,
    snapshot,
    status,
    version,
    waiting,
    workloads,
)
from tests.unit.operator.status.test_quota import TABLE as QUOTAS

from kestrl._shared.plan.components import Role
from kestrl._shared.rpc.run_report import report_of, state_of
from kestrl._shared.spec.crd import crd
from kestrl._shared.spec.status import JobStatus
from kestrl.api.common.v1.common_pb2 import SandboxInUse
from kestrl.episode.codec import policy_to_proto
from kestrl.errors import Boundary
from kestrl.runstate.history import IdleTime, LastStep
from kestrl_operator.state.snapshot import QUEUE_LABEL, Memory, Pod, Rest, Snapshot
from kestrl_operator.status.build import ENGINES_SHOWN, FAILURES_SHOWN, status_of, with_failure
from kestrl_operator.status.build import LONGEST_MESSAGE as LONGEST_OF_ENGINE
from kestrl_operator.status.conditions import LONGEST_MESSAGE, NOT_OBSERVED, QUARANTINED, REASONS, Type
from kestrl_operator.status.lifecycle import decide
from kestrl_operator.status.observations import UPDATE_SECONDS

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
QUEUED = {QUEUE_LABEL: "gpus"}
SUSPENDED = condition("Suspended", "True", "Released")
FILES = f"data.files=[{{uri: 's3://mails/mail.sqlite#sha256={'0' * 64}', size: 1Gi, timeout: 30m}}]"
OOM = ended("engine", "OOMKilled", 137)
LOST_NODE = {"gpu-7": "Kubelet stopped posting node status."}
UNSCHEDULED = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
NO_RUNTIME_CLASS = (
    'email-search-tools-7d4b9: Error creating: pods "email-search-tools-7d4b9-" is forbidden: pod rejected: '
    'RuntimeClass "gvisor" not found'
)
NO_MODEL = ended("prepare", code=2, message="spec.model.base: pvc://models/qwen does not exist in its claim")
NOT_LOADED = ended("agent", code=2, message="error: agent.run: mine:agent cannot be imported")
NO_STORE = ended("prepare", message="[infrastructure/storage_failed] s3://bucket: connection refused")
NO_OBJECT = ended("prepare", message="[infrastructure/not_found] s3://bucket/qwen holds no objects")
TRACKED = job("telemetry.mlflow={uri: 'http://mlflow'}")
Expected = dict[str, tuple[str, ...]]


def status_for(seen: Snapshot) -> dict[str, Any]:
    """The status for a snapshot."""
    return status_of(seen, decide(seen))


def condition_of(written: dict[str, Any], kind: str) -> tuple[str, str, str]:
    item = next(item for item in written["conditions"] if item["type"] == kind)
    return item["status"], item["reason"], item["message"]


def unready(role: Role, number: int = 0, **changes: Any) -> Pod:
    return pod(role, number, **({"ready": False} | changes))


NOT_READY = ("False", "NotReady")
TABLE: list[tuple[str, dict[str, Any], str, Expected]] = [
    (
        "the manifest is invalid",
        {"job": None, "problem": "spec.rewards: is required; add it", "pods": [], "last_report": None},
        "Rejected",
        {"Accepted": ("False", "Invalid", "spec.rewards: is required; add it"), "Ready": ("Unknown", NOT_OBSERVED)},
    ),
    (
        "nothing exists yet",
        {"pods": [], "workloads": {}, "last_report": None},
        "Pending",
        {
            "Accepted": ("True", "Valid"),
            "QuotaReserved": ("Unknown", NOT_OBSERVED, "the job names no queue"),
            "Scheduled": ("False", "Pending", "0 of 6 pods have a node"),
            "EnginesReady": ("False", "Starting", "0/2"),
            "PolicyConverged": (
                "Unknown",
                NOT_OBSERVED,
                "the learner, which reports it for every engine, does not answer",
            ),
            "RolloutsFlowing": ("False", "Starting"),
            "LearnerProgressing": ("False", "Starting"),
            "CheckpointDurable": ("Unknown", NOT_OBSERVED),
            "RewardHealthy": ("Unknown", NOT_OBSERVED),
            "Suspended": ("False", "Running"),
            "Ready": (*NOT_READY, "not Scheduled, EnginesReady, RolloutsFlowing, LearnerProgressing"),
            "Succeeded": ("False", "Running"),
        },
    ),
    (
        "its queue holds it back",
        {
            "labels": QUEUED,
            "pods": [waiting(Role.TOOLS, gated=True), waiting(Role.LEARNER, gated=True)],
            "last_report": None,
        },
        "Queued",
        {
            "QuotaReserved": ("False", "Waiting", "2 pods wait for queue gpus"),
            "Scheduled": ("False", "Pending", "0 of 6 pods have a node"),
        },
    ),
    (
        "its queue has admitted it",
        {"labels": QUEUED, "pods": [replace(item, admitted=True) for item in all_pods()]},
        "Running",
        {"QuotaReserved": ("True", "Admitted")},
    ),
    (
        "it names a queue, and nothing serves queues",
        {"labels": QUEUED},
        "Running",
        {
            "QuotaReserved": (
                "Unknown",
                NOT_OBSERVED,
                "no queue controller has marked the job's pods: does any serve queue gpus?",
            )
        },
    ),
    (
        "it has no pod yet that its queue could admit",
        {"labels": QUEUED, "pods": [], "last_report": None},
        "Pending",
        {"QuotaReserved": ("Unknown", NOT_OBSERVED, "there is no pod that queue gpus could admit")},
    ),
    (
        "no node takes an engine now",
        {"pods": all_pods(waiting(Role.INFERENCE, 1, unscheduled=UNSCHEDULED))},
        "Degraded",
        {
            "Scheduled": ("False", "Pending", f"email-search-inference-1: {UNSCHEDULED}"),
            "EnginesReady": ("False", "Starting", "1/2"),
            "Ready": ("False", "Degraded", "not Scheduled, EnginesReady"),
        },
    ),
    (
        "Kubernetes creates no pods of it",
        {"pods": [], "last_report": None, "not_created": (NOW - 60, "email-search-tools: exceeded quota: pods=0")},
        "Pending",
        {"Scheduled": ("False", "Pending", "email-search-tools: exceeded quota: pods=0")},
    ),
    (
        "there is no RuntimeClass of its tools",
        {
            "job": job("tools=[{use: 'a:b', sandbox: {runtimeClassName: gvisor}}]"),
            "pods": [],
            "last_report": None,
            "not_created": (NOW - 60, NO_RUNTIME_CLASS),
        },
        "WaitingFor",
        {
            "Accepted": (
                "False",
                "Unresolvable",
                "spec.tools[0].sandbox.runtimeClassName: there is no RuntimeClass 'gvisor'; create it, or name one of "
                "`kubectl get runtimeclass`",
            ),
            "Scheduled": ("False", "Pending", NO_RUNTIME_CLASS),
        },
    ),
    (
        "there is no RuntimeClass of the chart",
        {"pods": [], "last_report": None, "not_created": (NOW - 60, NO_RUNTIME_CLASS)},
        "WaitingFor",
        {
            "Accepted": (
                "False",
                "Unresolvable",
                "the chart's jobs.toolsRuntimeClass or accelerators: there is no RuntimeClass 'gvisor'; create it, or "
                "name one of `kubectl get runtimeclass`",
            )
        },
    ),
    (
        "a surplus worker does not replace an engine without a node",
        {"pods": [*all_pods(waiting(Role.INFERENCE, 1)), pod(Role.ROLLOUT, 1)]},
        "Degraded",
        {"Scheduled": ("False", "Pending", "5 of 6 pods have a node")},
    ),
    (
        "an engine is replaced, and its successor waits for its end",
        {"pods": all_pods(pod(Role.INFERENCE, 1, deleting=True))},
        "Degraded",
        {"Scheduled": ("False", "Pending", "5 of 6 pods have a node; email-search-inference-1 ends first")},
    ),
    (
        "no node could ever take an engine",
        {
            "pods": all_pods(waiting(Role.INFERENCE, 1)),
            "unsatisfiable": "spec.inference.accelerator (profile nvidia): no node has 16 of nvidia.com/gpu",
        },
        "Degraded",
        {
            "Scheduled": (
                "False",
                "Unsatisfiable",
                "spec.inference.accelerator (profile nvidia): no node has 16 of nvidia.com/gpu",
            )
        },
    ),
    (
        "no node could take it again, but its pods have nodes",
        {"unsatisfiable": "every matching node has a taint"},
        "Running",
        {"Scheduled": ("True", "PodsScheduled")},
    ),
    (
        "the model is not where the manifest says",
        {"pods": all_pods(waiting(Role.LEARNER, scheduled=True, ended=(NO_MODEL,))), "last_report": None},
        "WaitingFor",
        {
            "Accepted": ("False", "Unresolvable", f"email-search-learner-0: {NO_MODEL.message}"),
            "LearnerProgressing": (
                "False",
                "Unavailable",
                f"email-search-learner-0: prepare ended with Error (2): {NO_MODEL.message}",
            ),
        },
    ),
    (
        "the model is not in storage",
        {"pods": all_pods(waiting(Role.INFERENCE, scheduled=True, ended=(NO_OBJECT,)))},
        "Degraded",
        {"Accepted": ("False", "Unresolvable", f"email-search-inference-0: {NO_OBJECT.message}")},
    ),
    (
        "storage does not answer the preparation, which is no error of the manifest",
        {"pods": all_pods(waiting(Role.INFERENCE, scheduled=True, ended=(NO_STORE,), restarts=2))},
        "Degraded",
        {
            "Accepted": ("True", "Valid"),
            "EnginesReady": (
                "False",
                "Unavailable",
                f"1/2; email-search-inference-0: prepare ended with Error (1): {NO_STORE.message} (restarted 2 times)",
            ),
        },
    ),
    (
        "the preparation of a pod that is being deleted does not count",
        {"pods": all_pods(waiting(Role.INFERENCE, 2, deleting=True, ended=(NO_MODEL,)))},
        "Running",
        {"Accepted": ("True", "Valid"), "EnginesReady": ("True", "AllReady", "2/2")},
    ),
    (
        "a secret is missing",
        {
            "pods": all_pods(
                waiting(
                    Role.LEARNER,
                    scheduled=True,
                    unstartable='learner: CreateContainerConfigError: secret "s3" not found',
                )
            ),
            "last_report": None,
        },
        "WaitingFor",
        {
            "Accepted": (
                "False",
                "Unresolvable",
                'email-search-learner-0: learner: CreateContainerConfigError: secret "s3" not found',
            )
        },
    ),
    (
        "an image is missing",
        {"pods": all_pods(waiting(Role.INFERENCE, scheduled=True, unstartable="engine: ErrImagePull: not found"))},
        "Degraded",
        {
            "Accepted": ("True", "Valid"),
            "EnginesReady": (
                "False",
                "Unavailable",
                "1/2; email-search-inference-0: engine: ErrImagePull: not found",
            ),
        },
    ),
    (
        "the learner failed because of user code",
        {"last_report": learner_report(failed(Boundary.USER_CODE, "user_code_raised"))},
        "Restarting",
        {
            "Accepted": ("False", "Unresolvable", "the learner: it went wrong"),
            "LearnerProgressing": (
                "False",
                "Failed",
                "[user_code/user_code_raised] it went wrong; the learner is restarted in 10 s, for time 1 of 3",
            ),
        },
    ),
    (
        "all starts",
        {"pods": all_pods(unready(Role.INFERENCE), unready(Role.LEARNER)), "last_report": None},
        "Starting",
        {
            "Scheduled": ("True", "PodsScheduled"),
            "EnginesReady": ("False", "Starting", "1/2"),
            "LearnerProgressing": ("False", "Starting"),
        },
    ),
    (
        "the learner waits for a pod of its ranks",
        {
            "job": job("learner.replicas=2"),
            "pods": all_pods(waiting(Role.RANKS, unscheduled=UNSCHEDULED)),
            "last_report": learner_report(report("starting", message="waits for ranks 1 of other pods")),
        },
        "Pending",
        {
            "Scheduled": ("False", "Pending", f"email-search-ranks-0: {UNSCHEDULED}"),
            "LearnerProgressing": ("False", "WaitingForRanks", "0 of 1 pods of ranks are ready"),
        },
    ),
    (
        "the learner loads its model",
        {
            "last_report": learner_report(
                report(
                    "starting",
                    step=0,
                    message="loading the model; engines start",
                    policy=None,
                    engines=[],
                    engines_converged=0,
                    checkpoint_step=None,
                    means={},
                )
            )
        },
        "Starting",
        {
            "PolicyConverged": ("False", "Loading", "0/2 engines have verified no version yet"),
            "RolloutsFlowing": ("False", "Starting"),
            "LearnerProgressing": ("False", "Starting", "loading the model; engines start"),
            "CheckpointDurable": ("False", "None"),
            "RewardHealthy": ("Unknown", NOT_OBSERVED),
        },
    ),
    (
        "it trains",
        {},
        "Running",
        {
            "Accepted": ("True", "Valid"),
            "Scheduled": ("True", "PodsScheduled"),
            "EnginesReady": ("True", "AllReady", "2/2"),
            "PolicyConverged": ("True", "AllProved", f"2/2 engines have verified {version(14).name}"),
            "RolloutsFlowing": ("True", "Flowing", "1 workers"),
            "LearnerProgressing": ("True", "Stepping"),
            "CheckpointDurable": ("True", "Confirmed", "step 10"),
            "RewardHealthy": ("True", "Scoring", "mean 0.500"),
            "Suspended": ("False", "Running"),
            "Ready": ("True", "Training"),
            "Succeeded": ("False", "Running"),
        },
    ),
    (
        "it evaluates",
        {"last_report": learner_report(report("evaluating", message="120 held-out scenarios"), stepped=NOW - 9000)},
        "Running",
        {"LearnerProgressing": ("True", "Stepping", "120 held-out scenarios"), "RolloutsFlowing": ("True", "Flowing")},
    ),
    (
        "an engine was killed for memory",
        {
            "pods": all_pods(unready(Role.INFERENCE, 1, ended=(OOM,), restarts=4)),
            "last_report": learner_report(
                report(engines=[engine(0), engine(1, 13, state="away", lag=1)], engines_converged=1)
            ),
        },
        "Degraded",
        {
            "EnginesReady": (
                "False",
                "OOMKilled",
                "1/2; email-search-inference-1: engine ended with OOMKilled (137) (restarted 4 times)",
            ),
            "PolicyConverged": ("False", "Loading", f"1/2 engines have verified {version(14).name}"),
        },
    ),
    (
        "an engine stopped answering",
        {
            "pods": all_pods(unready(Role.INFERENCE, 1)),
            "last_report": learner_report(
                report(engines=[engine(0), engine(1, 13, state="away", lag=1, message="(no reply)")])
            ),
        },
        "Degraded",
        {"EnginesReady": ("False", "Unavailable", "1/2; engine-1 does not answer (no reply)")},
    ),
    (
        "an engine was evicted and another one is in its place",
        {"pods": [*all_pods(), pod(Role.INFERENCE, 2, phase="Failed", ended=(OOM,), ready=False)]},
        "Running",
        {"EnginesReady": ("True", "AllReady", "2/2")},
    ),
    (
        "an engine loads for long",
        {
            "last_report": learner_report(
                report(engines=[engine(0), engine(1, 13, state="loading", lag=1)], engines_converged=1),
                stepped=NOW - UPDATE_SECONDS,
            )
        },
        "Running",
        {"PolicyConverged": ("False", "Loading", f"1/2 engines have verified {version(14).name}")},
    ),
    (
        "engines load the version of the last step",
        {
            "last_report": learner_report(
                report(engines=[engine(0), engine(1, 13, state="loading", lag=1)], engines_converged=1),
                stepped=NOW - UPDATE_SECONDS / 2,
            )
        },
        "Running",
        {
            "PolicyConverged": (
                "True",
                "AllProved",
                f"all have verified the version before; 1/2 engines have verified {version(14).name}",
            )
        },
    ),
    (
        "an engine could not verify it",
        {
            "last_report": learner_report(
                report(
                    engines=[engine(0), engine(1, 13, state="quarantined", lag=1, message="log-probs differ by 0.3")],
                    engines_converged=1,
                )
            )
        },
        "Running",
        {
            "PolicyConverged": (
                "False",
                "Quarantined",
                f"1/2 engines have verified {version(14).name}; engine-1: log-probs differ by 0.3",
            )
        },
    ),
    (
        "a third engine is wanted, which the learner does not know yet",
        {"job": job("inference.replicas=3"), "pods": [*all_pods(), pod(Role.INFERENCE, 2)]},
        "Running",
        {"PolicyConverged": ("False", "Loading", f"2/3 engines have verified {version(14).name}")},
    ),
    (
        "no worker answers",
        {"pods": all_pods(unready(Role.ROLLOUT)), "last_report": learner_report(report(workers=0))},
        "Degraded",
        {"RolloutsFlowing": ("False", "NoWorker", "0 of 1 workers' pods are ready")},
    ),
    (
        "workers wait for files that are downloaded",
        {
            "job": job(FILES),
            "pods": [*all_pods(unready(Role.ROLLOUT)), unready(Role.FILES)],
            "last_report": learner_report(report(workers=0)),
        },
        "Degraded",
        {
            "RolloutsFlowing": (
                "False",
                "NoWorker",
                "0 of 1 workers' pods are ready; 1 file of spec.data.files of up to 2 GiB are downloaded within 30m; "
                "`kubectl logs email-search-files-0 -c prepare` says how far it is",
            )
        },
    ),
    (
        "a worker keeps ending",
        {
            "pods": all_pods(unready(Role.ROLLOUT, ended=(ended("rollout", message="ImportError: x"),), restarts=3)),
            "last_report": learner_report(report(workers=0)),
        },
        "Degraded",
        {
            "RolloutsFlowing": (
                "False",
                "Failing",
                "email-search-rollout-0: rollout ended with Error (1): ImportError: x (restarted 3 times)",
            )
        },
    ),
    (
        "the judge cannot start",
        {"pods": all_pods(waiting(Role.JUDGE, scheduled=True, unstartable="judge: ErrImageNeverPull: not here"))},
        "Degraded",
        {"RolloutsFlowing": ("False", "Failing", "email-search-judge-0: judge: ErrImageNeverPull: not here")},
    ),
    (
        "its agent cannot be loaded",
        {
            "job": job("tools=[]", "agent={maxTokens: 512, run: 'mine:agent', image: 'r/mine:3'}"),
            "pods": all_pods(pod(Role.AGENT, ready=False, ended=(NOT_LOADED,), restarts=2)),
        },
        "Degraded",
        {
            "RolloutsFlowing": (
                "False",
                "Failing",
                "email-search-agent-0: agent ended with Error (2): error: agent.run: mine:agent cannot be imported "
                "(restarted 2 times)",
            )
        },
    ),
    (
        "no step has ended for long",
        {"last_report": learner_report(report(failures={"tool/tool_raised": 7, "judge/late": 2}), stepped=NOW - 301)},
        "Degraded",
        {
            "LearnerProgressing": (
                "False",
                "Stalled",
                "no step for 301 s: judge/late 2 times, tool/tool_raised 7 times",
            )
        },
    ),
    (
        "storage does not answer, and the learner retries",
        {
            "last_report": learner_report(
                report(storage_wait="writing step 7: no answer since 21:03:10Z"), stepped=NOW - 3000
            )
        },
        "Degraded",
        {"LearnerProgressing": ("False", "StorageUnavailable", "writing step 7: no answer since 21:03:10Z")},
    ),
    (
        "a tool's server accepts its credential no more",
        {"last_report": learner_report(refused("crm: the server refuses the credential"), stepped=NOW - 3000)},
        "WaitingFor",
        {"LearnerProgressing": ("False", "CredentialRefused", "crm: the server refuses the credential")},
    ),
    (
        "its steps are long ones",
        {"last_report": learner_report(report(), stepped=NOW - 500, pace=100.0)},
        "Running",
        {"LearnerProgressing": ("True", "Stepping")},
    ),
    (
        "the learner's steps were short ones",
        {"last_report": learner_report(report(), stepped=NOW - 300, pace=1.0)},
        "Running",
        {"LearnerProgressing": ("True", "Stepping")},
    ),
    (
        "the learner does not report",
        {
            "last_report": learner_report(report(), connected=False),
            "status": status(condition("CheckpointDurable", "True", "Confirmed")),
        },
        "Degraded",
        {
            "PolicyConverged": ("Unknown", NOT_OBSERVED),
            "LearnerProgressing": ("False", "Unavailable", "it does not answer"),
            "RolloutsFlowing": ("Unknown", NOT_OBSERVED, "the learner, which requests them, does not answer"),
            "CheckpointDurable": ("True", "Confirmed"),
        },
    ),
    (
        "the learner was killed for memory",
        {"pods": all_pods(unready(Role.LEARNER, ended=(ended("learner", "OOMKilled", 137),))), "last_report": None},
        "Restarting",
        {
            "LearnerProgressing": (
                "False",
                "OOMKilled",
                "email-search-learner-0: learner ended with OOMKilled (137)",
            )
        },
    ),
    (
        "a worker was killed for memory",
        {"pods": all_pods(unready(Role.ROLLOUT, ended=(ended("rollout", "OOMKilled", 137),)))},
        "Degraded",
        {
            "RolloutsFlowing": (
                "False",
                "OOMKilled",
                "email-search-rollout-0: rollout ended with OOMKilled (137)",
            )
        },
    ),
    *(
        (
            f"the node of a pod of {role} does not answer",
            {"pods": all_pods(unready(role, node="gpu-7")), "lost_nodes": LOST_NODE, **given},
            word,
            {kind: ("False", "NodeNotReady", f"{prefix}email-search-{role}-0: node gpu-7: {LOST_NODE['gpu-7']}")},
        )
        for role, kind, prefix, word, given in (
            (Role.INFERENCE, "EnginesReady", "1/2; ", "Degraded", dict[str, Any]()),
            (Role.ROLLOUT, "RolloutsFlowing", "", "Degraded", {}),
            (Role.LEARNER, "LearnerProgressing", "", "Restarting", {"last_report": None, "workloads": workloads(1)}),
        )
    ),
    (
        "the node of a pod that is ready does not answer yet",
        {"pods": all_pods(pod(Role.INFERENCE, node="gpu-7")), "lost_nodes": LOST_NODE},
        "Running",
        {"EnginesReady": ("True", "AllReady", "2/2")},
    ),
    (
        "the learner is ready and has not answered yet",
        {
            "pods": all_pods(pod(Role.LEARNER, ready_since=NOW - 59)),
            "last_report": None,
            "unreachable": "Connection refused",
        },
        "Starting",
        {"LearnerProgressing": ("False", "Starting", "it does not answer yet: Connection refused")},
    ),
    (
        "the learner is ready for long and has never answered",
        {
            "pods": all_pods(pod(Role.LEARNER, ready_since=NOW - 60)),
            "last_report": None,
            "unreachable": "Connection refused",
        },
        "Starting",
        {"LearnerProgressing": ("False", "Unavailable", "it does not answer: Connection refused")},
    ),
    (
        "storage does not answer before the first step",
        {"last_report": learner_report(report("starting", step=0, storage_wait="no answer since 21:03:10Z"))},
        "WaitingFor",
        {"LearnerProgressing": ("False", "StorageUnavailable", "no answer since 21:03:10Z")},
    ),
    (
        "it gave its pods back, since it cannot start",
        {
            "pods": [],
            "last_report": None,
            "memory": Memory(rest=Rest(generation=3, since=NOW, until=NOW + 60, times=1, why="no secret s3")),
        },
        "Pending",
        {"Scheduled": ("False", "Parked"), "EnginesReady": ("False", "Released"), "Ready": ("False", "NotReady")},
    ),
    (
        "storage denies the learner from its start",
        {
            "last_report": learner_report(failed(Boundary.INFRASTRUCTURE, "storage_inaccessible")),
            "memory": Memory(failed=NOW - 4),
        },
        "WaitingFor",
        {
            "Accepted": ("False", "Unresolvable", "the learner: it went wrong"),
            "LearnerProgressing": (
                "False",
                "StorageUnavailable",
                "[infrastructure/storage_inaccessible] it went wrong; the learner is restarted in 6 s; this failure "
                "does not count",
            ),
            "Succeeded": ("False", "Running"),
        },
    ),
    (
        "the learner failed and is restarted",
        {"last_report": learner_report(failed()), "memory": Memory(failed=NOW - 4)},
        "Restarting",
        {
            "LearnerProgressing": (
                "False",
                "Failed",
                "[engine/no_engine_proved] it went wrong; the learner is restarted in 6 s, for time 1 of 3",
            ),
            "PolicyConverged": ("Unknown", NOT_OBSERVED, "the learner has ended its run and no longer reports engines"),
            "RolloutsFlowing": ("False", "Drained"),
            "Succeeded": ("False", "Running"),
        },
    ),
    (
        "the learner of an earlier attempt reports its failure for the last time",
        {"last_report": learner_report(failed()), "workloads": workloads(1)},
        "Restarting",
        {"LearnerProgressing": ("False", "Failed", "[engine/no_engine_proved] it went wrong")},
    ),
    (
        "it drained, was resumed, and starts again",
        {"last_report": learner_report(over("suspended", message="at step 14"))},
        "Resuming",
        {
            "LearnerProgressing": ("False", "Starting", "at step 14"),
            "PolicyConverged": ("Unknown", NOT_OBSERVED),
            "RolloutsFlowing": ("False", "Drained"),
        },
    ),
    (
        "storage refuses checkpoints",
        {"last_report": learner_report(report(storage_failure="s3://bucket: access denied"))},
        "Running",
        {"CheckpointDurable": ("False", "StorageFailed", "s3://bucket: access denied")},
    ),
    (
        "scoring fails",
        {"last_report": learner_report(report(means={}, failures={"judge/late": 3, "tool/x": 1}))},
        "Running",
        {"RewardHealthy": ("False", "JudgeFailing", "judge/late 3 times")},
    ),
    (
        "scoring failed before, and the run ends with scores",
        {
            "last_report": learner_report(over("succeeded")),
            "status": status(condition("RewardHealthy", "False", "JudgeFailing")),
        },
        "Succeeded",
        {"RewardHealthy": ("True", "Scoring", "mean 0.500")},
    ),
    (
        "rewards are no numbers",
        {"last_report": learner_report(report(means={"reward": float("nan")}))},
        "Running",
        {"RewardHealthy": ("Unknown", NOT_OBSERVED)},
    ),
    (
        "there is nothing to learn from",
        {"last_report": learner_report(report(degenerate=True))},
        "Running",
        {"RewardHealthy": ("False", "Degenerate")},
    ),
    (
        "tools are called",
        {"last_report": learner_report(report(means={"reward": 0.5, "tool_calls": 1.5}))},
        "Running",
        {"ToolsHealthy": ("True", "Calling", "1.50 calls per episode")},
    ),
    (
        "code runs in a sandbox",
        {
            "last_report": learner_report(
                report(means={"tool_calls": 1.5}, sandboxes={"code": SandboxInUse(backend="bwrap", isolation="x")})
            )
        },
        "Running",
        {"ToolsHealthy": ("True", "Calling", "1.50 calls per episode; code in bwrap, isolates by x")},
    ),
    (
        "its MLflow server has what is stored",
        {"job": TRACKED, "followers": [pod(Role.MLFLOW)]},
        "Running",
        {"Tracked": ("True", "Sending", "to http://mlflow")},
    ),
    (
        "the pod that sends it to MLflow starts",
        {"job": TRACKED, "followers": [pod(Role.MLFLOW, ready=False)]},
        "Running",
        {"Tracked": ("False", "Starting"), "Ready": ("True", "Training")},
    ),
    (
        "its MLflow server is away",
        {"job": TRACKED, "followers": [pod(Role.MLFLOW, ready=False, ended=(ended("mlflow", message="it is away"),))]},
        "Running",
        {"Tracked": ("False", "Failing"), "Ready": ("True", "Training")},
    ),
    (
        "it has no tools",
        {"job": job("tools=[]")},
        "Running",
        {"ToolsHealthy": ("True", "NoTools")},
    ),
    (
        "no tool is called",
        {"last_report": learner_report(report(tool_warning_reason="no_tool_call", tool_warning="none of 64 ..."))},
        "Running",
        {"ToolsHealthy": ("False", "NoToolCall", "none of 64 ...")},
    ),
    (
        "no tool call succeeds",
        {"last_report": learner_report(report(tool_warning_reason="calls_failing", tool_warning="none of 9 ..."))},
        "Running",
        {"ToolsHealthy": ("False", "CallsFailing", "none of 9 ...")},
    ),
    (
        "it has learned nothing so far",
        {
            "last_report": learner_report(
                report(learned=False, not_learned_reason="no_tool_call", not_learned="in 2 steps ...")
            )
        },
        "Running",
        {"Learned": ("False", "NoToolCall", "in 2 steps ...")},
    ),
    (
        "its gradient is 0",
        {"last_report": learner_report(report(learned=False, not_learned_reason="zero_gradient"))},
        "Running",
        {"Learned": ("False", "ZeroGradient")},
    ),
    (
        "its updates are too small",
        {"last_report": learner_report(report(learned=False, not_learned_reason="weights_unchanged"))},
        "Running",
        {"Learned": ("False", "WeightsUnchanged")},
    ),
    (
        "it has learned something",
        {"last_report": learner_report(report(learned=True))},
        "Running",
        {"Learned": ("True", "WeightsChanged")},
    ),
    (
        "it has learned from a part of the tokens",
        {"last_report": learner_report(report(learned=True, learning_warning="40% of the tokens ..."))},
        "Running",
        {"Learned": ("True", "WeightsChanged", "40% of the tokens ...")},
    ),
    (
        "it has succeeded and learned nothing",
        {
            "last_report": learner_report(
                over("succeeded", learned=False, not_learned_reason="no_reward_spread", not_learned="why")
            )
        },
        "Succeeded",
        {"Learned": ("False", "NoRewardSpread", "why")},
    ),
    (
        "it drains",
        {"job": job("suspend=true")},
        "Suspending",
        {
            "Suspended": ("False", "Draining", "rollouts end and the learner checkpoints"),
            "RolloutsFlowing": ("False", "Drained"),
            "LearnerProgressing": ("True", "Stepping"),
            "Ready": (*NOT_READY, "not RolloutsFlowing"),
        },
    ),
    (
        "it has drained and its pods are terminating",
        {"job": job("suspend=true"), "last_report": learner_report(over("suspended")), "labels": QUEUED},
        "Suspending",
        {
            "Suspended": ("False", "Draining", "6 pods are terminating"),
            "Scheduled": ("False", "Released", "6 pods are terminating"),
            "EnginesReady": ("False", "Released", "6 pods are terminating"),
            "PolicyConverged": ("Unknown", NOT_OBSERVED, "no engine is to run"),
            "RolloutsFlowing": ("False", "Drained"),
            "LearnerProgressing": ("False", "Released"),
            "CheckpointDurable": ("True", "Confirmed", "step 10"),
        },
    ),
    (
        "it is suspended",
        {
            "job": job("suspend=true"),
            "last_report": None,
            "pods": [],
            "labels": QUEUED,
            "status": status(progress={"step": 14, "totalSteps": 26}),
        },
        "Suspended",
        {
            "Suspended": ("True", "Released", "at step 14; suspend: false resumes from there"),
            "QuotaReserved": ("Unknown", NOT_OBSERVED),
            "Scheduled": ("False", "Released", ""),
            "Ready": ("True", "Suspended"),
        },
    ),
    (
        "it is suspended and an evicted pod remains",
        {"job": job("suspend=true"), "last_report": None, "pods": [pod(Role.ROLLOUT, phase="Failed")]},
        "Suspended",
        {"Suspended": ("True", "Released", "at step 0; suspend: false resumes from there")},
    ),
    (
        "it has succeeded",
        {"last_report": learner_report(over("succeeded", step=26))},
        "Succeeded",
        {
            "Succeeded": ("True", "Completed", "26 steps; the adapter is s3://bucket/email-search/adapters/14"),
            "Ready": ("True", "Completed"),
            "Accepted": ("True", "Valid"),
            "Suspended": ("False", "Running"),
            "PolicyConverged": ("Unknown", NOT_OBSERVED, "no engine is to run"),
        },
    ),
    (
        "it succeeded before",
        {
            "last_report": None,
            "pods": [],
            "status": status(condition("Succeeded", "True", "Completed", message="26 steps")),
        },
        "Succeeded",
        {
            "Succeeded": ("True", "Completed", "26 steps"),
            "Ready": ("True", "Completed"),
            "Accepted": ("Unknown", NOT_OBSERVED),
        },
    ),
    (
        "it failed before because of a missing input, which stays in the status",
        {
            "last_report": None,
            "pods": [],
            "status": status(
                condition("Accepted", "False", "Unresolvable", message="no model"),
                condition("Succeeded", "False", "BackoffExceeded", message="4 times"),
            ),
        },
        "Failed",
        {"Succeeded": ("False", "BackoffExceeded", "4 times"), "Accepted": ("False", "Unresolvable", "no model")},
    ),
    (
        "it ended before, and its manifest is invalid now",
        {
            "last_report": None,
            "pods": [],
            "job": None,
            "problem": "spec.bogus: unknown field",
            "status": status(condition("Succeeded", "True", "Completed"), condition("Ready", "False", "Finished")),
        },
        "Succeeded",
        {
            "Succeeded": ("True", "Completed"),
            "Accepted": ("False", "Invalid", "spec.bogus: unknown field"),
            "Ready": ("True", "Completed"),
        },
    ),
    (
        "learner and engines disagree",
        {"last_report": learner_report(failed(code="logprob_gap"))},
        "Failed",
        {"Succeeded": ("False", "LearnerFailed", "[engine/logprob_gap] it went wrong")},
    ),
    (
        "the learner failed too often",
        {
            "last_report": learner_report(failed()),
            "workloads": workloads(3),
            "pods": all_pods(pod(Role.LEARNER, attempts=3)),
        },
        "Failed",
        {"Succeeded": ("False", "BackoffExceeded"), "Ready": ("False", "Finished")},
    ),
    (
        "its time is over",
        {"job": job("activeDeadline=1h"), "status": status(startedAt=at(-3600))},
        "Failed",
        {"Succeeded": ("False", "DeadlineExceeded", "activeDeadline (3600 s) passed")},
    ),
    (
        "its pods could not start in time",
        {"job": job("pendingDeadline=10m"), "pods": [waiting(Role.LEARNER, made=NOW - 601)], "last_report": None},
        "Failed",
        {"Succeeded": ("False", "PendingTooLong")},
    ),
]


@pytest.mark.parametrize(("given", "word", "claims"), [line[1:] for line in TABLE], ids=[line[0] for line in TABLE])
def test_a_status_reports_what_was_observed(given: dict[str, Any], word: str, claims: Expected) -> None:
    written = status_for(snapshot(**given))
    assert {kind: condition_of(written, kind)[: len(claim)] for kind, claim in claims.items()} == claims
    assert written["shown"]["phase"] == word


def test_every_reason_of_the_closed_list_is_used() -> None:
    used: dict[str, set[str]] = {str(kind): set() for kind in Type}
    for changes in [*(line[1] for line in TABLE), *(line[1] for line in QUOTAS)]:
        for item in status_for(snapshot(**changes))["conditions"]:
            used[item["type"]].add(item["reason"])
    for reason in ("OperatorFailed", QUARANTINED):
        for item in with_failure({}, "no", generation=1, now=NOW, reason=reason)["conditions"]:
            used[item["type"]].add(item["reason"])
    assert {kind: reasons - {NOT_OBSERVED} for kind, reasons in used.items()} == {
        str(kind): set(reasons) for kind, reasons in REASONS.items()
    }


def test_a_failed_pass_is_reported_beside_the_earlier_conditions() -> None:
    before = status_for(snapshot())
    after = with_failure(before, "no answer", generation=7, now=NOW + 9)
    assert condition_of(after, "Ready") == ("False", "OperatorFailed", "no answer")
    ready = next(item for item in after["conditions"] if item["type"] == "Ready")
    assert (ready["observedGeneration"], ready["lastTransitionTime"]) == (7, at(9))
    others = [item for item in after["conditions"] if item["type"] != "Ready"]
    assert others == [item for item in before["conditions"] if item["type"] != "Ready"]
    assert {name: value for name, value in after.items() if name not in {"conditions", "shown"}} == {
        name: value for name, value in before.items() if name not in {"conditions", "shown"}
    }
    assert (before["shown"]["phase"], after["shown"]["phase"]) == ("Running", "Degraded")
    assert with_failure(after, "no answer", generation=7, now=NOW + 99) == after, "written again and again"
    for changes in ({}, {"job": None, "problem": "spec.model: no such model"}):
        assert condition_of(status_for(snapshot(status=after, **changes)), "Ready")[1] != "OperatorFailed", (
            "reported though it works"
        )


def problems(written: dict[str, Any]) -> list[str]:
    """What the API server would refuse in a status."""
    json.dumps(written, allow_nan=False)
    return [
        f"{'.'.join(map(str, error.path))}: {error.message}" for error in Draft4Validator(SCHEMA).iter_errors(written)
    ]


def times(written: dict[str, Any]) -> list[str]:
    found = [item["lastTransitionTime"] for item in written["conditions"]]
    found += [item["convergedAt"] for item in written["history"] if "convergedAt" in item]
    return [*found, *(written[name] for name in ("startedAt", "finishedAt") if name in written)]


@pytest.mark.parametrize("given", [line[1] for line in TABLE], ids=[line[0] for line in TABLE])
def test_a_status_is_valid_and_can_be_read_again(given: dict[str, Any]) -> None:
    written = status_for(snapshot(**given))
    assert problems(written) == []
    assert {datetime.fromisoformat(time).tzinfo is not None for time in times(written)} == {True}
    again = json.loads(json.dumps(written))
    assert JobStatus.model_validate(again).model_dump(by_alias=True, exclude_none=True) == written


@given(snapshots())
def test_the_status_of_any_snapshot_is_valid(seen: Snapshot) -> None:
    written = status_for(seen)
    assert problems(written) == []
    assert [item["type"] for item in written["conditions"]] == list(Type)
    assert written["observedGeneration"] == seen.generation
    assert max(len(item["message"]) for item in written["conditions"]) <= LONGEST_MESSAGE


@given(snapshots())
def test_convergence_needs_every_engine_and_is_unknown_without_a_report(seen: Snapshot) -> None:
    decision = decide(seen)
    status, reason, _ = condition_of(status_of(seen, decision), "PolicyConverged")
    before = seen.condition("PolicyConverged")[0]
    if seen.job is None:
        assert status == before  # nothing was observed, as the observed generation shows
        return
    latest = seen.live_report
    if latest is None or decision.parked:
        assert (status, reason) == ("Unknown", NOT_OBSERVED)
    if status == "True":
        assert latest is not None
        wanted = max(seen.job.spec.inference.replicas.min, latest.state.engines.total)
        fleet = latest.state.engines
        proved = {item.name for item in fleet.reports if item.policy == latest.policy}
        recent = {item.name for item in fleet.reports if item.policy is not None and item.lag <= 1}
        in_update = fleet.verified < fleet.total and latest.at < latest.stepped + UPDATE_SECONDS
        assert min(len(proved), fleet.verified) >= wanted or (in_update and min(len(recent), fleet.total) >= wanted)
        assert latest.policy is not None
        assert latest.policy.sha256


@given(snapshots())
def test_a_status_computed_again_is_the_same(seen: Snapshot) -> None:
    """A different status would be written in every pass, and every write is an event that causes a pass."""
    decision = decide(seen)
    if decision.ended is None and decision.parked is False:
        written = status_of(seen, decision)
        standing = replace(seen, status=written)
        again = decide(standing)
        if replace(again, requeue_after=None) == replace(decision, requeue_after=None):
            assert status_of(standing, again) == written


def test_the_observed_generation_is_that_of_the_observed_spec() -> None:
    written = status_for(
        snapshot(generation=7, last_report=None, status=status(condition("RewardHealthy", "True", "Scoring")))
    )
    seen_for = {item["type"]: item["observedGeneration"] for item in written["conditions"]}
    assert written["observedGeneration"] == 7
    assert seen_for.pop("RewardHealthy") == 1
    assert set(seen_for.values()) == {7}


def test_the_time_of_a_condition_is_of_its_last_change() -> None:
    standing = status(
        condition("Ready", "True", "Training", -300), condition("EnginesReady", "False", "Starting", -200)
    )
    written = status_for(snapshot(status=standing))
    since = {item["type"]: item["lastTransitionTime"] for item in written["conditions"]}
    assert (since["Ready"], since["EnginesReady"], since["Scheduled"]) == (at(-300), at(0), at(0))


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ({}, at(0)),
        ({"status": status(startedAt=at(-500))}, at(-500)),
        ({"status": status(SUSPENDED, startedAt=at(-500))}, at(0)),
        ({"job": job("suspend=true"), "status": status(startedAt=at(-500))}, at(-500)),
        ({"job": job("suspend=true"), "pods": [], "last_report": None}, None),
        ({"job": None, "problem": "x"}, None),
        ({"last_report": learner_report(over("succeeded")), "status": status(startedAt=at(-500))}, at(-500)),
    ],
    ids=["it begins", "it runs", "it is resumed", "it drains", "suspended from the start", "rejected", "it ends"],
)
def test_the_start_time_is_of_the_last_start(given: dict[str, Any], started: str | None) -> None:
    assert status_for(snapshot(**given)).get("startedAt") == started


def test_a_resumed_job_keeps_its_new_start() -> None:
    resumed = status_for(snapshot(status=status(SUSPENDED, startedAt=at(-500))))
    later = status_for(snapshot(now=NOW + 60, status=resumed))
    assert later["startedAt"] == resumed["startedAt"] == at(0)


def test_the_finish_time_is_set_once() -> None:
    first = status_for(snapshot(last_report=learner_report(over("succeeded"))))
    assert first["finishedAt"] == at(0)
    later = status_for(snapshot(now=NOW + 60, last_report=None, pods=[], status=first))
    assert later["finishedAt"] == at(0)
    assert "finishedAt" not in status_for(snapshot())


def test_a_version_is_dated_when_every_engine_has_verified_it() -> None:
    loading = learner_report(report(engines=[engine(0), engine(1, 13)], engines_converged=1))
    first = status_for(snapshot(last_report=loading))
    assert ("policy" in first, first["history"]) == (False, [])
    proved = status_for(snapshot(now=NOW + 5, status=first))
    assert proved["policy"] == {
        "version": version(14).name,
        "parent": version(13).name,
        "step": 14,
        "sha256": version(14).sha256,
        "uri": "s3://bucket/email-search/adapters/14",
        "convergedAt": at(5),
    }
    assert proved["history"] == [proved["policy"]]
    later = status_for(snapshot(now=NOW + 60, status=proved))
    assert (later["policy"], later["history"]) == (proved["policy"], proved["history"])


def test_the_lineage_is_bounded() -> None:
    written: dict[str, Any] = {}
    for step in range(1, 13):
        progress = report(
            step=step,
            policy=policy_to_proto(version(step)),
            policy_parent=version(step - 1).name,
            engines=[engine(0, step), engine(1, step)],
        )
        written = status_for(snapshot(now=NOW + step, last_report=learner_report(progress), status=written))
    assert [item["step"] for item in written["history"]] == list(range(12, 2, -1))
    assert [item["parent"] for item in written["history"]] == [version(step).name for step in range(11, 1, -1)]
    assert written["policy"] == written["history"][0]
    without_report = status_for(snapshot(last_report=None, status=written))
    assert (without_report["policy"], without_report["history"]) == (written["policy"], written["history"])


def test_engines_are_listed_as_the_learner_reports_them() -> None:
    progress = report(
        engines=[engine(0), engine(1, None, state="starting", lag=15, message="x" * 3000)], engines_converged=1
    )
    written = status_for(snapshot(last_report=learner_report(progress)))
    assert written["engines"][0] == {
        "name": "engine-0", "version": version(14).name, "lag": 0, "state": "serving", "message": "",
    }  # fmt: skip
    assert written["shown"]["lag"] == 0
    assert written["engines"][1].keys().isdisjoint({"lag", "version"}), "it has verified nothing that could be late"
    assert len(written["engines"][1]["message"]) == LONGEST_OF_ENGINE
    assert written["engines"][1]["message"].endswith("...")


@pytest.mark.parametrize(
    "given",
    [
        {"last_report": None},
        {"last_report": learner_report(failed())},
        {"last_report": learner_report(report("starting", engines=[]))},
    ],
    ids=["the learner does not report", "its run is over", "it starts"],
)
def test_engines_are_unknown_without_a_report(given: dict[str, Any]) -> None:
    written = status_for(snapshot(status=status_for(snapshot()), **given))
    assert [(item["name"], item["state"], "version" in item) for item in written["engines"]] == [
        ("engine-0", "unknown", False),
        ("engine-1", "unknown", False),
    ]
    assert written["shown"]["converged"] == ""


def test_a_suspended_job_has_no_engines() -> None:
    written = status_for(snapshot(job=job("suspend=true"), pods=[], last_report=None, status=status_for(snapshot())))
    assert written["engines"] == []


def test_of_too_many_engines_those_with_problems_are_listed() -> None:
    engines = [engine(number) for number in range(150)]
    engines[140] = engine(140, 13, state="quarantined", lag=1)
    engines[141] = engine(141, 3, state="loading", lag=11)
    written = status_for(
        snapshot(last_report=learner_report(report(engines=engines, engines_total=150, engines_converged=148)))
    )
    assert len(written["engines"]) == ENGINES_SHOWN
    troubled = [item["name"] for item in written["engines"] if item["state"] != "serving"]
    assert troubled == ["engine-140", "engine-141"]
    assert written["engines"] == sorted(written["engines"], key=lambda item: item["name"])
    assert (written["shown"]["converged"], written["shown"]["lag"]) == ("148/150", 11)
    proved = f"148/150 engines have verified {version(14).name}"
    assert condition_of(written, "PolicyConverged")[2] == f"{proved}; engine-140: no reason was reported"


def test_progress_is_rounded() -> None:
    progress = report(
        means={"reward": 0.123456, "answer_correct": 0.987654, "num_turns": 3.2},
        episodes_per_second=1.239,
        tokens_per_second=812.34,
        eta_seconds=90.7,
        failures={"tool/tool_raised": 3},
    )
    assert status_for(snapshot(last_report=learner_report(progress)))["progress"] == {
        "step": 14,
        "totalSteps": 26,
        "reward": 0.1235,
        "answerCorrect": 0.9877,
        "episodesPerSecond": 1.24,
        "tokensPerSecond": 812.3,
        "etaSeconds": 90,
        "failures": {"tool/tool_raised": 3},
    }


def test_the_last_progress_stays_while_the_learner_does_not_report() -> None:
    before = status_for(snapshot())
    without_report = status_for(snapshot(last_report=None, status=before))
    assert without_report["progress"] == before["progress"]
    assert without_report["shown"]["step"] == "14/26"


def test_the_sandboxes_are_listed_and_stay_while_the_learner_does_not_report() -> None:
    used = {"code": SandboxInUse(backend="zygote", isolation="namespaces")}
    before = status_for(snapshot(last_report=learner_report(report(sandboxes=used))))
    assert before["sandboxes"] == [{"tool": "code", "backend": "zygote", "isolation": "namespaces"}]
    assert status_for(snapshot(last_report=None, status=before))["sandboxes"] == before["sandboxes"]


def test_of_too_many_kinds_of_failures_the_frequent_ones_are_listed() -> None:
    failures = {f"tool/code_{number}": number + 1 for number in range(200)}
    progress = status_for(snapshot(last_report=learner_report(report(failures=failures))))["progress"]["failures"]
    assert len(progress) == FAILURES_SHOWN
    assert min(progress.values()) == 200 - FAILURES_SHOWN + 1


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (
            {},
            {
                "phase": "Running",
                "step": "14/26",
                "policy": "v14",
                "converged": "2/2",
                "lag": 0,
                "reward": "0.50",
                "idle": "",
            },
        ),
        (
            {
                "last_report": learner_report(
                    report(engines=[engine(0), engine(1, 12, lag=2, state="loading")], engines_converged=1)
                )
            },
            {
                "phase": "Running",
                "step": "14/26",
                "policy": "",
                "converged": "1/2",
                "lag": 2,
                "reward": "0.50",
                "idle": "",
            },
        ),
        (
            {"last_report": None, "pods": []},
            {"phase": "Pending", "step": "", "policy": "", "converged": "", "reward": "", "idle": ""},
        ),
        (
            {"last_report": learner_report(report(means={"reward": float("inf")}))},
            {
                "phase": "Running",
                "step": "14/26",
                "policy": "v14",
                "converged": "2/2",
                "lag": 0,
                "reward": "",
                "idle": "",
            },
        ),
    ],
    ids=["it trains", "an engine lags", "it waits", "rewards are no numbers"],
)
def test_what_kubectl_prints(given: dict[str, Any], shown: dict[str, Any]) -> None:
    assert status_for(snapshot(**given))["shown"].items() >= shown.items()


def test_kubectl_prints_how_much_of_the_last_step_stood_idle() -> None:
    idle = IdleTime(seconds=20, learner={"groups": 8.2}, engine_seconds=40, engines={"update": 10, "tools": 12})
    state = state_of(report()).but(last_step=LastStep(idle=idle))
    assert status_for(snapshot(last_report=learner_report(report_of(state))))["shown"]["idle"] == "41%/55%"
    unknown = state.but(last_step=LastStep(idle=idle.but(engine_seconds=0.0, engines={})))
    assert status_for(snapshot(last_report=learner_report(report_of(unknown))))["shown"]["idle"] == "41%/-"


def test_workers_are_counted_for_the_scale_subresource() -> None:
    pods = [
        *all_pods(),
        waiting(Role.ROLLOUT, 1),
        pod(Role.ROLLOUT, 2, deleting=True),
        pod(Role.ROLLOUT, 3, phase="Failed"),
    ]
    written = status_for(snapshot(pods=pods))
    assert written["rolloutReplicas"] == 2
    assert written["rolloutSelector"] == "kestrl.dev/job=email-search,kestrl.dev/role=rollout"


def test_restarts_are_those_of_the_decision() -> None:
    again = snapshot(last_report=learner_report(failed()), memory=Memory(failed=NOW - 10))
    assert status_for(again)["restarts"] == 1
    assert status_for(snapshot(workloads=workloads(2)))["restarts"] == 2


def test_long_messages_are_cut() -> None:
    problem = "\n".join(f"spec.field{number}: unknown field" for number in range(5000))
    message = condition_of(status_for(snapshot(job=None, problem=problem)), "Accepted")[2]
    assert len(message) == LONGEST_MESSAGE
    assert message.startswith("spec.field0: unknown field\n")
    assert message.endswith("...")


def test_the_result_of_a_job_that_succeeded_is_the_newest_version_and_stays() -> None:
    before = status_for(snapshot())
    assert "result" not in before
    last = snapshot(
        status=before,
        last_report=learner_report(over("succeeded", policy=policy_to_proto(version(26)), policy_uri="s3://b/26")),
    )
    after = status_for(last)
    assert (after["policy"]["version"], after["shown"]["policy"]) == (version(26).name, "v26")
    assert "convergedAt" not in after["policy"], "not all engines have verified the last one"
    expected = {"version": version(26).name, "sha256": version(26).sha256, "uri": "s3://b/26"}
    assert after["result"] == expected
    assert status_for(snapshot(status=after, last_report=None, pods=[]))["result"] == expected


def test_a_job_that_failed_has_no_result() -> None:
    assert "result" not in status_for(
        snapshot(last_report=learner_report(failed(boundary=Boundary.ENGINE, code="logprob_gap")))
    )


def test_the_log_of_a_crashed_learner_outlives_its_pod() -> None:
    crash = replace(ended("learner", "Error", 1), at="2026-03-01T12:00:00Z", log="step 3\nKeyError: 'x'")
    older = replace(crash, at="2026-03-01T11:00:00Z", log="before")
    pods = [*all_pods(pod(Role.LEARNER, ready=False, ended=(older, crash))), pod(Role.LEARNER, 1, phase="Failed")]
    written = status_for(snapshot(pods=pods))
    assert written["lastCrash"] == {
        "pod": "email-search-learner-0", "container": "learner", "reason": "Error", "code": 1,
        "at": "2026-03-01T12:00:00Z", "log": "step 3\nKeyError: 'x'",
    }  # fmt: skip
    engines = all_pods(pod(Role.INFERENCE, 0, ready=False, ended=(replace(OOM, at="2026-03-01T13:00:00Z"),)))
    later = status_for(snapshot(status=written, pods=engines))
    assert later["lastCrash"] == written["lastCrash"], "the pod is another one"
    assert not list(Draft4Validator(SCHEMA).iter_errors(later))
