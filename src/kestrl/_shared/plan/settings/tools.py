"""Settings of the tool service."""

from __future__ import annotations

from typing import Any, Literal

from kestrl._shared.plan.settings.common import ServiceSettings, SettingsModel


class SecretText(SettingsModel):
    """A text with an entry of a secret."""

    variable: str
    """Environment variable with the entry."""
    prefix: str = ""
    """Text before it."""


class ClaimEntry(SettingsModel):
    """The warm pool from which a Python tool claims its sandboxes."""

    warm_pool: str
    token: SecretText
    port: int
    bind_seconds: float
    """Time in which a claim has to have a sandbox that answers."""
    use_seconds: float
    """Longest time for which one sandbox gets new runs."""
    keep_seconds: float
    """Time after which the cluster deletes a claim in any case."""


class McpEntry(SettingsModel):
    """An MCP server of the manifest."""

    command: tuple[str, ...] = ()
    """Program and arguments of a server on stdio; empty for one on HTTP."""
    env: dict[str, str] = {}
    secret_env: dict[str, SecretText] = {}
    url: str | None = None
    headers: dict[str, str] = {}
    secret_headers: dict[str, SecretText] = {}
    per_episode: bool = False
    concurrency: int = 16


class EndpointEntry(SettingsModel):
    """An endpoint of an HTTP server that the manifest declares."""

    name: str
    description: str
    method: str
    path: str
    parameters: dict[str, Any] = {}
    """JSON Schemas by parameter, those of the path included."""
    required: tuple[str, ...] = ()


class HttpEntry(SettingsModel):
    """An HTTP server of the manifest."""

    openapi: str | None = None
    """Path or URL of the OpenAPI document; None if `endpoints` has the tools."""
    endpoints: tuple[EndpointEntry, ...] = ()
    base_url: str | None = None
    """None means that of the document."""
    headers: dict[str, str] = {}
    secret_headers: dict[str, SecretText] = {}
    session_header: str | None = None
    allow_hosts: tuple[str, ...] = ()
    private_networks: tuple[str, ...] = ()
    seconds: float = 24.0
    """Time limit of a call with all its attempts, in seconds."""
    max_response_bytes: int = 100_000
    concurrency: int = 16


class ProcessEntry(SettingsModel):
    """The process of a Python tool."""

    memory_mb: int | None = None
    """Maximum memory of an instance in MiB; None means no limit."""


class EnvironmentEntry(SettingsModel):
    """What sets the environment of a job apart from other tools."""

    python: str | None = None
    """Its interpreter; None for that of the service, where only its settings are looked at."""
    launcher: str | None = None
    """Unix socket of the container with its image; None where it runs beside the service."""
    acts: bool
    """Whether its class may take the model's turns; else all of its methods are tools."""
    sessions: int
    """Episodes that it plays at the same time."""
    wait_seconds: float
    """Longest wait of an episode for a place among them."""
    start_seconds: float
    """Time limit of its start."""


class ToolEntry(SettingsModel):
    """One entry of `spec.tools`: a Python tool or environment, or a server; or the environment of the job."""

    name: str
    use: str | None = None
    """Import path of a function or class."""
    methods: tuple[str, ...] | None = None
    """Methods of an environment that are tools; None means all public ones, or that it is not an environment."""
    config: dict[str, Any] = {}
    process: ProcessEntry | None = None
    """If set, instances run in processes of their own."""
    environment: EnvironmentEntry | None = None
    """If set, this is the environment of the job, which `process` has too."""
    claim: ClaimEntry | None = None
    """If set, the tool's code runs in claimed sandboxes."""
    mcp: McpEntry | None = None
    http: HttpEntry | None = None
    tools: tuple[str, ...] | None = None
    """Tools of a server that are offered; None means all."""
    exclude: tuple[str, ...] = ()
    """Tools of a server that are not offered."""
    unsupported: Literal["refuse", "skip"] = "refuse"
    """What becomes of a server's tools that cannot be offered."""


class ToolsSettings(ServiceSettings):
    """The tool service."""

    tools: tuple[ToolEntry, ...]
    files: dict[str, str] = {}
    """Paths of the files that tools read, by the uri with which rows name them."""
    call_seconds: float
    """Deadline of one call in seconds."""
    max_sessions: int = 4096
