"""What a tools pod may reach and read: its MCP servers and their secrets, and nothing if the job names none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.operator.rendering import of_kind, rendered

from kestrl._shared.plan.servers import METADATA
from kestrl._shared.user_secrets import FOLDER_VARIABLE as USER_SECRETS_VARIABLE
from kestrl.errors import UserInputError

ROOT = Path(__file__).parents[4]
DNS = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
TOOLS = "email-search-tools"
SECRET = "secretHeaders: {Authorization: {secretRef: {name: tracker}, secretKey: TOKEN, prefix: 'Bearer '}}"


def egress(objects: list[dict[str, Any]]) -> Any:
    return of_kind(objects, "NetworkPolicy")[TOOLS]["spec"]["egress"]


def test_tools_of_python_and_programs_reach_nothing() -> None:
    assert egress(rendered()) == []
    assert egress(rendered("tools=[{mcp: {command: [server]}}]")) == []


def test_a_server_is_reached_at_its_port_with_its_secret() -> None:
    objects = rendered(f"tools=[{{name: tracker, mcp: {{url: 'https://mcp.example.com/mcp', {SECRET}}}}}]")
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
    assert egress(objects) == [DNS, {"to": [block], "ports": [{"port": 443, "protocol": "TCP"}]}]
    holders = [item for item in objects if item["kind"] in {"Deployment", "StatefulSet"} and "TOKEN'" in str(item)]
    assert TOOLS in [item["metadata"]["name"] for item in holders]
    pod = of_kind(objects, "Deployment")[TOOLS]["spec"]["template"]["spec"]
    variables = {item["name"]: item.get("valueFrom", {}).get("secretKeyRef") for item in pod["containers"][0]["env"]}
    assert variables["KESTRL_TOOL_SECRET_0"] == {"name": "tracker", "key": "TOKEN"}
    others = [item for item in objects if item["metadata"]["name"] != TOOLS]
    assert "KESTRL_TOOL_SECRET_0" not in str([item for item in others if item["kind"] != "ConfigMap"])


def test_a_service_of_the_cluster_is_reached_in_its_namespace() -> None:
    near = egress(rendered("tools=[{mcp: {url: 'http://search.mcp.svc:8080/mcp'}}]"))[1]
    assert near["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "mcp"}}}]


def test_a_port_that_jobs_may_not_reach_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"spec.tools\[0\].mcp.url: port 7777 is not one that pods of jobs"):
        rendered("tools=[{mcp: {url: 'http://mcp.example.com:7777/mcp'}}]")


def test_an_http_server_is_reached_with_the_hosts_that_it_may_redirect_to() -> None:
    openapi, base = "openapi: 'https://docs.example.com/openapi.json'", "baseUrl: 'http://shop.tools.svc:8080/v1'"
    hosts = "allowHosts: ['files.example.com', 'cdn.example.com:9000']"
    objects = rendered(f"tools=[{{name: shop, http: {{{openapi}, {base}, {hosts}, {SECRET}}}}}]")
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
    near = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tools"}}}
    assert egress(objects) == [
        DNS,
        {"to": [near], "ports": [{"port": 8080, "protocol": "TCP"}]},
        {"to": [block], "ports": [{"port": 443, "protocol": "TCP"}]},
        {"to": [block], "ports": [{"port": 443, "protocol": "TCP"}]},
        {"to": [block], "ports": [{"port": 9000, "protocol": "TCP"}]},
    ]
    pod = of_kind(objects, "Deployment")[TOOLS]["spec"]["template"]["spec"]
    variables = {item["name"]: item.get("valueFrom", {}).get("secretKeyRef") for item in pod["containers"][0]["env"]}
    assert variables["KESTRL_TOOL_SECRET_0"] == {"name": "tracker", "key": "TOKEN"}
    alone = egress(rendered("tools=[{http: {openapi: 'https://a.example.com/o.json'}}]"))
    assert alone == [DNS, {"to": [block], "ports": [{"port": 443, "protocol": "TCP"}]}]


def test_an_http_server_at_a_port_that_jobs_may_not_reach_is_refused() -> None:
    server = "openapi: shop.yaml, baseUrl: 'https://h.example.com', allowHosts: ['h.example.com:7777']"
    with pytest.raises(UserInputError, match=r"spec.tools\[0\].http.allowHosts\[0\]: port 7777 is not one that"):
        rendered(f"tools=[{{http: {{{server}}}}}]")


CLAIM = "sandbox: {claim: {warmPool: code, secretRef: {name: code-sandbox}}}"
INTERPRETER = f"tools=[{{use: 'kestrl_sandbox.tool:CodeInterpreter', {CLAIM}}}]"


def test_tools_that_claim_sandboxes_reach_their_pool_and_the_api_server() -> None:
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": list(METADATA)}}
    pool = {"podSelector": {"matchLabels": {"kestrl.dev/sandbox": "code"}}}
    sandboxes = {"to": [pool], "ports": [{"port": 8080, "protocol": "TCP"}]}
    assert egress(rendered(INTERPRETER)) == [
        {"to": [block], "ports": [{"port": 443, "protocol": "TCP"}, {"port": 6443, "protocol": "TCP"}]},
        sandboxes,
    ]
    values = {"apiServer": {"cidrs": ["10.0.0.1/32", "fd00::/64"], "ports": [443]}}
    assert egress(rendered(INTERPRETER, values=values)) == [
        {
            "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}, {"ipBlock": {"cidr": "fd00::/64"}}],
            "ports": [{"port": 443, "protocol": "TCP"}],
        },
        sandboxes,
    ]
    with pytest.raises(UserInputError, match=r"apiServer.cidrs"):
        rendered(values={"apiServer": {"cidrs": ["everywhere"]}})


def test_only_the_pod_that_claims_sandboxes_has_an_account_and_its_token() -> None:
    for overrides, account in (((INTERPRETER,), "kestrl-sandbox-claims"), ((), "email-search-agentrljob")):
        workloads = of_kind(rendered(*overrides), "Deployment", "StatefulSet")
        for name, item in workloads.items():
            pod = item["spec"]["template"]["spec"]
            claims = bool(overrides) and name == TOOLS
            assert pod["serviceAccountName"] == (account if name == TOOLS else "email-search-agentrljob")
            assert pod["automountServiceAccountToken"] is claims
            names = {variable["name"] for container in pod["containers"] for variable in container["env"]}
            assert ("KESTRL_POD_UID" in names) is claims


def test_the_token_of_the_pool_comes_from_its_secret() -> None:
    objects = rendered(INTERPRETER)
    pod = of_kind(objects, "Deployment")[TOOLS]["spec"]["template"]["spec"]
    variables = {item["name"]: item.get("valueFrom", {}) for item in pod["containers"][0]["env"]}
    assert variables["KESTRL_TOOL_SECRET_0"]["secretKeyRef"] == {"name": "code-sandbox", "key": "KESTRL_SANDBOX_TOKEN"}
    assert variables["KESTRL_POD_UID"]["fieldRef"] == {"fieldPath": "metadata.uid"}


def test_a_claim_outlives_an_episode_and_a_call_outlives_the_wait_for_one() -> None:
    deadlines = "rollout.deadlines={tool: 10s, turn: 20s, episode: 100s}"
    settings = of_kind(rendered(INTERPRETER, deadlines), "ConfigMap")["email-search-agentrljob"]["data"]["tools.json"]
    (tool,) = json.loads(settings)["tools"]
    assert tool["claim"] == {
        "warm_pool": "code",
        "token": {"variable": "KESTRL_TOOL_SECRET_0", "prefix": ""},
        "port": 8080,
        "bind_seconds": 8.0,
        "use_seconds": 100.0,
        "keep_seconds": 180.0,
    }


def test_the_example_of_a_warm_pool_fits_the_pods_of_jobs() -> None:
    documents = yaml.safe_load_all((ROOT / "examples/sandbox-claims/warm-pool.yaml").read_text())
    made = {item["kind"]: item for item in documents}
    pool, template = made["SandboxWarmPool"], made["SandboxTemplate"]
    assert pool["spec"]["sandboxTemplateRef"]["name"] == template["metadata"]["name"]
    objects = rendered(INTERPRETER)
    tools = of_kind(objects, "Deployment")[TOOLS]["spec"]["template"]
    account = tools["spec"]["serviceAccountName"]
    assert {made[kind]["metadata"]["name"] for kind in ("ServiceAccount", "Role", "RoleBinding")} == {account}
    rights = {rule["resources"][0]: rule["verbs"] for rule in made["Role"]["rules"]}
    assert rights == {"sandboxclaims": ["create", "delete", "get", "list"], "sandboxes": ["get"]}
    pod = template["spec"]["podTemplate"]
    reached = egress(objects)[-1]
    assert reached["to"][0]["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert pod["metadata"]["labels"] == {"kestrl.dev/sandbox": pool["metadata"]["name"]}
    (rule,) = template["spec"]["networkPolicy"]["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= tools["metadata"]["labels"].items()
    assert rule["ports"] == reached["ports"]
    (container,) = pod["spec"]["containers"]
    assert container["ports"][0]["containerPort"] == reached["ports"][0]["port"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounted = volumes[folders[variables[USER_SECRETS_VARIABLE]]]["secret"]["secretName"]
    assert {"name": mounted, "key": "KESTRL_SANDBOX_TOKEN"} in [
        item["valueFrom"]["secretKeyRef"]
        for item in tools["spec"]["containers"][0]["env"]
        if "secretKeyRef" in item.get("valueFrom", {})
    ]
