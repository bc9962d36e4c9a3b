"""The conformance suite of environments that run their episodes themselves: what passes, and what it finds."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from tests.unit.rollout.hosts.episode_adapter import opened

from kestrl.testing.environment_runs import check_environment_runs


async def test_an_adapter_that_runs_its_episodes_passes() -> None:
    await check_environment_runs(opened, row={"word": "lamp"}, replies=["lamp"])


@pytest.mark.parametrize(
    ("trick", "problem"),
    [
        ("other prompt", "asks something else the second time"),
        ("other reward", "earn another reward the second time"),
        ("first key", "a key that is not its own|the episode failed: RuntimeError: HTTP Error 401"),
        ("no call", "no call was made to its base URL"),
        ("no reward", "it has no reward, which is a failure and not 0"),
    ],
)
async def test_a_defect_of_an_adapter_is_named(trick: str, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        await check_environment_runs(opened, row={"word": "lamp", "trick": trick}, replies=["lamp"])


async def test_a_program_that_outlives_its_adapter_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kestrl.testing.environment_runs.END_SECONDS", 0.2)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)  # the programs read until it is closed
    try:
        row = {"word": "lamp", "trick": "orphan", "fifo": str(fifo)}
        with pytest.raises(AssertionError, match="it had started run on"):
            await check_environment_runs(opened, row=row, replies=["lamp"])
    finally:
        os.close(held)


async def test_a_kill_that_becomes_a_reward_is_named() -> None:
    with pytest.raises(AssertionError, match="killed: its process was killed, and it did not fail"):
        await check_environment_runs(partial(opened, swallows=True), row={"word": "lamp"}, replies=["lamp"])


async def test_folders_that_an_adapter_leaves_are_named(tmp_path: Path) -> None:
    left = iter(([], [tmp_path / "work"]))
    with pytest.raises(AssertionError, match=f"it has left {tmp_path}/work"):
        await check_environment_runs(opened, row={"word": "lamp"}, replies=["lamp"], left=lambda: next(left))
