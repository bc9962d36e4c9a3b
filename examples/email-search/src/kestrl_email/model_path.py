"""Where the tiny warmed-up checkpoint lies: package data."""

from __future__ import annotations

from pathlib import Path


def tiny() -> Path:
    """The folder of `demo://tiny`."""
    return Path(__file__).parent / "model"
