"""A machine with accelerators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.accelerators import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose vendors' programs print what a test has it call with."""
    programs = tmp_path / "programs"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    return Machine(programs, monkeypatch)
