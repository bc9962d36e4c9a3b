"""A generator of reasoning-gym on a real engine: the tiny model is shown some of its solutions, and learns it by RL."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.environments.__main__ import curve

from .runs import belonging_to

pytestmark = [pytest.mark.engine, pytest.mark.share(4), pytest.mark.timeout(1500)]
STEPS = 10
LEAST_RISE = 0.1
"""Rise of the held-out reward, of 1."""


def test_a_generator_is_learned(tmp_path: Path) -> None:
    figures = curve("reasoning-gym", 42, STEPS, tmp_path)
    summary = figures.summary
    assert (summary["status"], summary["steps"], summary["failures"]) == ("succeeded", STEPS, {})
    assert summary["after"]["reward"] - summary["before"]["reward"] > LEAST_RISE, figures
    assert belonging_to(tmp_path) == []
