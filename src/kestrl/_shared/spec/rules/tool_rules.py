"""Cross-field rules of `spec.tools`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kestrl._shared.spec.job import JobSpec
from kestrl._shared.spec.problems import Problem
from kestrl._shared.spec.scalars import format_duration
from kestrl._shared.spec.tools import HttpServer, McpServer, Tool

TWICE = "is also set without a secret; remove one of the two"


def tool_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of tools that can be found without loading them."""
    names = (name for tool in spec.tools for name in tool.names)
    for name, count in Counter(names).items():
        if count > 1:
            yield Problem("spec.tools", f"{count} tools are called {name!r}; the model could not tell them apart")
    yield from _runtime_classes(spec)
    yield from _claims(spec)
    for index, tool in enumerate(spec.tools):
        path = f"spec.tools[{index}]"
        if tool.mcp is not None:
            yield from _server(tool, path)
            yield from _mcp(tool.mcp, f"{path}.mcp")
        elif tool.http is not None:
            yield from _server(tool, path)
            yield from _http(tool.http, f"{path}.http", spec.rollout.deadlines.tool)
        else:
            yield from _of_servers_only(tool, path)
        if both := sorted(set(tool.tools or ()) & set(tool.exclude)):
            yield Problem(
                f"{path}.exclude", f"leaves out {', '.join(both)}, which `tools` selects; remove one of the two"
            )


def _of_servers_only(tool: Tool, path: str) -> Iterator[Problem]:
    if tool.tools is not None:
        yield Problem(f"{path}.tools", "selects tools of a server; use `methods` for those of a class")
    if tool.exclude:
        yield Problem(f"{path}.exclude", "leaves out tools of a server; use `methods` for those of a class")
    if tool.unsupported != "refuse":
        yield Problem(f"{path}.unsupported", "is for the tools of a server; remove it")


def _runtime_classes(spec: JobSpec) -> Iterator[Problem]:
    runtime_classes = [
        (f"spec.tools[{index}].sandbox.runtimeClassName", tool.sandbox.runtime_class_name)
        for index, tool in enumerate(spec.tools)
        if tool.sandbox is not None and tool.sandbox.runtime_class_name is not None
    ]
    for field, name in runtime_classes[1:]:
        first, shared = runtime_classes[0]
        if name != shared:
            yield Problem(field, f"is {name}, and {first} is {shared}; the tools of a job share one pod: name the same")


def _claims(spec: JobSpec) -> Iterator[Problem]:
    claims = [
        (f"spec.tools[{index}]", tool, tool.sandbox.claim)
        for index, tool in enumerate(spec.tools)
        if tool.sandbox is not None and tool.sandbox.claim is not None
    ]
    for path, tool, claim in claims:
        if tool.use is None:
            yield Problem(f"{path}.sandbox.claim", "is for a Python tool that runs code (`use`); remove it")
        if tool.process is not None:
            yield Problem(f"{path}.process", "has no use for a tool whose code runs in claimed sandboxes; remove it")
        if claim != claims[0][2]:
            yield Problem(
                f"{path}.sandbox.claim",
                f"differs from {claims[0][0]}.sandbox.claim; the tools that run code share one pool: name the same",
            )


def _server(tool: Tool, path: str) -> Iterator[Problem]:
    for name, value in {"methods": tool.methods, "config": tool.config, "process": tool.process}.items():
        if value not in (None, {}):
            yield Problem(f"{path}.{name}", "is for a Python tool (`use`), and has no effect on a server; remove it")


def _mcp(server: McpServer, path: str) -> Iterator[Problem]:
    if (server.command is None) == (server.url is None):
        yield Problem(path, "give either `command` or `url`, and one of them only")
        return
    if server.command is None:
        unused = {"env": server.env, "secretEnv": server.secret_env}
        fix = "is for a program (`command`); use `headers` or `secretHeaders`"
    else:
        unused = {"headers": server.headers, "secretHeaders": server.secret_headers}
        fix = "is for a server on HTTP (`url`); use `env` or `secretEnv`"
    for name, value in unused.items():
        if value:
            yield Problem(f"{path}.{name}", fix)
    for key in server.secret_env:
        if key in server.env:
            yield Problem(f"{path}.secretEnv.{key}", TWICE)
    yield from _headers(server.headers, server.secret_headers, path)


def _headers(plain: Mapping[str, str], secret: Mapping[str, object], path: str) -> Iterator[Problem]:
    folded = {key.lower() for key in plain}
    for key in secret:
        if key.lower() in folded:
            yield Problem(f"{path}.secretHeaders.{key}", TWICE)


def _http(server: HttpServer, path: str, deadline: float) -> Iterator[Problem]:
    if (server.openapi is None) == (server.endpoints is None):
        yield Problem(path, "give either `openapi` or `endpoints`, and one of them only")
    elif server.base_url is None and server.openapi_url is None:
        yield Problem(
            f"{path}.baseUrl", "is missing; give the URL before the paths, such as https://api.example.com/v1"
        )
    if server.timeout is not None and server.timeout >= deadline:
        yield Problem(
            f"{path}.timeout",
            f"is not below rollout.deadlines.tool ({format_duration(deadline)}); lower it or raise that",
        )
    yield from _headers(server.headers, server.secret_headers, path)
    for index, endpoint in enumerate(server.endpoints or ()):
        parameters = {*endpoint.parameters, *endpoint.path_parameters}
        if unknown := sorted(set(endpoint.required) - parameters):
            yield Problem(f"{path}.endpoints[{index}].required", f"there is no parameter {', '.join(unknown)}")
