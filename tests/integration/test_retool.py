"""ReTool's two stages on two cores: the commands of the first block of docs/retool.md, in a copy of the folder."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kestrl._app.local.rundir import RunDir

from .runs import ROOT, belonging_to, command, summary_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.xdist_group("retool"), pytest.mark.share(3)]
BLOCK = re.compile(r"## On two cores\n\n```console\n(.*?)```", re.DOTALL)
STEPS = ("--set", "schedule.maxSteps=8", "--set", "schedule.evalEvery=8")
RISE = 0.1
"""Least rise of the share of right answers at the training temperature; seen was 0.48 in ten steps."""


def test_the_answer_rate_rises_by_running_code(tmp_path: Path) -> None:
    folder = tmp_path / "retool"
    shutil.copytree(ROOT / "examples" / "retool", folder, ignore=shutil.ignore_patterns("runs", "sft-model"))
    (block,) = BLOCK.findall((ROOT / "docs" / "retool.md").read_text())
    lines = [shlex.split(line.removeprefix("$ kestrl ")) for line in block.splitlines()]
    assert [line[0] for line in lines] == ["sft", "export", "run"]
    for line in lines:
        arguments = [*line, *STEPS] if line[0] == "run" else line
        done = subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(RunDir(folder / "runs" / "retool-1"))
    before, after = summary["before"], summary["after"]
    assert before["episodes"] == after["episodes"] == 64
    assert before["exceptions"] == after["exceptions"] == 0
    assert after["sampled_answer_correct"] >= before["sampled_answer_correct"] + RISE, (before, after)
    assert after["answer_correct"] >= before["answer_correct"], (before, after)
    assert summary["tools"]["outcomes"]["ok"] > summary["tools"]["episodes"] / 2
    assert belonging_to(tmp_path) == []
