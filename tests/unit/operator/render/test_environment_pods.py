"""An environment on a cluster: a container with its image beside the tool service, what it has and what it reaches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.rendering import SECRETS, VALUES, of_kind, rendered
from tests.unit.operator.samples import job

from kestrl._shared.plan.agents import AGENT_PORT, GATEWAY_PORT
from kestrl._shared.plan.servers import METADATA
from kestrl.errors import UserInputError
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.jobs import Key

TOOLS, AGENT = "email-search-tools", "email-search-agent"


def with_environment(fields: str = "image: 'r/gym:2'") -> tuple[str, ...]:
    return (
        "tools=[]",
        "rewards=[{rule: environment_reward}]",
        f"environment={{reasoningGym: {{generator: chain_sum}}, {fields}}}",
    )


def with_verifiers(fields: str = "image: 'r/words:2', replicas: 2, sessions: 8") -> tuple[str, ...]:
    return (
        "tools=[]",
        "rewards=[{rule: environment_reward}]",
        f"environment={{verifiers: {{taskset: word-tasks}}, {fields}}}",
    )


def pod(objects: list[dict[str, Any]], name: str = TOOLS) -> dict[str, Any]:
    return of_kind(objects, "Deployment")[name]["spec"]["template"]["spec"]


def settings(objects: list[dict[str, Any]], name: str) -> Any:
    return json.loads(of_kind(objects, "ConfigMap")["email-search-agentrljob"]["data"][f"{name}.json"])


def beside(objects: list[dict[str, Any]]) -> dict[str, Any]:
    return {container["name"]: container for container in pod(objects)["containers"]}["environment"]


def test_the_users_image_is_a_container_beside_the_tool_service() -> None:
    objects = rendered(*with_environment())
    (init,), containers = pod(objects)["initContainers"], pod(objects)["containers"]
    assert [(each["name"], each["image"]) for each in (init, *containers)] == [
        ("prepare", "r/tools:1"),
        ("tools", "r/tools:1"),
        ("environment", "r/gym:2"),
    ]
    data = of_kind(objects, "ConfigMap")["email-search-agentrljob"]["data"]
    prepared, (entry,) = json.loads(data["prepare-tools.json"]), json.loads(data["tools.json"])["tools"]
    assert prepared["packages"] == ["kestrl", "kestrl_tools"]
    launcher = entry["environment"]["launcher"]
    assert containers[1]["command"] == [
        "python3",
        f"{prepared['packages_target']}/kestrl_tools/process/launcher.py",
        launcher,
    ]
    shared = {"name": "environment", "mountPath": launcher.rpartition("/")[0]}
    assert all(shared in container["volumeMounts"] for container in containers)
    assert containers[1]["resources"]["requests"] == {"cpu": "50m", "memory": "256Mi"}


def test_it_sees_our_packages_and_nothing_else_of_the_job() -> None:
    variables = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "TOKEN"}}}]
    container = beside(rendered(*with_environment(), values={"podDefaults": {"env": variables}}))
    assert [item["name"] for item in container["env"]] == ["HOME"]
    assert not [name for name in SECRETS if name in str(container)]
    mounts = {mount["mountPath"]: (mount["name"], mount.get("readOnly", False)) for mount in container["volumeMounts"]}
    assert mounts == {
        "/kestrl/packages": ("home", True),
        "/kestrl/environment": ("environment", False),
        "/tmp": ("environment-tmp", False),
    }
    names = {volume["name"] for volume in pod(rendered(*with_environment()))["volumes"]}
    assert {name for name, _ in mounts.values()} <= names


def test_it_passes_pod_security_restricted() -> None:
    security = beside(rendered(*with_environment()))["securityContext"]
    assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_it_reaches_nothing_but_the_server_of_its_manifest() -> None:
    def egress(*overrides: str) -> Any:
        return of_kind(rendered(*overrides), "NetworkPolicy")[TOOLS]["spec"]["egress"]

    assert egress(*with_environment()) == []
    server = "environment={openenv: {url: 'https://env.example.com'}, image: 'r/gym:2'}"
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
    assert egress(*with_environment()[:2], server)[1:] == [{"to": [block], "ports": [{"port": 443, "protocol": "TCP"}]}]
    with pytest.raises(
        UserInputError, match=r"spec\.environment\.openenv\.url: port 7777 is not one that pods of jobs"
    ):
        egress(*with_environment()[:2], server.replace("env.example.com", "env.example.com:7777"))


def test_several_pods_have_a_budget_and_keep_the_sessions_of_a_worker() -> None:
    one, three = rendered(*with_environment()), rendered(*with_environment("image: 'r/gym:2', replicas: 3"))
    assert TOOLS not in of_kind(one, "PodDisruptionBudget")
    assert "sessionAffinity" not in of_kind(one, "Service")[TOOLS]["spec"]
    assert of_kind(three, "Deployment")[TOOLS]["spec"]["replicas"] == 3
    assert TOOLS in of_kind(three, "PodDisruptionBudget")
    assert of_kind(three, "Service")[TOOLS]["spec"]["sessionAffinity"] == "ClientIP"


def test_its_runtime_class_is_that_of_its_pods() -> None:
    assert "runtimeClassName" not in pod(rendered(*with_environment()))
    kata = with_environment("image: 'r/gym:2', runtimeClassName: kata")
    assert pod(rendered(*kata))["runtimeClassName"] == "kata"
    with pytest.raises(UserInputError, match=r"spec\.environment\.runtimeClassName: is kata"):
        rendered(*kata, values={"toolsRuntimeClass": "gvisor"})


def test_other_jobs_have_no_such_container() -> None:
    assert [container["name"] for container in pod(rendered())["containers"]] == ["tools"]


def test_an_environment_needs_an_image_on_a_cluster() -> None:
    manifests = Manifests(read_cluster(VALUES), b"key")

    def read(*overrides: str) -> None:
        made = job(*overrides, "storage={uri: 's3://bucket/runs'}")
        raw = made.model_dump(mode="json", by_alias=True, exclude_unset=True)
        manifests.read(Key("team-a", "email-search"), {**raw, "metadata": {**raw["metadata"], "uid": "u-1"}})

    with pytest.raises(UserInputError, match=r"spec\.environment\.image: is required on a cluster"):
        read(*with_environment("python: {requirements: [reasoning-gym]}"))
    with pytest.raises(UserInputError, match=r"spec\.environment\.image: is required on a cluster"):
        read(*with_verifiers("sessions: 8"))
    read(*with_environment("python: {requirements: [reasoning-gym]}, image: 'r/gym:2'"))
    read(*with_verifiers())


def test_one_that_runs_its_episodes_itself_has_pods_of_its_own() -> None:
    objects = rendered(*with_verifiers())
    assert [item["kind"] for item in objects if item["metadata"]["name"] == AGENT] == [
        "NetworkPolicy",
        "Service",
        "PodDisruptionBudget",
        "Deployment",
    ]
    assert of_kind(objects, "Deployment")[AGENT]["spec"]["replicas"] == 2
    (init,), (container,) = pod(objects, AGENT)["initContainers"], pod(objects, AGENT)["containers"]
    assert (init["image"], container["image"]) == ("r/rollout:1", "r/words:2")
    assert container["command"][-1].endswith("/kestrl_rollout/hosts/pod_program.py")
    assert not [name for name in SECRETS if name in str(container)]
    assert [each["name"] for each in pod(objects)["containers"]] == ["tools"]
    assert of_kind(objects, "Deployment")[TOOLS]["spec"]["replicas"] == 1
    assert settings(objects, "prepare-tools")["packages"] == []


def test_workers_post_to_its_pods_each_with_its_sessions() -> None:
    objects = rendered(*with_verifiers(), "rollout.replicas=2")
    worker, served = settings(objects, "rollout"), settings(objects, "agent")
    assert (worker["environment"]["pods"], worker["environment"]["python"]) == (
        f"http://{AGENT}.team-a.svc:{AGENT_PORT}",
        None,
    )
    assert worker["gateway_listen"] == f"0.0.0.0:{GATEWAY_PORT}"
    assert (worker["environment"]["sessions"], served["environment"]["sessions"], served["capacity"]) == (8, 8, 8)
    assert (served["agent"], served["environment"]["pods"]) == (None, None)
    assert served["environment"]["config"] == worker["environment"]["config"]


def test_its_pods_and_workers_reach_each_other_and_nothing_else() -> None:
    policies = of_kind(rendered(*with_verifiers()), "NetworkPolicy")
    worker = {"podSelector": {"matchLabels": {"kestrl.dev/job": "email-search", "kestrl.dev/role": "rollout"}}}
    assert policies[AGENT]["spec"]["egress"][1:] == [
        {"to": [worker], "ports": [{"port": GATEWAY_PORT, "protocol": "TCP"}]}
    ]
    assert policies[AGENT]["spec"]["ingress"] == [
        {"from": [worker], "ports": [{"port": AGENT_PORT, "protocol": "TCP"}]}
    ]


def test_more_workers_roll_no_pod_of_it_and_its_runtime_class_is_the_jobs() -> None:
    def template(*overrides: str) -> Any:
        return of_kind(rendered(*overrides), "Deployment")[AGENT]["spec"]["template"]

    assert template(*with_verifiers(), "rollout.replicas=3") == template(*with_verifiers())
    kata = with_verifiers("image: 'r/words:2', runtimeClassName: kata")
    objects = rendered(*kata)
    assert (pod(objects, AGENT)["runtimeClassName"], "runtimeClassName" in pod(objects)) == ("kata", False)
    with pytest.raises(UserInputError, match=r"spec\.environment\.runtimeClassName: is kata"):
        rendered(*kata, values={"toolsRuntimeClass": "gvisor"})
