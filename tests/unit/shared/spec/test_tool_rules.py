"""What contradicts itself in the tools of a manifest, with the field that says it."""

from __future__ import annotations

import pytest
from tests.unit.shared.spec.test_job import MANIFEST, refused

from kestrl._shared.spec import parse_job, with_overrides

MCP = "tools=[{{name: files, mcp: {0}}}]"
HTTP = "tools=[{{name: shop, http: {0}}}]"
SECRET = "{secretRef: {name: keys}, secretKey: TOKEN}"
TWICE = "is also set without a secret; remove one of the two"


@pytest.mark.parametrize(
    ("tools", "problems"),
    [
        (MCP.format("{}"), ["spec.tools[0].mcp: give either `command` or `url`, and one of them only"]),
        (
            MCP.format("{command: [serve], url: 'https://mcp.example'}"),
            ["spec.tools[0].mcp: give either `command` or `url`, and one of them only"],
        ),
        (
            MCP.format("{url: 'https://mcp.example', env: {A: b}}"),
            ["spec.tools[0].mcp.env: is for a program (`command`); use `headers` or `secretHeaders`"],
        ),
        (
            MCP.format("{command: [serve], headers: {A: b}}"),
            ["spec.tools[0].mcp.headers: is for a server on HTTP (`url`); use `env` or `secretEnv`"],
        ),
        (
            MCP.format(f"{{command: [serve], env: {{A: b, B: c}}, secretEnv: {{A: {SECRET}, C: {SECRET}}}}}"),
            [f"spec.tools[0].mcp.secretEnv.A: {TWICE}"],
        ),
        (
            MCP.format(f"{{url: 'https://mcp.example', headers: {{x-key: b}}, secretHeaders: {{X-Key: {SECRET}}}}}"),
            [f"spec.tools[0].mcp.secretHeaders.X-Key: {TWICE}"],
        ),
        (HTTP.format("{}"), ["spec.tools[0].http: give either `openapi` or `endpoints`, and one of them only"]),
        (
            HTTP.format("{endpoints: [{name: look, description: d, path: /look}]}"),
            [
                "spec.tools[0].http.baseUrl: is missing; give the URL before the paths, such as "
                "https://api.example.com/v1"
            ],
        ),
        (
            HTTP.format(
                "{baseUrl: 'https://a.example', endpoints: [{name: look, description: d, path: '/x/{id}', "
                "required: [id, other]}]}"
            ),
            ["spec.tools[0].http.endpoints[0].required: there is no parameter other"],
        ),
        (
            HTTP.format("{openapi: 'https://a.example/api.json', timeout: 30s}"),
            ["spec.tools[0].http.timeout: is not below rollout.deadlines.tool (30s); lower it or raise that"],
        ),
        (
            "tools=[{name: a, use: 'mine:A'}, {name: a, use: 'mine:B'}]",
            ["spec.tools: 2 tools are called 'a'; the model could not tell them apart"],
        ),
        (
            "tools=[{name: a, use: 'mine:A', tools: [x], exclude: [y], unsupported: skip}]",
            [
                "spec.tools[0].tools: selects tools of a server; use `methods` for those of a class",
                "spec.tools[0].exclude: leaves out tools of a server; use `methods` for those of a class",
                "spec.tools[0].unsupported: is for the tools of a server; remove it",
            ],
        ),
        (
            "tools=[{name: a, mcp: {command: [serve]}, tools: [x, y], exclude: [y]}]",
            ["spec.tools[0].exclude: leaves out y, which `tools` selects; remove one of the two"],
        ),
        (
            "tools=[{name: a, mcp: {command: [serve]}, config: {x: 1}}]",
            ["spec.tools[0].config: is for a Python tool (`use`), and has no effect on a server; remove it"],
        ),
        (
            "tools=[{name: a, use: 'mine:A', sandbox: {runtimeClassName: gvisor}}, {name: b, use: 'mine:B'}, "
            "{name: c, use: 'mine:C', sandbox: {runtimeClassName: kata}}]",
            [
                "spec.tools[2].sandbox.runtimeClassName: is kata, and spec.tools[0].sandbox.runtimeClassName is "
                "gvisor; the tools of a job share one pod: name the same"
            ],
        ),
    ],
)
def test_what_contradicts_itself_is_named_with_its_field(tools: str, problems: list[str]) -> None:
    assert refused(tools) == problems


@pytest.mark.parametrize(
    "tools",
    [
        MCP.format(f"{{command: [serve], env: {{A: b}}, secretEnv: {{B: {SECRET}}}}}"),
        MCP.format(f"{{url: 'https://mcp.example', headers: {{a: b}}, secretHeaders: {{b: {SECRET}}}}}"),
        HTTP.format("{openapi: 'https://a.example/api.json', timeout: 29s}"),
        HTTP.format("{openapi: api.json, baseUrl: 'https://a.example'}"),
        "tools=[{name: a, mcp: {command: [serve]}, tools: [x], exclude: [y], unsupported: skip}]",
        "tools=[{name: a, use: 'mine:A', sandbox: {runtimeClassName: gvisor}}, "
        "{name: b, use: 'mine:B', sandbox: {runtimeClassName: gvisor}}]",
    ],
)
def test_what_does_not_is_taken(tools: str) -> None:
    assert parse_job(with_overrides(MANIFEST, [tools])).spec.tools
