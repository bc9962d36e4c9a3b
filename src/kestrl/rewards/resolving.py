"""From what a manifest names to the function: the one place that knows both built-in names and import paths."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

from kestrl.errors import UserInputError
from kestrl.importing import load
from kestrl.rewards import Attempt, Score
from kestrl.rewards.builtin import BUILT_IN

Reward = Callable[[Attempt], float | Score | Awaitable[float | Score]]


def is_built_in(rule: str) -> bool:
    """Whether the rule is one of ours."""
    return ":" not in rule


def resolve(rule: str, *, field: str) -> Reward:
    """The function a rule names.

    Args:
        rule: Name of a built-in, or `module:function`.
        field: The manifest field it stands in, for the message.

    Raises:
        UserInputError: There is none, or it does not take an attempt.
    """
    if is_built_in(rule):
        if rule not in BUILT_IN:
            raise UserInputError(
                f"{field}: {rule!r} is not one of {', '.join(BUILT_IN)}, nor an import path module:function"
            )
        return BUILT_IN[rule]
    function: Any = load(rule, field=field)
    if not callable(function):
        raise UserInputError(f"{field}: {rule} is a {type(function).__name__}; a reward is a function of an attempt")
    try:
        inspect.signature(function).bind(object())
    except TypeError as error:
        raise UserInputError(
            f"{field}: {rule} must take one argument, the attempt: def reward(attempt) -> float ({error})"
        ) from error
    except ValueError:  # a callable without a readable signature (an extension module's): its first call will tell
        pass
    return cast(Reward, function)
