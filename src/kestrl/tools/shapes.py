"""Shapes of JSON values: type guards that both type checkers understand, and what can be sent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


DEEPEST = 64
"""Maximum levels of nesting in the arguments of a call, and in what a tool returns."""
LARGEST_INTEGER = 10**4300
"""Bound on integers: Python converts no more digits to text."""


def json_problem(value: object, deepest: int = DEEPEST) -> str:
    """Why a value cannot be sent as JSON; empty if it can. Without recursion, so that no value is too deep for it.

    A value of a model's is nested at most `DEEPEST` levels, and has neither lone surrogates nor numbers without a JSON
    form.

    Args:
        value: The value.
        deepest: Maximum levels of nesting.
    """
    level: list[object] = [value]
    for _ in range(deepest + 1):
        next_level: list[object] = []
        for item in level:
            if isinstance(item, str):
                if not _is_text(item):
                    return "it has a lone surrogate, which is not text"
            elif isinstance(item, bool) or item is None:
                continue
            elif isinstance(item, int):
                if abs(item) >= LARGEST_INTEGER:
                    return "it has a number that is too large"
            elif isinstance(item, float):
                if not math.isfinite(item):
                    return f"{item} is not valid JSON"
            elif is_mapping(item):
                next_level += [*item, *item.values()]
            elif is_list(item) or isinstance(item, tuple):
                next_level += item
            else:
                return f"a value of type {type(item).__name__} has no JSON form"
        if not next_level:
            return ""
        level = next_level
    return f"it is nested more than {deepest} levels deep"


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
