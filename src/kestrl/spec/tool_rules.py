"""Cross-field rules of `spec.tools`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kestrl.spec.job import JobSpec
from kestrl.spec.problems import Problem
from kestrl.spec.tools import McpServer, Tool


def tool_problems(spec: JobSpec) -> Iterator[Problem]:
    """Problems of tools that can be found without loading them."""
    named = (name for tool in spec.tools for name in tool.methods or tool.tools or [tool.label])
    for name, count in Counter(named).items():
        if count > 1:
            yield Problem("spec.tools", f"{count} tools are called {name!r}; the model could not tell them apart")
    yield from _runtime_classes(spec)
    for index, tool in enumerate(spec.tools):
        path = f"spec.tools[{index}]"
        if tool.mcp is not None:
            yield from _server(tool, path)
            yield from _mcp(tool.mcp, f"{path}.mcp")
        elif tool.tools is not None:
            yield Problem(f"{path}.tools", "selects tools of a server; use `methods` for those of a class")


def runtime_class(spec: JobSpec) -> tuple[str, str] | None:
    """The RuntimeClass that the job's tools ask for and the field that names it; None if they name none."""
    named = (
        (tool.sandbox.runtime_class_name, f"spec.tools[{index}].sandbox.runtimeClassName")
        for index, tool in enumerate(spec.tools)
        if tool.sandbox is not None
    )
    return next(named, None)


def _runtime_classes(spec: JobSpec) -> Iterator[Problem]:
    first = runtime_class(spec)
    for index, tool in enumerate(spec.tools):
        if first is not None and tool.sandbox is not None and tool.sandbox.runtime_class_name != first[0]:
            yield Problem(
                f"spec.tools[{index}].sandbox.runtimeClassName",
                f"is {tool.sandbox.runtime_class_name}, and {first[1]} is {first[0]}; the tools of a job share one "
                "pod: name the same",
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
    for plain, secret, name in (
        (server.env, server.secret_env, "secretEnv"),
        (server.headers, server.secret_headers, "secretHeaders"),
    ):
        folded = {key.lower() for key in plain} if name == "secretHeaders" else set(plain)
        for key in secret:
            if (key.lower() if name == "secretHeaders" else key) in folded:
                yield Problem(f"{path}.{name}.{key}", "is also set without a secret; remove one of the two")
