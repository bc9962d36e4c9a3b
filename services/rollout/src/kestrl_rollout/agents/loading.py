"""Loading of the agent loops that the manifest names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kestrl.agents import Conversation, Loop
from kestrl.agents.registry import BUILT_IN as REGISTRY
from kestrl.agents.registry import VERL_NAMES
from kestrl.compat.verl import imports
from kestrl.compat.verl.loops import adapt
from kestrl.data.row_loops import loop_problem
from kestrl.episode import Json
from kestrl.errors import Boundary, SeveralProblems, UserInputError
from kestrl.importing import load

FIELD = "agent.loop"
LOOPS_FIELD = "agent.loops"
CONFIG_FIELD = "agent.config"
LOOPS_CONFIG_FIELD = "agent.loopsConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLoop:
    """An agent loop and its properties."""

    run: Loop
    name: str
    built_in: bool
    """Whether the loop is a part of KestRL, so that an exception in it is not the user's error."""
    uses_tools: bool
    reads_calls: bool
    """Whether the worker parses tool calls for the loop (`Reply.calls`)."""
    writes_prompts: bool = False
    """Whether its prompts are its own, with the tools that it offers the model."""
    field: str = FIELD
    """The manifest field that names it, for messages."""
    outside: bool = False
    """Whether it has the episodes run outside of the worker."""
    environment: bool = False
    """Whether it is an environment that runs its episodes itself, which gives the prompt, too."""

    @property
    def title(self) -> str:
        """Field and name, for messages."""
        return f"{self.field} {self.name}"

    @property
    def boundary(self) -> Boundary:
        """What an episode waits for while it runs."""
        if self.environment:
            return Boundary.ENVIRONMENT
        return Boundary.INFRASTRUCTURE if self.built_in else Boundary.USER_CODE


@dataclass(frozen=True, slots=True)
class EnvironmentResult:
    """What an environment that runs its episodes itself returns for one."""

    states: Mapping[str, Json]
    """State of the environment by its name, for the rule `environment_reward`."""


def _built_in(name: str, config: Mapping[str, Any] | None = None) -> LoadedLoop:
    """A loop of the registry.

    Raises:
        TypeError: It takes no such argument.
        ValueError: An argument is not one that it takes.
    """
    loop = REGISTRY[name]
    target: Any = load(loop.implementation, field=FIELD)
    run: Loop = target if loop.config is None else target(**config or {}).run
    return LoadedLoop(run=run, name=name, built_in=True, uses_tools=loop.uses_tools, reads_calls=loop.uses_tools)


BUILT_IN: Mapping[str, LoadedLoop] = {name: _built_in(name) for name in REGISTRY}


@dataclass(frozen=True, slots=True)
class Loops:
    """The loops of a job."""

    default: LoadedLoop
    """`agent.loop`."""
    named: Mapping[str, LoadedLoop]
    """Loops that rows may name in `agent_name`: those of `agent.loops` and, unless the default is outside of the
    worker, the built-in ones."""
    listed: Mapping[str, LoadedLoop]
    """`agent.loops`."""
    use_tools: bool
    """Whether a loop named by the manifest calls tools."""
    read_calls: bool
    """Whether the worker parses tool calls for one of them."""

    def of(self, agent: str) -> LoadedLoop:
        """The loop of a scenario.

        Raises:
            UserInputError: The job has no loop of this name (code `unknown_agent`).
        """
        if not agent:
            return self.default
        if agent not in self.named and self.default.outside:
            raise UserInputError(loop_problem(agent, runner=self.default.field, loops=self.named), code="unknown_agent")
        if agent not in self.named:
            raise UserInputError(
                f"agent_name: the job has no agent loop {agent!r} (it has: "
                f"{', '.join(self.named)}); add it to spec.{LOOPS_FIELD}",
                code="unknown_agent",
            )
        return self.named[agent]

    def led_by(self, outside: LoadedLoop) -> Loops:
        """These loops behind an agent or environment outside of the worker, which no row leaves by the name of a
        built-in loop.
        """
        return replace(self, default=outside, named=self.listed)


def load_loops(
    path: str,
    config: Mapping[str, Any],
    paths: Mapping[str, str],
    configs: Mapping[str, Mapping[str, Any]],
) -> Loops:
    """Loads `agent.loop` and `agent.loops` with their configurations.

    Raises:
        UserInputError: Loops cannot be loaded; one line for each.
    """
    problems: list[str] = []

    def load(path: str, field: str, config: Mapping[str, Any] | None, config_field: str) -> LoadedLoop:
        try:
            return load_loop(path, config, field=field, config_field=config_field)
        except UserInputError as error:
            problems.append(str(error))
            return BUILT_IN["single_turn"]

    default = load(path, FIELD, config, CONFIG_FIELD)
    loops_by_name = {
        name: load(loop_path, f"{LOOPS_FIELD}.{name}", configs.get(name), f"{LOOPS_CONFIG_FIELD}.{name}")
        for name, loop_path in paths.items()
    }
    if problems:
        raise SeveralProblems(problems)
    built_in = {**BUILT_IN, **{name: BUILT_IN[ours] for name, ours in VERL_NAMES.items()}}
    in_use = (default, *loops_by_name.values())
    return Loops(
        default,
        {**built_in, **loops_by_name},
        loops_by_name,
        use_tools=any(loop.uses_tools for loop in in_use),
        read_calls=any(loop.reads_calls for loop in in_use),
    )


def load_loop(
    path: str, config: Mapping[str, Any] | None = None, *, field: str = FIELD, config_field: str = CONFIG_FIELD
) -> LoadedLoop:
    """The loop that `agent.loop` names: a built-in, or `module:Class` or `module:function`.

    Args:
        path: The value in the manifest.
        config: The loop's keyword arguments.
        field: The manifest field of the path, for messages.
        config_field: The manifest field of the configuration, for messages.

    Raises:
        UserInputError: It does not exist, is not an agent loop, or does not accept the configuration.
    """
    if path in BUILT_IN:
        return _configured(BUILT_IN[path], config or {}, config_field)
    if ":" not in path:
        raise UserInputError(
            f"{field}: {path!r} is neither built in ({', '.join(BUILT_IN)}) nor of the form package.module:Name"
        )
    target = imports.load(path, field=field)
    return LoadedLoop(
        run=_runnable(target, path, config or {}, field, config_field),
        name=path,
        built_in=False,
        uses_tools=True,
        reads_calls=not imports.is_loop(target),
    )


def _configured(loop: LoadedLoop, config: Mapping[str, Any], field: str) -> LoadedLoop:
    """A built-in loop with its configuration."""
    if not config:
        return loop
    if REGISTRY[loop.name].config is None:
        raise UserInputError(f"{field}: {loop.name} takes no config; remove it, or use your own loop")
    try:
        return _built_in(loop.name, config)
    except TypeError as error:
        raise UserInputError(f"{field}: does not fit {loop.name}: {error}") from error
    except ValueError as error:
        raise UserInputError(f"{field}: {loop.name}: {error}") from error


def _runnable(target: Any, path: str, config: Mapping[str, Any], field: str, config_field: str) -> Loop:
    if imports.is_loop(target):
        _check_config(target, path, config, config_field)
        return adapt(target, config)
    if inspect.isclass(target):
        return _from_class(target, path, config, field, config_field)
    if inspect.iscoroutinefunction(target):
        _check_config(target, path, config, config_field)
        return partial(target, **config) if config else target
    raise UserInputError(f"{field}: {path!r} is neither a class nor an async function")


def _check_config(target: Any, path: str, config: Mapping[str, Any], field: str) -> None:
    try:
        inspect.signature(target).bind_partial(**config)
    except TypeError as error:
        raise UserInputError(f"{field}: does not fit {path}: {error}") from error


def _from_class(cls: type[Any], path: str, config: Mapping[str, Any], field: str, config_field: str) -> Loop:
    if not inspect.iscoroutinefunction(getattr(cls, "run", None)):
        raise UserInputError(f"{field}: {path!r} has no `async def run(self, conversation)`")
    _check_config(cls, path, config, config_field)
    try:
        inspect.signature(cls).bind(**config)
    except TypeError as error:
        raise UserInputError(
            f"{field}: {path!r} cannot be constructed from {config_field} alone "
            f"({', '.join(config) or 'empty'}): {error}"
        ) from error

    async def run(conversation: Conversation) -> object:
        return await cls(**config).run(conversation)

    return run
