"""Stands for SGLang's kernels on a CPU, which no registry has: SGLang imports names of them at its start, and calls
none while it serves a text model. What it calls nevertheless raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):  # of the import system
        raise AttributeError(name)

    def absent(*_arguments: object, **_options: object) -> None:
        raise NotImplementedError(f"SGLang's kernel {name} is not there on a CPU")

    return absent
