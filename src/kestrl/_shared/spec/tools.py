"""The models of `spec.tools`: Python tools by import path, and the tools of MCP and HTTP servers."""

from __future__ import annotations

import re
from ipaddress import ip_network
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from kestrl._shared.spec.model import Model, PositiveInt
from kestrl._shared.spec.scalars import BaseUrl, Duration, ImportPath, JsonObject, Name, RuntimeClassName
from kestrl._shared.spec.secrets import SecretRef, SecretValue, VariableName

ToolName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
HeaderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}$")]
HeaderValue = Annotated[str, Field(pattern=r"^[ -~]*$", max_length=4096)]
Argument = Annotated[str, Field(max_length=4096)]
HostAndPort = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?$", max_length=270)]
"""A host name or an address (IPv6 in brackets), and a port if it is not 443."""


def _network(text: str) -> str:
    ip_network(text)  # its ValueError names what is wrong
    return text


Network = Annotated[str, Field(pattern=r"^[0-9a-fA-F.:]+(/[0-9]{1,3})?$", max_length=64), AfterValidator(_network)]
"""An address or a network such as 10.1.0.0/16."""


class McpServer(Model):
    """A server that offers tools by the Model Context Protocol."""

    command: Annotated[list[Argument], Field(min_length=1, max_length=256)] | None = None
    """Program and arguments of a server on stdio, started by the tool service in the manifest's folder."""
    env: dict[VariableName, Annotated[str, Field(max_length=32_768)]] = {}
    """Environment variables of the program, in addition to PATH, HOME, USER, SHELL, TMPDIR, TZ and the locale's."""
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


class HttpEndpoint(Model):
    """An endpoint of an HTTP server, declared as a tool."""

    name: ToolName
    """Name for the model."""
    description: Annotated[str, Field(min_length=1, max_length=4096)]
    """Description for the model."""
    method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"] = "GET"
    """Method of the request. A parameter that is not in `path` is in the query with GET and DELETE, and a property of
    the JSON body with others."""
    path: Annotated[str, Field(pattern=r"^/[^?#\s]*$", max_length=2048)]
    """Path after `baseUrl`, with parameters in braces: /items/{id}."""
    parameters: JsonObject = {}
    """JSON Schema of each parameter, by name. A parameter of `path` that is not here is a string."""
    required: Annotated[list[str], Field(max_length=256)] = []
    """Required parameters, in addition to those of `path`."""

    @property
    def path_parameters(self) -> list[str]:
        """Names in braces of `path`, in their order."""
        return re.findall(r"\{([^{}]+)\}", self.path)


class HttpServer(Model):
    """A server whose HTTP endpoints are tools, described by an OpenAPI document or declared here."""

    openapi: Annotated[str, Field(min_length=1, max_length=2048)] | None = None
    """OpenAPI document (3.0 or 3.1, JSON or YAML) whose operations are tools: a path beside the manifest, or a URL that
    is read when the tool service starts."""
    endpoints: Annotated[list[HttpEndpoint], Field(min_length=1, max_length=256)] | None = None
    """Endpoints that are tools, in place of a document."""
    base_url: BaseUrl | None = None
    """URL before the paths of operations, such as https://api.example.com/v1; the servers of a document are not used.
    Default: the first server of a document that is read from the same scheme, host and port."""
    headers: dict[HeaderName, HeaderValue] = {}
    """HTTP headers of every request. A header parameter of an operation that is set here is hidden from the model."""
    secret_headers: dict[HeaderName, SecretValue] = {}
    """HTTP headers from secrets, such as Authorization with the prefix `Bearer `."""
    session_header: HeaderName | None = None
    """Header with a random id of the episode, for servers that keep state. Cookies are kept per episode in any case."""
    allow_hosts: Annotated[list[HostAndPort], Field(max_length=64)] = []
    """Hosts (with port, if it is not 443) that requests may be redirected to, in addition to those of `baseUrl` and
    `openapi`. Anything else is refused."""
    private_networks: Annotated[list[Network], Field(max_length=64)] = []
    """Private networks in which the addresses of hosts may be. Default: none, except for names of Services, for names
    without a dot, and for hosts given by their address."""
    timeout: Duration | None = None
    """Time limit of a call with all its attempts, below rollout.deadlines.tool. Default: 80 percent of that."""
    max_response_bytes: Annotated[int, Field(ge=1, le=1_000_000)] = 100_000
    """Bytes of a response that are read; what follows is cut, with a marker."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16
    """Maximum concurrent requests."""

    @property
    def openapi_url(self) -> str | None:
        """`openapi` if it is a URL."""
        return self.openapi if (self.openapi or "").startswith(("http://", "https://")) else None


class ToolProcess(Model):
    """A process of its own for the instance of every episode."""

    memory_mb: PositiveInt | None = None
    """Maximum memory of one instance in MiB, in addition to what the imported module takes. Default: no limit."""


class SandboxClaim(Model):
    """Sandboxes that a tool claims from a warm pool of kubernetes-sigs/agent-sandbox."""

    warm_pool: Name
    """SandboxWarmPool in the namespace of the job, whose pods run `kestrl sandbox serve`."""
    secret_ref: SecretRef
    """Secret with the entry KESTRL_SANDBOX_TOKEN, the token of the servers in the pool's pods."""
    port: Annotated[int, Field(ge=1, le=65_535)] = 8080
    """Port of these servers."""


class ToolSandbox(Model):
    """Where a tool runs on a cluster, and what isolates it."""

    runtime_class_name: RuntimeClassName | None = None
    """RuntimeClass of the pod of the tool service, such as gvisor. All tools of a job share that pod: those that name
    one name the same."""
    claim: SandboxClaim | None = None
    """Runs the code of this tool, a code interpreter of `kestrl_sandbox.tool` or a class whose `start_service` takes
    `warm_pool`, in sandboxes claimed from a warm pool, one for all tools, and not in the tool service's pod."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.runtime_class_name is None) == (self.claim is None):
            raise ValueError(
                "give `runtimeClassName` or `claim`, and one of them only: code in a claimed sandbox has the "
                "RuntimeClass of the pool's template"
            )
        return self


class Tool(Model):
    """One tool, an environment whose methods are tools, or a server with tools."""

    name: ToolName | None = None
    """Name for the model; for an environment or a server, the name in rows. Default: the last part of `use`, or `mcp`
    or `http`."""
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
    """Where the tool runs on a cluster, and what isolates it."""
    mcp: McpServer | None = None
    """An MCP server whose tools are offered."""
    http: HttpServer | None = None
    """An HTTP server whose endpoints are offered as tools."""
    tools: Annotated[list[ToolName], Field(min_length=1, max_length=256)] | None = None
    """Tools of the server that are offered, those of an OpenAPI document by their operationId. Default: all."""
    exclude: Annotated[list[ToolName], Field(max_length=256)] = []
    """Tools of the server that are not offered, by the same names."""
    unsupported: Literal["refuse", "skip"] = "refuse"
    """Tools of the server that cannot be offered, such as one with a schema that leads out of itself: `refuse` ends
    the start with names and reasons, `skip` leaves them out, with a warning in the log."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if [self.use, self.mcp, self.http].count(None) != 2:
            raise ValueError("give `use`, `mcp` or `http`, and one of them only")
        return self

    @property
    def label(self) -> str:
        """`name`, or the last part of `use`, or the kind of server."""
        kind = "http" if self.mcp is None else "mcp"
        return self.name or (kind if self.use is None else self.use.rpartition(":")[2].rpartition(".")[2])

    @property
    def names(self) -> list[str]:
        """Names of its tools, as far as the manifest has them; else its own."""
        declared = [endpoint.name for endpoint in (self.http.endpoints if self.http else None) or ()]
        return self.methods or self.tools or declared or [self.label]
