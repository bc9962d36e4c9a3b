"""Resolves rules of a manifest to functions: built-in names and import paths."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

from kestrl.errors import UserInputError
from kestrl.importing import load
from kestrl.rewards import Attempt, Score
from kestrl.rewards.registry import BUILT_IN

FOREIGN = {"completions": "TRL", "prompts": "TRL", "data_source": "verl", "solution_str": "verl"}
"""First parameters of rewards that were written for other frameworks."""
Returned = float | Sequence[float] | Score
Reward = Callable[[Attempt], Returned | Awaitable[Returned]]


def is_built_in(rule: str) -> bool:
    """Whether the rule is built in."""
    return ":" not in rule


def resolve(rule: str, *, field: str, config: Mapping[str, Any] | None = None) -> Reward:
    """Function of a rule, with its configuration applied.

    Args:
        rule: Name of a built-in, or `module:function`.
        field: Manifest field of the rule, such as `spec.rewards[0].rule`, for the message.
        config: Additional keyword arguments.

    Raises:
        UserInputError: It does not exist, or does not accept an attempt and this configuration.
    """
    function = _named(rule, field)
    kwargs = dict(config or {})
    if is_built_in(rule) and BUILT_IN[rule].mathematical(kwargs) and find_spec("math_verify") is None:
        raise UserInputError(f"{field}: {rule} needs math-verify: pip install 'kestrl[math]'")
    try:
        inspect.signature(function).bind(object(), **kwargs)
    except TypeError as error:
        raise UserInputError(f"{field.rpartition('.')[0]}.config: does not fit {rule}: {error}") from error
    except ValueError:  # a callable without a readable signature: checked by its first call
        pass
    return partial(function, **kwargs) if kwargs else function


def _named(rule: str, field: str) -> Reward:
    if is_built_in(rule):
        if rule not in BUILT_IN:
            raise UserInputError(
                f"{field}: {rule!r} is not one of {', '.join(BUILT_IN)}, nor an import path module:function"
            )
        return BUILT_IN[rule].function
    function: Any = load(rule, field=field)
    if not callable(function):
        raise UserInputError(f"{field}: {rule} is a {type(function).__name__}; a reward is a function of an attempt")
    try:
        signature = inspect.signature(function)
        _refuse_foreign(rule, signature, field)
        signature.bind_partial(object())
    except TypeError as error:
        raise UserInputError(
            f"{field}: {rule} must take the attempt as its first argument: def reward(attempt) -> float ({error})"
        ) from error
    except ValueError:  # a callable without a readable signature (of an extension module): checked by its first call
        pass
    return cast(Reward, function)


def _refuse_foreign(rule: str, signature: inspect.Signature, field: str) -> None:
    source = FOREIGN.get(next(iter(signature.parameters), ""))
    if source is not None:
        raise UserInputError(
            f"{field}: {rule}{signature} has the signature of {source}; a reward here is called with one attempt: "
            f"def reward(attempt) -> float (docs/coming-from.md has both)"
        )
