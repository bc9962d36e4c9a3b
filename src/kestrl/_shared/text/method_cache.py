"""Caches of the results of methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar
from weakref import WeakMethod

Result = TypeVar("Result")


def method_cache(method: Callable[..., Result], maxsize: int) -> Callable[..., Result]:
    """A cache of a method's results that does not keep its object: one that kept itself would have its process and its
    tokenizers until the next garbage collection.

    Args:
        method: A bound method, whose arguments can be hashed.
        maxsize: Largest number of results.
    """
    reference: WeakMethod[Callable[..., Result]] = WeakMethod(method)

    def called(*arguments: object) -> Result:
        bound = reference()
        assert bound is not None, "the object calls its own cache"
        return bound(*arguments)

    return lru_cache(maxsize=maxsize)(called)
