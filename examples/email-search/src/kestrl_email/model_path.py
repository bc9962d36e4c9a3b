"""Path of the tiny warmed-up checkpoint in the package data."""

from __future__ import annotations

from pathlib import Path


def tiny() -> Path:
    """The folder of `demo://tiny`."""
    return Path(__file__).parent / "model"
