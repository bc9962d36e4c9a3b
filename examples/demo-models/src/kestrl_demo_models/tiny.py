"""The tiny warmed-up checkpoint of this package, which `kestrl demo-model build` of kestrl-email makes."""

from __future__ import annotations

from pathlib import Path


def tiny() -> Path:
    """The folder of `demo://tiny`."""
    return Path(__file__).parent / "weights" / "tiny"
