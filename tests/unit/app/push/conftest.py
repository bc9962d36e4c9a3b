"""A run that is sent, and cursors of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.stored_runs import make_stored_run

from kestrl._app.push import cursor


@pytest.fixture(autouse=True)
def cursors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cursor.VARIABLE, str(tmp_path / "pushed"))
    return tmp_path / "pushed"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_stored_run(tmp_path / "runs" / "job-1")
