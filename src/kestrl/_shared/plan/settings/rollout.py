"""Settings of a rollout worker, and of the pods that run its agent."""

from __future__ import annotations

from typing import Any

from kestrl._shared.plan.settings.common import ServiceSettings, SettingsModel

HEALTH_PATH = "/healthz"
"""Path at which a pod of an agent says that it is loaded."""


class OutsideAgent(SettingsModel):
    """An agent outside of the worker: one of `run`, `command` and `url` is set."""

    run: str | None = None
    """Import path of the function or class."""
    python: str | None = None
    """Interpreter of the process of `run`; None for the worker's own."""
    command: tuple[str, ...] = ()
    pods: str | None = None
    """URL of the pods that run `run` or `command`; None where they run beside the worker."""
    url: str | None = None
    config: dict[str, Any] = {}
    """Keyword arguments, or `config` of a request."""
    env: dict[str, str] = {}
    stops: dict[str, str] = {}
    """Stop reason by the way in which a run ends."""
    stopped_reward: float | None = None


class OutsideEnvironment(SettingsModel):
    """An environment that runs its episodes itself, in a process beside the worker or in pods of its own."""

    name: str
    """Name of its state in an episode."""
    taskset: str
    python: str | None = None
    """Its interpreter; None where it has not been made, or where it runs in pods."""
    pods: str | None = None
    """URL of its pods; None where it runs beside the worker."""
    config: dict[str, Any]
    """Configuration of verifiers' environment."""
    sessions: int
    """Episodes that it plays for a worker, or in a pod, at the same time."""
    wait_seconds: float
    """Time that an episode waits for a place."""
    start_seconds: float


class AgentPodSettings(ServiceSettings):
    """The pods of an agent, or of an environment that runs its episodes itself. Read there with the standard library
    alone, from the user's image.
    """

    agent: OutsideAgent | None = None
    """The agent; None where an environment is set."""
    environment: OutsideEnvironment | None = None
    capacity: int
    """Episodes that run at the same time in a pod; further ones are refused."""
    drain_seconds: float = 60.0
    """Time in which running episodes may end once the pod has to."""


class RolloutSettings(ServiceSettings):
    """A rollout worker."""

    tokenizer: str
    """Folder or Hugging Face id with tokenizer.json and a chat template."""
    template: str | None = None
    """File of a chat template that replaces the model's own."""
    template_arguments: dict[str, Any] = {}
    """Variables of the template."""
    agent: str
    """A built-in loop, or an import path."""
    agent_config: dict[str, Any] = {}
    outside: OutsideAgent | None = None
    """The agent in place of the loop `agent`."""
    environment: OutsideEnvironment | None = None
    """The environment that runs its episodes itself, in place of the loop `agent`."""
    refused_fields: tuple[str, ...] = ()
    """Fields of clients that are refused where they would be counted."""
    gateway_listen: str = "127.0.0.1:0"
    """`host:port` at which episodes are served by URL; port 0 is any."""
    tool_call_format: str | None = None
    """Name or import path; None chooses it from the template."""
    agents: dict[str, str] = {}
    """Additional loops, by the name in rows."""
    agents_config: dict[str, dict[str, Any]] = {}
    """Keyword arguments of the loops in `agents`, by name."""
    offers_tools: bool = False
    """Whether the job has tools."""
    describes_tools: bool = False
    """Whether groups contain the schemas of the offered tools, for a judge model."""
    engine: str = "vllm"
    """Dialect of the job's engines."""
    tools_address: str
    judge_address: str
    concurrency: int
    context_length: int
    """Maximum tokens of one sequence."""
    max_parallel_calls: int = 8
    max_tool_tokens: int = 1024
    """Maximum tokens of an observation; longer ones are truncated with a marker."""
    call_seconds: float = 30.0
    drain_seconds: float = 20.0
