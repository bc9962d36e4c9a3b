"""The models of `spec.agent`: a loop in the worker, or an agent outside of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kestrl._shared.spec.model import LARGEST_CONTEXT, Model, listed
from kestrl._shared.spec.scalars import (
    Address,
    BaseUrl,
    ImageName,
    ImportPath,
    JsonObject,
    RuntimeClassName,
    TemplateArguments,
)
from kestrl._shared.spec.secrets import VariableName
from kestrl._shared.spec.tools import Argument
from kestrl.agents.registry import BUILT_IN as LOOPS
from kestrl.formats.registry import BUILT_IN as FORMATS


class Template(Model):
    """The chat template: a file in place of the model's own, and what it is rendered with."""

    uri: Address | None = None
    """A file in place of the model's own template."""
    arguments: TemplateArguments = {}
    """Variables of the template, such as `{enable_thinking: false}` of Qwen3's."""


_LOOPS = listed({name: loop.summary for name, loop in LOOPS.items()})
_FORMATS = sorted(FORMATS)
TOOL_CALL_FORMAT = rf"^({'|'.join(_FORMATS)}|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$"
"""A built-in tool-call format, or `package.module:Format`."""
LoopPath = Annotated[str, Field(pattern=r"^([a-z_]+|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$")]
LoopName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]


StopName = Annotated[
    str, Field(pattern=r"^(exit:[0-9]{1,3}|http:[0-9]{3}|[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*)$")
]
"""A class of exceptions with or without its module, `exit:CODE` of a command, or `http:STATUS` of a URL."""
Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9][^#\r\n]*$", max_length=256)]


OUTSIDE = ("run", "command", "url")
"""Fields of `Agent` that take the place of a loop."""


class AgentPython(Model):
    """The Python environment of an agent's host process."""

    requirements: Annotated[list[Requirement], Field(min_length=1, max_length=256)]
    """Requirements as pip has them, such as langgraph==1.0.2; they are installed by uv."""


class Agent(Model):
    """The agent: a loop in the worker, or a function, program or service that runs an episode by its URL."""

    loop: Annotated[
        LoopPath, Field(description=f"{_LOOPS}, or the import path of a loop (for KestRL or for verl).")
    ] = "tool_agent"
    run: ImportPath | None = None
    """Import path of a function `run(row, base_url, key, deadline)`, sync or async, or of a class with such a method,
    which runs an episode in a process of its own for all episodes of a worker; in place of a loop."""
    python: AgentPython | None = None
    """Environment of the process of `run`. Default: that of the job."""
    command: Annotated[list[Argument], Field(min_length=1, max_length=256)] | None = None
    """Program and arguments that run an episode, one process for each, in the manifest's folder; in place of a loop."""
    url: BaseUrl | None = None
    """URL of a service that runs an episode for each POST, such as http://127.0.0.1:9000/episodes; in place of a
    loop."""
    image: ImageName | None = None
    """Image with `run` or `command` and all that it needs, and a `python3` from 3.11, for pods of its own on a cluster.
    Default: the pods of the rollout workers run it, with what their image has. On one machine it is not used."""
    replicas: Annotated[int, Field(ge=1, le=1000)] = 1
    """Pods of `image`; workers spread their episodes over them."""
    runtime_class_name: RuntimeClassName | None = None
    """RuntimeClass of the pods of `image`, such as gvisor. Default: that of all tools of the cluster."""
    env: dict[VariableName, Annotated[str, Field(max_length=32_768)]] = {}
    """Environment variables of the processes of `run` and `command`. Of the worker's own they get PATH, HOME, USER,
    SHELL, TMPDIR, TZ and those of the locale, and no others."""
    stops: Annotated[dict[StopName, Literal["agent_limit", "model_behavior"]], Field(max_length=256)] = {}
    """Ways to end that are a limit of the agent's or a mistake of the model: the episode is scored. Names of exceptions
    (`mine.NoPlan`), `exit:CODE`, `http:STATUS`; added to those of known frameworks."""
    stopped_reward: Annotated[float, Field(strict=False)] | None = None
    """Value of the rule `loop_reward` for a run that ended so, and thus returned no reward."""
    loops: dict[LoopName, LoopPath] = {}
    """Additional loops by name. A row's `agent_name` selects one of these or a built-in loop; without it `loop` is
    used. Where the job has `run`, `command` or `url`, rows may select these alone."""
    refuses: list[Literal["tool_choice", "response_format", "parallel_tool_calls"]] = []
    """Calls at an episode's URL that ask what training cannot force get 400: a `tool_choice` of `required` or a name, a
    `response_format`, or no `parallel_tool_calls`. Default: they are sampled as they are, and counted."""
    config: JsonObject = {}
    """Keyword arguments of the loop's class (or of its function, after the conversation), the same for every
    episode; also those of `run`, and what `command` and `url` get as `config`."""
    loops_config: dict[LoopName, JsonObject] = {}
    """Keyword arguments of the loops of `loops`, by name."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Maximum completions of one episode."""
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 2048
    """Maximum sampled tokens of one episode. On one machine the default is at most half of the model's positions."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] | None = None
    """Maximum sampled tokens of one turn. Default: limited by maxTokens only."""
    max_tool_tokens: Annotated[int, Field(ge=1, le=LARGEST_CONTEXT)] = 1024
    """Maximum tokens of an observation; longer ones are truncated with a marker."""
    max_parallel_calls: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum tool calls of one turn that are executed."""
    template: Template | None = None
    tool_call_format: Annotated[
        Annotated[str, Field(pattern=TOOL_CALL_FORMAT)] | None,
        Field(
            description=f"Tool-call format: {', '.join(_FORMATS)}, or the import path of a format. Default: detected "
            "from the chat template; a template with an unknown format is refused if the job has tools."
        ),
    ] = None

    @property
    def outside(self) -> str | None:
        """The field of an agent outside of the worker: `run`, `command` or `url`; None for a loop."""
        return next((name for name in OUTSIDE if getattr(self, name) is not None), None)
