"""The built-in agent loops by their names in a manifest. The rollout worker implements them; checks, messages and the
reference take them from this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict


class LoopConfig(BaseModel):
    """Base of the `config` of a loop: the keyword arguments of its class."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _budget(argument: object) -> object:
    if argument is not None and (type(argument) is not int or argument < 1):
        raise ValueError(f"is a number of tokens, at least 1, not {argument!r}")
    return argument


def _request(argument: object) -> object:
    if not isinstance(argument, str) or not argument.strip():
        raise ValueError("is a text that asks for a summary")
    return argument


class CompactingConfig(LoopConfig):
    """Arguments of `compacting_agent`."""

    at: Annotated[int | None, BeforeValidator(_budget)] = None
    request: Annotated[str, BeforeValidator(_request)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInLoop:
    """A loop that a manifest names without an import path."""

    implementation: str
    """Import path of an async function, or of a class where the loop takes a `config`."""
    summary: str = ""
    """What its name does not say, for the reference."""
    uses_tools: bool = True
    """Whether it calls tools, and the worker parses the calls for it."""
    compacts: bool = False
    """Whether an episode has several rows, so that it may sample more than the context holds."""
    config: type[LoopConfig] | None = None
    """None if it takes no `config`."""


BUILT_IN = {
    "tool_agent": BuiltInLoop(implementation="kestrl_rollout.agents.tool_agent:tool_agent"),
    "compacting_agent": BuiltInLoop(
        implementation="kestrl_rollout.agents.compacting_agent:CompactingAgent",
        summary="which has the model summarise at a budget of tokens",
        compacts=True,
        config=CompactingConfig,
    ),
    "single_turn": BuiltInLoop(implementation="kestrl_rollout.agents.single_turn:single_turn", uses_tools=False),
}
VERL_NAMES: Mapping[str, str] = {"single_turn_agent": "single_turn"}
"""verl's names of built-in loops, where they differ."""
