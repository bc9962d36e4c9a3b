"""Data sets: one scenario per row, JSONL or Parquet, in the plain form or in verl's. Every row is validated before a
run starts.

Each name is loaded when it is first used: a process that only converts values reads no file formats.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kestrl.data.locate import locate_data
    from kestrl.data.rows import load_scenarios

__all__ = ["load_scenarios", "locate_data"]

_MODULES = {"load_scenarios": "kestrl.data.rows", "locate_data": "kestrl.data.locate"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
