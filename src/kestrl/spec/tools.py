"""The models of `spec.tools`: Python tools by import path, and the tools of MCP servers."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kestrl.spec.model import Model, PositiveInt
from kestrl.spec.scalars import BaseUrl, ImportPath, JsonObject
from kestrl.spec.secrets import SecretValue, VariableName

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
HeaderValue = Annotated[str, Field(pattern=r"^[ -~]*$", max_length=4096)]
RuntimeClassName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
Argument = Annotated[str, Field(max_length=4096)]


class McpServer(Model):
    """A server that offers tools by the Model Context Protocol."""

    command: Annotated[list[Argument], Field(min_length=1, max_length=256)] | None = None
    """Program and arguments of a server on stdio, started by the tool service in the manifest's folder."""
    env: dict[VariableName, Annotated[str, Field(max_length=32_768)]] = {}
    """Environment variables of the program. Of the tool service's own it gets PATH, HOME, USER, SHELL, TMPDIR, TZ and
    those of the locale, and no others."""
    secret_env: dict[VariableName, SecretValue] = {}
    """Environment variables of the program from secrets."""
    url: BaseUrl | None = None
    """URL of a server on streamable HTTP, such as https://mcp.example.com/mcp."""
    headers: dict[HeaderName, HeaderValue] = {}
    """HTTP headers of every request."""
    secret_headers: dict[HeaderName, SecretValue] = {}
    """HTTP headers from secrets, such as Authorization with the prefix `Bearer `."""
    per_episode: bool = False
    """Whether every episode has a server process (or an HTTP session) of its own, for servers that keep state. Default:
    all episodes share one."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Maximum concurrent calls of the shared server, or servers of episodes that start at the same time."""


class ToolProcess(Model):
    """A process of its own for the instance of every episode."""

    memory_mb: PositiveInt | None = None
    """Maximum memory of one instance in MiB, in addition to what the imported module takes. Default: no limit."""


class ToolSandbox(Model):
    """Isolation of the tool service from its node, on a cluster."""

    runtime_class_name: RuntimeClassName
    """RuntimeClass of the pod of the tool service, such as gvisor. All tools of a job share that pod: those that name
    one name the same."""


class Tool(Model):
    """One tool, an environment whose methods are tools, or a server with tools."""

    name: ToolName | None = None
    """Name for the model; for an environment or a server, the name in rows. Default: the last part of `use`, or
    `mcp`."""
    use: ImportPath | None = None
    """Import path of a function, of a class whose instances are callable, or of an environment: a class whose methods
    are tools. One instance per episode."""
    methods: Annotated[list[ToolName], Field(min_length=1, max_length=64)] | None = None
    """Methods of the environment that are tools. Default: all public methods of a class without `__call__`."""
    config: JsonObject = {}
    """Keyword arguments of the function or class, the same for every episode; rows cannot override them."""
    process: ToolProcess | None = None
    """Runs the instance of every episode in a process of its own, without the credentials of the tool service: a
    crash, a hang or too much memory ends this instance alone. Default: in the process of the tool service."""
    sandbox: ToolSandbox | None = None
    """Isolation of the tool service from its node, on a cluster."""
    mcp: McpServer | None = None
    """An MCP server whose tools are offered."""
    tools: Annotated[list[ToolName], Field(min_length=1, max_length=256)] | None = None
    """Tools of the server that are offered. Default: all."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.use is None) == (self.mcp is None):
            raise ValueError("give either `use` or `mcp`, and one of them only")
        return self

    @property
    def label(self) -> str:
        """`name`, or the last part of `use`, or the kind of server."""
        return self.name or ("mcp" if self.use is None else self.use.rpartition(":")[2].rpartition(".")[2])
