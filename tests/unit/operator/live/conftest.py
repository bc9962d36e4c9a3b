"""The `stage` fixture; see `stage.py`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from kestrl._shared.backoff import Backoff
from kestrl_operator.controllers import status_writer
from kestrl_operator.work import workqueue

from .stage import Stage, staged


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stage]:
    """A fake cluster with the CRD; failed passes are retried sooner than in production, and numbers written at once."""
    monkeypatch.setattr(status_writer, "NUMBERS_SECONDS", 0.0)
    monkeypatch.setattr(workqueue, "BACKOFF", Backoff(0.1, 120))
    async with staged(tmp_path, monkeypatch) as made:
        yield made
