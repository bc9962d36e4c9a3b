"""Pods of ranks: their objects, who can reach them, and what a status says while they are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.operator.rendering import NVIDIA, VALUES, of_kind, rendered
from tests.unit.operator.samples import all_pods, ended, job, learner_report, pod, report, snapshot, waiting, workloads

from kestrl._shared.plan.components import Role
from kestrl._shared.plan.settings.learner import RanksSettings
from kestrl.errors import UserInputError
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.cluster import RANKS_PORT
from kestrl_operator.state.jobs import Key
from kestrl_operator.state.snapshot import Pod, Snapshot
from kestrl_operator.status.build import status_of
from kestrl_operator.status.lifecycle import decide

SEVERAL = "learner.replicas=3"
LEARNER, RANKS = "email-search-learner", "email-search-ranks"


def workload_of(name: str, *overrides: str, **more: Any) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(rendered(*overrides, **more), "StatefulSet")[name]["spec"]
    return spec


def settings_of(*overrides: str) -> dict[str, Any]:
    (found,) = of_kind(rendered(*overrides), "ConfigMap").values()
    return {name: json.loads(text) for name, text in found["data"].items()}


# Objects


def test_a_learner_with_one_replica_has_no_pods_of_ranks() -> None:
    one = [item["metadata"]["name"] for item in rendered()]
    several = [item["metadata"]["name"] for item in rendered(SEVERAL)]
    assert RANKS not in one
    assert sorted(set(several) - set(one)) == [RANKS]
    assert several.count(RANKS) == 3, "a Service, a NetworkPolicy and a StatefulSet"
    assert several[-1] == LEARNER


def test_the_first_replica_is_the_learner_and_the_others_are_ranks() -> None:
    ranks, learner = workload_of(RANKS, SEVERAL), workload_of(LEARNER, SEVERAL)
    assert (learner["replicas"], ranks["replicas"]) == (1, 2)
    assert workload_of(RANKS, SEVERAL, parked=True)["replicas"] == 0
    assert (ranks["serviceName"], ranks["podManagementPolicy"]) == (RANKS, "Parallel")
    assert "volumeClaimTemplates" not in ranks
    service = of_kind(rendered(SEVERAL), "Service")[RANKS]["spec"]
    assert service["clusterIP"] == "None"


def test_settings_divide_the_ranks_and_name_the_meeting_point() -> None:
    read = settings_of(*NVIDIA, SEVERAL, "learner.accelerator={profile: nvidia, count: 8}")
    learner, ranks = read["learner.json"], RanksSettings.model_validate(read["ranks.json"])
    assert (learner["ranks"], learner["pods"], learner["ranks_listen"]) == (24, 3, f"0.0.0.0:{RANKS_PORT}")
    assert (ranks.ranks, ranks.pods, ranks.ranks_per_pod, ranks.device) == (24, 3, 8, "cuda")
    assert ranks.leader == f"{LEARNER}-0.{LEARNER}.team-a.svc:{RANKS_PORT}"
    assert settings_of()["learner.json"]["ranks_listen"] is None
    assert "prepare-ranks.json" in read
    assert (read["prepare-ranks.json"]["model"], read["prepare-ranks.json"]["data"]) != (None, [])
    assert read["prepare-ranks.json"]["data"] == []


def test_a_pod_of_ranks_is_made_like_the_learners() -> None:
    changes = (*NVIDIA, SEVERAL, "learner.accelerator={profile: nvidia, count: 8}")
    patch = "patches=[{role: learner, template: {spec: {priorityClassName: high}}}]"
    more: dict[str, Any] = {"values": {"resources": {"learner": {"requests": {"memory": "8Gi"}}}}}
    ranks, learner = (workload_of(name, *changes, patch, **more)["template"]["spec"] for name in (RANKS, LEARNER))
    (one,), (other,) = ranks["containers"], learner["containers"]
    same = ("name", "image", "resources", "securityContext")
    assert {key: one[key] for key in same} == {key: other[key] for key in same}
    assert one["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert one["command"] == ["catatonit", "--", "python", "-m", "kestrl_learner.rank_pod"]
    assert one["args"] == ["--settings", "/kestrl/settings/ranks.json"]
    assert {item["name"]: item["containerPort"] for item in other["ports"]}["ranks"] == RANKS_PORT
    index = next(item for item in one["env"] if item["name"] == "KESTRL_INDEX")
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['apps.kubernetes.io/pod-index']"
    assert not [item for item in one["env"] if item["name"].endswith("_TOKEN")], "it calls nothing"
    assert {ranks["priorityClassName"], learner["priorityClassName"]} == {"high"}
    assert {item["name"] for item in one["volumeMounts"]} == {"settings", "home", "tmp", "shared-memory"}
    assert ranks["terminationGracePeriodSeconds"] == 30


def test_an_attempt_of_the_learner_does_not_roll_pods_of_ranks() -> None:
    """They join the new learner by themselves."""
    first, second = (workload_of(RANKS, SEVERAL, attempts=number)["template"] for number in (0, 1))
    assert first == second
    assert first != workload_of(RANKS, SEVERAL, restarts=1)["template"]


# Network


def test_only_ranks_of_the_job_reach_each_other_at_any_port() -> None:
    policies = of_kind(rendered(SEVERAL), "NetworkPolicy")
    peers = [
        {"podSelector": {"matchLabels": {"kestrl.dev/job": "email-search", "kestrl.dev/role": role}}}
        for role in ("learner", "ranks")
    ]
    for name in (LEARNER, RANKS):
        spec = policies[name]["spec"]
        assert {"from": peers, "ports": [{"protocol": "TCP"}]} in spec["ingress"]
        assert {"to": peers, "ports": [{"protocol": "TCP"}]} in spec["egress"]
    assert [rule for rule in policies[RANKS]["spec"]["ingress"] if "from" in rule] == [
        {"from": peers, "ports": [{"protocol": "TCP"}]}
    ]
    alone = of_kind(rendered(), "NetworkPolicy")[LEARNER]["spec"]
    assert {"protocol": "TCP"} not in [port for rule in (*alone["ingress"], *alone["egress"]) for port in rule["ports"]]


def test_ranks_of_several_pods_need_network_policies() -> None:
    values = {**VALUES, "networkPolicies": False, "storage": {"uri": "s3://bucket"}}
    manifests = Manifests(read_cluster(values), b"key")
    raw = {"apiVersion": "kestrl.dev/v1alpha1", "kind": "AgentRLJob", "metadata": {"uid": "u-1"}}
    spec = job().model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]
    spec["learner"]["replicas"] = 2
    with pytest.raises(UserInputError, match=r"spec\.learner\.replicas: .*jobs\.networkPolicies"):
        manifests.read(Key("team-a", "email-search"), {**raw, "spec": spec})
    spec["learner"]["replicas"] = 1
    assert manifests.read(Key("team-a", "email-search"), {**raw, "spec": spec}).spec.learner.replicas == 1


# Status


def progressing(given: Snapshot) -> tuple[str, str, str]:
    conditions = status_of(given, decide(given))["conditions"]
    (found,) = [item for item in conditions if item["type"] == "LearnerProgressing"]
    return found["status"], found["reason"], found.get("message", "")


OOM = ended("learner", "OOMKilled", 137)


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([], ("WaitingForRanks", "0 of 2 pods of ranks are ready")),
        ([pod(Role.RANKS, 0), waiting(Role.RANKS, 1)], ("WaitingForRanks", "1 of 2 pods of ranks are ready")),
        (
            [pod(Role.RANKS, 0), pod(Role.RANKS, 1, ready=False, ended=(OOM,), restarts=2)],
            (
                "WaitingForRanks",
                "1 of 2 pods of ranks are ready; "
                "email-search-ranks-1: learner ended with OOMKilled (137) (restarted 2 times)",
            ),
        ),
        ([pod(Role.RANKS, 0), pod(Role.RANKS, 1)], ("Starting", "waits for ranks 2 of other pods")),
    ],
)
def test_a_starting_learner_says_which_pods_it_waits_for(pods: list[Pod], expected: tuple[str, str]) -> None:
    starting = learner_report(report("starting", message="waits for ranks 2 of other pods"))
    given = snapshot(job=job(SEVERAL), pods=all_pods(*pods), last_report=starting)
    assert progressing(given) == ("False", *expected)


def test_a_job_is_scheduled_with_all_of_its_pods_of_ranks() -> None:
    def scheduled(*pods: Pod) -> tuple[str, str]:
        given = snapshot(job=job(SEVERAL), pods=all_pods(*pods))
        (found,) = [item for item in status_of(given, decide(given))["conditions"] if item["type"] == "Scheduled"]
        return found["status"], found["message"]

    message = "email-search-ranks-1: 0/3 nodes are available"
    unplaced = waiting(Role.RANKS, 1, unscheduled="0/3 nodes are available")
    assert scheduled(pod(Role.RANKS, 0), unplaced) == ("False", message)
    assert scheduled(pod(Role.RANKS, 0), pod(Role.RANKS, 1))[0] == "True"


def test_a_killed_pod_of_ranks_follows_the_rules_of_the_learner() -> None:
    rules = "failurePolicy={rules: [{role: learner, reason: OOMKilled, action: RestartJob}]}"
    given = snapshot(
        job=job(SEVERAL, rules),
        pods=all_pods(pod(Role.RANKS, 0, ready=False, ended=(OOM,)), pod(Role.RANKS, 1)),
        workloads=workloads(),
    )
    assert decide(given).restarts == 1
    fails = replace(given, job=job(SEVERAL, rules.replace("RestartJob", "Fail")))
    assert decide(fails).ended == ("LearnerFailed", f"learner: {OOM}")
    assert decide(replace(given, job=job(SEVERAL))).restarts == 0, "its container is restarted"
