"""The tool service of a job: its tools, and the secrets and servers that they need. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kestrl._shared.plan.components import Component, Role, SecretKey
from kestrl._shared.plan.servers import RemoteServer, server_at
from kestrl._shared.plan.settings.tools import (
    ClaimEntry,
    EndpointEntry,
    HttpEntry,
    McpEntry,
    ProcessEntry,
    SecretText,
    ToolEntry,
)
from kestrl._shared.plan.site import Site
from kestrl._shared.spec.job import Deadlines, JobSpec
from kestrl._shared.spec.secrets import SecretValue
from kestrl._shared.spec.tools import HttpEndpoint, HttpServer, McpServer, SandboxClaim, Tool

CALL_SHARE = 0.8
"""Share of the deadline of a call that an HTTP call may take by default, so that it can end with its own failure."""
NO_FILES: Mapping[str, str] = {}
SPARE_SECONDS = 60.0
"""Seconds beyond the last call of an episode for which its claim is kept, if nobody releases it."""
SANDBOX_TOKEN = "KESTRL_SANDBOX_TOKEN"  # noqa: S105 - a name
"""Entry of the secret of a claim, and variable of `kestrl sandbox serve`."""
SECRET_PREFIX = "KESTRL_TOOL_SECRET_"  # noqa: S105 - a name
"""Prefix of variables with entries of secrets of tools. Programs and processes of tools get no variable with it."""


class _Reference(NamedTuple):
    """An entry of a secret that a tool needs."""

    value: SecretValue
    field: str


def _references(spec: JobSpec) -> Iterator[_Reference]:
    """References of all tools to secrets, in manifest order; the position is the number of the variable."""
    for index, tool in enumerate(spec.tools):
        if tool.mcp is not None:
            for part, values in (("secretEnv", tool.mcp.secret_env), ("secretHeaders", tool.mcp.secret_headers)):
                for name, value in values.items():
                    yield _Reference(value, f"spec.tools[{index}].mcp.{part}.{name}.secretRef")
        if tool.http is not None:
            for name, value in tool.http.secret_headers.items():
                yield _Reference(value, f"spec.tools[{index}].http.secretHeaders.{name}.secretRef")
        if tool.sandbox is not None and tool.sandbox.claim is not None:
            token = SecretValue(secret_ref=tool.sandbox.claim.secret_ref, secret_key=SANDBOX_TOKEN)
            yield _Reference(token, f"spec.tools[{index}].sandbox.claim.secretRef")


def tool_secrets(spec: JobSpec) -> Mapping[str, SecretKey]:
    """Variables with the secrets of tools, by name."""
    return {
        f"{SECRET_PREFIX}{number}": SecretKey(value.secret_ref.name, value.secret_key, field)
        for number, (value, field) in enumerate(_references(spec))
    }


def tool_servers(spec: JobSpec) -> tuple[RemoteServer, ...]:
    """Servers of tools outside the job, each once."""
    servers: dict[tuple[str, int], RemoteServer] = {}
    for index, tool in enumerate(spec.tools):
        for address, field in _addresses(tool):
            server = server_at(address, f"spec.tools[{index}].{field}")
            servers.setdefault((server.host, server.port), server)
    return tuple(servers.values())


def _addresses(tool: Tool) -> Iterator[tuple[str, str]]:
    """URLs of servers that a tool calls, and their fields."""
    if tool.mcp is not None and tool.mcp.url is not None:
        yield tool.mcp.url, "mcp.url"
    if tool.http is not None:
        if tool.http.base_url is not None:
            yield tool.http.base_url, "http.baseUrl"
        if tool.http.openapi_url is not None:
            yield tool.http.openapi_url, "http.openapi"
        for place, host in enumerate(tool.http.allow_hosts):
            yield f"https://{host}", f"http.allowHosts[{place}]"


def with_tool_secrets(component: Component, spec: JobSpec) -> Component:
    """The tool service with the secrets of its tools."""
    return replace(component, user_secrets=tool_secrets(spec))


def with_paths(kwargs: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Arguments of a tool, with paths in place of the uris of files."""
    return {
        name: files.get(argument, argument) if isinstance(argument, str) else argument
        for name, argument in kwargs.items()
    }


def tool_entries(spec: JobSpec, files: Mapping[str, str] = NO_FILES) -> tuple[ToolEntry, ...]:
    """Tools of the job, as settings of the tool service.

    Args:
        spec: The job.
        files: Paths of `spec.data.files` by uri, which replace them in the tools' config.
    """
    texts = iter(
        SecretText(variable=f"{SECRET_PREFIX}{number}", prefix=value.prefix)
        for number, (value, _) in enumerate(_references(spec))
    )
    return tuple(_entry(tool, texts, spec.rollout.deadlines, files) for tool in spec.tools)


def _entry(tool: Tool, texts: Iterator[SecretText], deadlines: Deadlines, files: Mapping[str, str]) -> ToolEntry:
    claim = None if tool.sandbox is None else tool.sandbox.claim
    return ToolEntry(
        name=tool.label,
        use=tool.use,
        methods=None if tool.methods is None else tuple(tool.methods),
        config=with_paths(tool.config, files),
        process=None if tool.process is None else ProcessEntry(memory_mb=tool.process.memory_mb),
        mcp=None if tool.mcp is None else _mcp(tool.mcp, texts),
        http=None if tool.http is None else _http(tool.http, texts, deadlines.tool),
        claim=None if claim is None else _claim(claim, texts, deadlines),
        tools=None if tool.tools is None else tuple(tool.tools),
        exclude=tuple(tool.exclude),
        unsupported=tool.unsupported,
    )


def _claim(claim: SandboxClaim, texts: Iterator[SecretText], deadlines: Deadlines) -> ClaimEntry:
    return ClaimEntry(
        warm_pool=claim.warm_pool,
        token=next(texts),
        port=claim.port,
        bind_seconds=CALL_SHARE * deadlines.tool,
        use_seconds=deadlines.episode,
        # The first call of an episode has twice the time.
        keep_seconds=deadlines.episode + 2 * deadlines.tool + SPARE_SECONDS,
    )


def _mcp(server: McpServer, texts: Iterator[SecretText]) -> McpEntry:
    return McpEntry(
        command=tuple(server.command or ()),
        env=server.env,
        secret_env={name: next(texts) for name in server.secret_env},
        url=server.url,
        headers=server.headers,
        secret_headers={name: next(texts) for name in server.secret_headers},
        per_episode=server.per_episode,
        concurrency=server.concurrency,
    )


def _http(server: HttpServer, texts: Iterator[SecretText], deadline: float) -> HttpEntry:
    return HttpEntry(
        openapi=server.openapi,
        endpoints=tuple(map(_endpoint, server.endpoints or ())),
        base_url=server.base_url,
        headers=server.headers,
        secret_headers={name: next(texts) for name in server.secret_headers},
        session_header=server.session_header,
        allow_hosts=tuple(server.allow_hosts),
        private_networks=tuple(server.private_networks),
        seconds=CALL_SHARE * deadline if server.timeout is None else server.timeout,
        max_response_bytes=server.max_response_bytes,
        concurrency=server.concurrency,
    )


def _endpoint(endpoint: HttpEndpoint) -> EndpointEntry:
    in_path = endpoint.path_parameters
    return EndpointEntry(
        name=endpoint.name,
        description=endpoint.description,
        method=endpoint.method,
        path=endpoint.path,
        parameters={**{key: {"type": "string"} for key in in_path}, **endpoint.parameters},
        required=tuple(dict.fromkeys([*in_path, *endpoint.required])),
    )


def runtime_class(spec: JobSpec, role: Role) -> tuple[str, str] | None:
    """The RuntimeClass that the job's tools, or the pods that run its episodes, ask for and the field that names it;
    None if they name none.
    """
    environment = spec.environment
    if environment is not None and environment.owns_loop is (role is Role.AGENT):
        named = environment.runtime_class_name
        return None if named is None else (named, "spec.environment.runtimeClassName")
    if role is Role.AGENT:
        agent = spec.agent.runtime_class_name
        return None if agent is None else (agent, "spec.agent.runtimeClassName")
    tool_classes = (
        (tool.sandbox.runtime_class_name, f"spec.tools[{index}].sandbox.runtimeClassName")
        for index, tool in enumerate(spec.tools)
        if tool.sandbox is not None and tool.sandbox.runtime_class_name is not None
    )
    return next(tool_classes, None)


def sandbox_claim(spec: JobSpec) -> tuple[SandboxClaim, str] | None:
    """The claim of the tools that run code, which all of them share, and its field; None if no tool names one."""
    tool_claims = (
        (tool.sandbox.claim, f"spec.tools[{index}].sandbox.claim")
        for index, tool in enumerate(spec.tools)
        if tool.sandbox is not None and tool.sandbox.claim is not None
    )
    return next(tool_claims, None)


def file_holders(spec: JobSpec, site: Site) -> tuple[Component, ...]:
    """What holds the volume with the files that tools read, where they are in pods: the preparation of its pod fetches
    them.
    """
    if not site.templates or not spec.data.files:
        return ()
    return (Component(name=f"{Role.FILES}-0", role=Role.FILES, module="kestrl._shared.processes.hold"),)
