"""An agent with an image of its own: its pods, what they have and what they reach."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.operator.rendering import SECRETS, VALUES, given, of_kind, rendered
from tests.unit.operator.samples import job

from kestrl._shared.plan.agents import AGENT_PORT, GATEWAY_PORT
from kestrl.errors import UserInputError
from kestrl_operator.controllers.manifests import Manifests
from kestrl_operator.render import render
from kestrl_operator.state.chart_values import read_cluster
from kestrl_operator.state.jobs import Key

AGENT, ROLLOUT = "email-search-agent", "email-search-rollout"
MANIFEST = ("tools=[]", "agent={maxTokens: 512, run: 'mine:agent', image: 'r/mine:3', replicas: 2, env: {DEPTH: '3'}}")
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}


def pods_of(role: str) -> list[dict[str, Any]]:
    return [{"podSelector": {"matchLabels": {"kestrl.dev/job": "email-search", "kestrl.dev/role": role}}}]


def pod(objects: list[dict[str, Any]], name: str = AGENT) -> dict[str, Any]:
    return of_kind(objects, "Deployment")[name]["spec"]["template"]["spec"]


def settings(objects: list[dict[str, Any]], role: str) -> Any:
    return json.loads(of_kind(objects, "ConfigMap")["email-search-agentrljob"]["data"][f"{role}.json"])


def test_an_agent_with_an_image_is_a_deployment_with_service_budget_and_policy() -> None:
    objects = rendered(*MANIFEST)
    assert [item["kind"] for item in objects if item["metadata"]["name"] == AGENT] == [
        "NetworkPolicy",
        "Service",
        "PodDisruptionBudget",
        "Deployment",
    ]
    assert of_kind(objects, "Deployment")[AGENT]["spec"]["replicas"] == 2
    assert of_kind(objects, "Service")[AGENT]["spec"]["ports"] == [{"name": "http", "port": AGENT_PORT}]
    for overrides in ((), ("tools=[]", "agent={maxTokens: 512, run: 'mine:agent'}")):
        assert AGENT not in [item["metadata"]["name"] for item in rendered(*overrides)]


def test_the_users_image_runs_our_program_of_an_init_container() -> None:
    objects = rendered(*MANIFEST)
    (init,), (container,) = pod(objects)["initContainers"], pod(objects)["containers"]
    assert (init["image"], container["image"]) == ("r/rollout:1", "r/mine:3")
    prepared = settings(objects, "prepare-agent")
    assert (prepared["packages"], prepared["model"]) == (["kestrl", "kestrl_rollout"], None)
    assert container["command"] == [
        "python3",
        f"{prepared['packages_target']}/kestrl_rollout/hosts/pod_program.py",
    ]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
    assert mounts == {"/kestrl/settings": True, "/kestrl": True, "/tmp": False}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"port": AGENT_PORT, "path": "/healthz"}
        assert container[probe]["timeoutSeconds"] >= 5, "a busy node answers late"
    assert container["resources"]["requests"] == {"cpu": "50m", "memory": "256Mi"}


def test_workers_post_to_the_pods_which_alone_have_the_agents_variables() -> None:
    objects = rendered(*MANIFEST)
    outside = settings(objects, "rollout")["outside"]
    assert (outside["run"], outside["env"]) == ("mine:agent", {})
    assert outside["pods"] == f"http://{AGENT}.team-a.svc:{AGENT_PORT}"
    assert settings(objects, "rollout")["gateway_listen"] == f"0.0.0.0:{GATEWAY_PORT}"
    assert settings(objects, "agent")["agent"]["env"] == {"DEPTH": "3"}
    assert settings(objects, "agent")["listen"] == f"0.0.0.0:{AGENT_PORT}"


def test_agent_and_worker_reach_each_other_and_the_agent_nothing_else() -> None:
    policies = of_kind(rendered(*MANIFEST), "NetworkPolicy")
    mine, workers = policies[AGENT]["spec"], policies[ROLLOUT]["spec"]
    to_agent, to_gateway = ([{"port": port, "protocol": "TCP"}] for port in (AGENT_PORT, GATEWAY_PORT))
    assert mine["ingress"] == [{"from": pods_of("rollout"), "ports": to_agent}]
    assert mine["egress"] == [DNS, {"to": pods_of("rollout"), "ports": to_gateway}]
    assert {"to": pods_of("agent"), "ports": to_agent} in workers["egress"]
    assert {"from": pods_of("agent"), "ports": to_gateway} in workers["ingress"]
    assert {"namespaceSelector": {}} not in [each for rule in workers["ingress"] for each in rule.get("from", ())]


def test_another_key_rolls_all_pods_but_the_agents_which_hold_none() -> None:
    before, after = (
        {
            name: item["spec"]["template"]
            for name, item in of_kind(rendered(*MANIFEST, secrets=secrets), "StatefulSet", "Deployment").items()
        }
        for secrets in (SECRETS, dict.fromkeys(SECRETS, "another"))
    )
    assert [name for name in before if before[name] == after[name]] == [AGENT]


def test_the_pods_have_no_credential_and_no_settings_of_others() -> None:
    variables = [
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "TOKEN"}}},
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
    ]
    objects = rendered(*MANIFEST, values={"podDefaults": {"env": variables}}, store="s3")
    spec = pod(objects)
    assert (spec["automountServiceAccountToken"], spec["volumes"][0]["configMap"]["items"]) == (
        False,
        [{"key": name, "path": name} for name in ("agent.json", "prepare-agent.json")],
    )
    (container,) = spec["containers"]
    assert not [item for item in container["env"] if "secretKeyRef" in item.get("valueFrom", {})]
    assert not set(SECRETS) & {item["name"] for item in container["env"]}
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert "s3" not in str(spec["volumes"])
    assert "envFrom" not in str(spec)
    named = [{**variables[0], "containers": ["agent"]}]
    (container,) = pod(rendered(*MANIFEST, values={"podDefaults": {"env": named}}))["containers"]
    assert "TOKEN" in [item["name"] for item in container["env"]], "the administrator has named it"


def test_the_pods_pass_pod_security_restricted() -> None:
    spec = pod(rendered(*MANIFEST))
    assert spec["securityContext"]["runAsNonRoot"]
    for container in (*spec["initContainers"], *spec["containers"]):
        security = container["securityContext"]
        assert (security["readOnlyRootFilesystem"], security["allowPrivilegeEscalation"]) == (True, False)
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_a_runtime_class_is_the_jobs_or_that_of_the_clusters_tools() -> None:
    own = (MANIFEST[0], MANIFEST[1].replace("replicas: 2", "runtimeClassName: kata"))
    tools = {"toolsRuntimeClass": "gvisor"}
    assert "runtimeClassName" not in pod(rendered(*MANIFEST))
    assert pod(rendered(*own))["runtimeClassName"] == "kata"
    assert pod(rendered(*MANIFEST, values=tools))["runtimeClassName"] == "gvisor"
    with pytest.raises(UserInputError, match=r"spec\.agent\.runtimeClassName: is kata, and this cluster runs"):
        rendered(*own, values=tools)


def test_more_workers_roll_no_agent_and_its_patches_are_its_own() -> None:
    def template(*overrides: str) -> Any:
        return of_kind(render(given(*MANIFEST, *overrides)), "Deployment")[AGENT]["spec"]["template"]

    assert template("rollout.replicas=3") == template()
    patched = template("patches=[{role: agent, template: {spec: {nodeSelector: {pool: cpu}}}}]")
    assert patched["spec"]["nodeSelector"] == {"pool": "cpu"}


def test_a_manifest_with_requirements_for_one_machine_runs_on_a_cluster_by_its_image() -> None:
    manifests = Manifests(read_cluster(VALUES), b"key")
    local = "agent={maxTokens: 512, run: 'mine:agent', python: {requirements: [langgraph]}"
    key, storage = Key("team-a", "email-search"), "storage={uri: 's3://bucket/runs'}"

    def read(agent: str) -> None:
        raw = job("tools=[]", agent, storage).model_dump(mode="json", by_alias=True, exclude_unset=True)
        manifests.read(key, {**raw, "metadata": {**raw["metadata"], "uid": "u-1"}})

    with pytest.raises(UserInputError, match=r"spec\.agent\.python: pods install nothing; give spec\.agent\.image"):
        read(f"{local}}}")
    read(f"{local}, image: 'r/mine:3'}}")
