"""What a judge pod may reach and read: its judge model's endpoint and key, and nothing if the job names none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.operator.rendering import of_kind, rendered

from kestrl._shared.plan.servers import METADATA
from kestrl._shared.user_secrets import FOLDER_VARIABLE
from kestrl.errors import UserInputError
from kestrl_operator.render.network import selector
from kestrl_operator.render.volumes import USER_SECRETS
from kestrl_operator.state.cluster import HTTP_PORT

DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
JUDGE, ENGINES = "email-search-judge", "email-search-inference"


def policy(objects: list[dict[str, Any]], name: str) -> Mapping[str, Any]:
    spec: Mapping[str, Any] = of_kind(objects, "NetworkPolicy")[name]["spec"]
    return spec


def ruler(text: str) -> list[dict[str, Any]]:
    return rendered(f"rewards=[{{rule: exact_answer}}, {{ruler: {text}}}]")


def container(objects: list[dict[str, Any]]) -> Mapping[str, Any]:
    pod = of_kind(objects, "Deployment")[JUDGE]["spec"]["template"]["spec"]
    found: Mapping[str, Any] = pod["containers"][0]
    return found


def secrets_of(objects: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    references = {item["name"]: item.get("valueFrom", {}).get("secretKeyRef") for item in container(objects)["env"]}
    return {name: (found["name"], found["key"]) for name, found in references.items() if found is not None}


def test_a_judge_of_rules_reaches_nothing() -> None:
    objects = rendered()
    assert policy(objects, JUDGE)["egress"] == []
    assert set(secrets_of(objects)) == {"KESTRL_ROLLOUT_TO_JUDGE_TOKEN"}


def test_a_hosted_judge_is_reached_at_its_port_with_its_key() -> None:
    objects = ruler("{baseUrl: 'https://api.example.com/v1', model: m, secretRef: {name: judge-key}}")
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
    assert policy(objects, JUDGE)["egress"] == [DNS, {"to": [block], "ports": [{"port": 443, "protocol": "TCP"}]}]
    assert secrets_of(objects)["KESTRL_JUDGE_KEY_0"] == ("judge-key", "OPENAI_API_KEY")
    assert "KESTRL_ENGINE_KEY" not in secrets_of(objects)
    assert policy(objects, ENGINES)["ingress"] == policy(rendered(), ENGINES)["ingress"]
    held = [item for item in objects if item["kind"] in {"Deployment", "StatefulSet"} and "judge-key" in str(item)]
    assert [item["metadata"]["name"] for item in held] == [JUDGE]


def test_the_key_is_also_a_file_that_follows_a_rotation() -> None:
    objects = ruler("{baseUrl: 'https://api.example.com/v1', model: m, secretRef: {name: judge-key}}")
    held = container(objects)
    assert {"name": FOLDER_VARIABLE, "value": USER_SECRETS} in held["env"]
    assert {"name": "user-secrets", "mountPath": USER_SECRETS, "readOnly": True} in held["volumeMounts"]
    volumes = of_kind(objects, "Deployment")[JUDGE]["spec"]["template"]["spec"]["volumes"]
    (volume,) = [item["projected"] for item in volumes if item["name"] == "user-secrets"]
    items = [{"key": "OPENAI_API_KEY", "path": "KESTRL_JUDGE_KEY_0"}]
    assert volume["sources"] == [{"secret": {"name": "judge-key", "items": items, "optional": True}}]
    assert "user-secrets" not in str(rendered())


def test_a_service_of_the_cluster_is_reached_in_its_namespace() -> None:
    objects = ruler(
        "{baseUrl: 'http://litellm.llm.svc:8080/v1', model: m, second: {baseUrl: 'http://x.example:9000/v1', model: n, "
        "secretRef: {name: other}, secretKey: TOKEN}}"
    )
    near, far = policy(objects, JUDGE)["egress"][1:]
    assert near["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "llm"}}}]
    assert near["ports"] == [{"port": 8080, "protocol": "TCP"}]
    assert far["ports"] == [{"port": 9000, "protocol": "TCP"}]
    assert secrets_of(objects)["KESTRL_JUDGE_KEY_1"] == ("other", "TOKEN")


def test_the_jobs_own_model_is_reached_at_its_engines_only() -> None:
    objects = ruler("{self: true}")
    engines = {"podSelector": {"matchLabels": selector("email-search", ENGINES.removeprefix("email-search-"))}}  # type: ignore[arg-type]
    ports = [{"port": HTTP_PORT, "protocol": "TCP"}]
    assert policy(objects, JUDGE)["egress"] == [DNS, {"to": [engines], "ports": ports}]
    judge = {"podSelector": {"matchLabels": selector("email-search", "judge")}}  # type: ignore[arg-type]
    assert policy(objects, ENGINES)["ingress"][-1] == {"from": [judge], "ports": ports}
    assert "KESTRL_ENGINE_KEY" in secrets_of(objects)


def test_a_port_that_jobs_may_not_reach_is_refused_by_field() -> None:
    with pytest.raises(UserInputError, match=r"spec.rewards\[1\].ruler.baseUrl: port 22 is not one that pods"):
        ruler("{baseUrl: 'http://x.example:22/v1', model: m}")
