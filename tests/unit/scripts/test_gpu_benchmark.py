"""`python -m benchmarks.gpu` without a GPU: it runs to its end, and what cannot run says why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.gpu.__main__ import run_part
from benchmarks.gpu.lines import Line, figure, not_run, table
from benchmarks.gpu.parts import PARTS, Place

ROOT = Path(__file__).parents[3]


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.share(4)
@pytest.mark.timeout(600)
def test_the_benchmark_runs_to_its_end_on_a_cpu() -> None:
    """In one of four commits: a minute of processes that import torch."""
    done = benchmark("--device", "cpu", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rest = (text for text in done.stdout.splitlines() if text.startswith("{"))
    assert {"device", "torch", "transformers", "peft", "vllm", "trl"} <= set(json.loads(first))
    lines = [Line.read(text) for text in rest]
    assert {line.part for line in lines} == set(PARTS)
    assert all(line.note for line in lines if line.status == "not run"), "each says why"
    assert not [line for line in lines if line.status in ("failed", "over time")]
    measured = {line.name: line for line in lines if line.status == "measured"}
    assert {"step/tiny/ours/seconds", "step/tiny/bare_4/seconds", "memory/tiny/estimate"} <= set(measured)
    assert {f"base/tiny/{move}" for move in ("first_leave", "come_back", "leave")} <= set(measured)
    assert measured["step/tiny/ours/passes"].value == 2, "576 tokens of 512 at most"
    assert done.stdout.rstrip().endswith(table(lines)), "the table follows"


async def test_a_part_over_its_time_says_so_and_ends(tmp_path: Path) -> None:
    reported: list[Line] = []
    await run_part("b", Place(device="cpu", quick=True, folder=tmp_path), 0.1, reported.append)
    assert [(line.part, line.status) for line in reported] == [("b", "over time")]


def test_a_part_that_is_unknown_and_a_device_that_is_missing_are_refused() -> None:
    assert "--parts: xy is none of abcdefgh" in benchmark("--parts", "axy").stderr


def test_a_line_is_one_of_json_and_a_row_of_the_table() -> None:
    line = figure("b", "step/seconds", 1.23456, "s", reference=2.0, against="TRL")
    assert Line.read(line.text()) == line
    assert json.loads(line.text()) == {
        "part": "b",
        "name": "step/seconds",
        "status": "measured",
        "value": 1.235,
        "unit": "s",
        "reference": 2.0,
        "against": "TRL",
    }
    rows = table([line, not_run("c", "gap", "vllm is not installed")]).splitlines()
    assert "0.62 x TRL (2)" in rows[0]
    assert rows[1].endswith("vllm is not installed")
