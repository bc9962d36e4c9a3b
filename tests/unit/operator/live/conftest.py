"""The `stage` fixture; see `stage.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kestrl_operator.controllers import status_writer
from kestrl_operator.work import workqueue

from .stage import Stage, staged


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stage]:
    """A fake cluster with the CRD; failed passes are retried sooner than in production, and numbers written at once."""
    monkeypatch.setattr(status_writer, "NUMBERS_SECONDS", 0.0)
    monkeypatch.setattr(workqueue, "FIRST_BACKOFF", 0.1)
    async with staged(tmp_path, monkeypatch) as made:
        yield made
