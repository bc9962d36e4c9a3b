"""The stage: see `stage.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kestrl_operator import work

from .stage import Stage, staged


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stage]:
    """A fake cluster with the CRD; a pass that failed is tried again sooner than it is in earnest."""
    monkeypatch.setattr(work, "FIRST_BACKOFF", 0.1)
    async with staged(tmp_path, monkeypatch) as made:
        yield made
