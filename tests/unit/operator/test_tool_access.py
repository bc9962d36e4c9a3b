"""What a tools pod may reach and read: its MCP servers and their secrets, and nothing if the job names none."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.rendering import of_kind, rendered

from kestrl.errors import UserInputError
from kestrl.plan.servers import METADATA

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
