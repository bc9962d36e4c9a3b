"""From the manifest's `agent.loop` to something to run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from kestrl import importing
from kestrl.agents import Conversation, Loop, verl
from kestrl.errors import UserInputError
from kestrl_rollout.agents.single_turn import single_turn
from kestrl_rollout.agents.tool_agent import tool_agent

FIELD = "agent.loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLoop:
    """A loop and what the worker must know of it."""

    run: Loop
    name: str
    built_in: bool
    """What a built-in raises is our bug, not the user's."""
    uses_tools: bool


BUILT_IN = {
    "tool_agent": LoadedLoop(run=tool_agent, name="tool_agent", built_in=True, uses_tools=True),
    "single_turn": LoadedLoop(run=single_turn, name="single_turn", built_in=True, uses_tools=False),
}


def load_loop(path: str) -> LoadedLoop:
    """The loop that `agent.loop` names: a built-in, or `module:Class` or `module:function`.

    Raises:
        UserInputError: There is no such thing, or it is no agent loop.
    """
    if path in BUILT_IN:
        return BUILT_IN[path]
    if ":" not in path:
        raise UserInputError(
            f"{FIELD}: {path!r} is neither built in ({', '.join(BUILT_IN)}) nor of the form package.module:Name"
        )
    try:
        found = importing.load(path, field=FIELD)
    except UserInputError as error:
        if not verl.is_missing(error.__cause__):
            raise
        verl.install()
        found = importing.load(path, field=FIELD)
    return LoadedLoop(run=_runnable(found, path), name=path, built_in=False, uses_tools=True)


def _runnable(found: Any, path: str) -> Loop:
    if verl.is_loop(found):
        return verl.adapt(found)
    if inspect.isclass(found):
        return _from_class(found, path)
    if inspect.iscoroutinefunction(found):
        return found
    raise UserInputError(f"{FIELD}: {path!r} is neither a class nor an async function")


def _from_class(found: type[Any], path: str) -> Loop:
    if not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise UserInputError(f"{FIELD}: {path!r} has no `async def run(self, conversation)`")
    try:
        inspect.signature(found).bind()
    except (TypeError, ValueError) as error:
        raise UserInputError(f"{FIELD}: {path!r} cannot be made without arguments: {error}") from error

    async def run(conversation: Conversation) -> None:
        await found().run(conversation)

    return run
