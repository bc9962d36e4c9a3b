"""What a class of an environment has: its tools, its hooks, and what `reset` takes and returns."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import FunctionType
from typing import Any

from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl.episode import ACT, ENVIRONMENT_REWARD
from kestrl.errors import ToolFailure, UserInputError, encodable
from kestrl.tools.provider import NO_KWARGS, Kwargs, kwargs_failure

HOOKS = ("reset", "state", ENVIRONMENT_REWARD, "close")
"""Methods of an environment that are called by the session, not by the model."""
ADAPTER_HOOKS = (ACT, "gold")
"""Further ones of the class of a job's environment, if it is an adapter."""
SERVICE_HOOKS = ("start_service", "stop_service")
"""Class methods that are called once, when the service starts and when it ends."""
ROW_HOOK = "check_row"
"""Static or class method that `kestrl validate` calls with a row's `create_kwargs`."""
MAX_PROMPT = 1_000_000
"""Maximum characters that `reset` adds to a prompt, as of an observation."""
METHOD_KINDS = (FunctionType, staticmethod, classmethod)


def has_method(cls: type, name: str) -> bool:
    return callable(getattr(cls, name, None))


def takes_turns(cls: type, entry: ToolEntry) -> bool:
    """Whether the class of a job's environment takes the model's turns.

    Raises:
        UserInputError: Nothing of it can be played, or nothing scores it.
    """
    if entry.environment is None:
        return False
    if not has_method(cls, ENVIRONMENT_REWARD):
        raise UserInputError(f"{cls.__name__} has no {ENVIRONMENT_REWARD}(), so that nothing scores its episodes")
    acts = entry.environment.acts and has_method(cls, ACT)
    if not acts and not public_methods(cls):
        raise UserInputError(
            f"{cls.__name__} has neither tools (public methods) nor {ACT}(text): nothing can be played"
        )
    return acts


def columns_taken(cls: Any, columns: Kwargs) -> Kwargs:
    """The columns of a row that `reset` takes; all of them where it takes any keyword."""
    if not has_method(cls, "reset"):
        return NO_KWARGS
    parameters = inspect.signature(cls.reset).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    return {name: value for name, value in columns.items() if name in {parameter.name for parameter in parameters}}


def tool_methods(cls: type, entry: ToolEntry) -> Sequence[str]:
    """Methods that are tools.

    Raises:
        UserInputError: A listed name is not a method, or has a special meaning.
    """
    if entry.methods is None:
        return public_methods(cls)
    for name in entry.methods:
        if name in (*HOOKS, *SERVICE_HOOKS, ROW_HOOK) or name.startswith("_"):
            raise UserInputError(
                f"the method {name!r} is not for the model: {', '.join((*HOOKS, *SERVICE_HOOKS, ROW_HOOK))} "
                f"and private ones are not tools"
            )
        if not has_method(cls, name):
            raise UserInputError(
                f"{cls.__name__} has no method {name!r} (it has: {', '.join(public_methods(cls)) or 'none'})"
            )
    return entry.methods


def public_methods(cls: type) -> list[str]:
    """Public methods except those of base classes from other modules."""
    methods: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        if base.__module__ == cls.__module__:
            methods |= {name: None for name, value in vars(base).items() if isinstance(value, METHOD_KINDS)}
    return [name for name in methods if not name.startswith("_") and name not in (*HOOKS, *SERVICE_HOOKS, ROW_HOOK)]


def check_reset(cls: Any, entry: ToolEntry, create_kwargs: Kwargs) -> None:
    try:
        inspect.signature(cls.reset).bind(object(), **create_kwargs)
    except TypeError as error:
        raise kwargs_failure(entry.name, "create_kwargs", f"{cls.__name__}.reset: {error}") from error


def returns_nothing(cls: Any) -> bool:
    """Whether `reset` is annotated to return None, so that an episode may begin without it."""
    return inspect.signature(cls.reset).return_annotation in (None, type(None), "None")


def prompt_of(environment: str, returned: object, *, silent: bool) -> str:
    """The text of `reset` for the prompt.

    Raises:
        ToolFailure: It is not text, or `reset` is annotated to return None.
    """
    if returned is None:
        return ""
    if not isinstance(returned, str):
        problem = f"returned a {type(returned).__name__}: return text, which is appended to the prompt, or None"
    elif silent:
        problem = "returned text, but is annotated `-> None`: annotate it `-> str`, and the text ends the prompt"
    elif len(returned) > MAX_PROMPT:
        problem = f"returned {len(returned):,} characters; at most {MAX_PROMPT:,} are appended to the prompt"
    else:
        return encodable(returned)
    raise ToolFailure(f"{environment}: reset() {problem}", code="tool_result_invalid")
