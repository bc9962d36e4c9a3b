"""`kestrl push --to wandb`: an offline run by the real package, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kestrl._app.cli.main import app
from kestrl._app.interpreters.requirements import environment_python, say
from kestrl._app.push.wandb.target import REQUIREMENT

READER = Path(__file__).parents[3] / "fakes" / "read_wandb.py"
pytestmark = [pytest.mark.servers, pytest.mark.share(3), pytest.mark.timeout(600)]


def push(run: Path, folder: Path) -> str:
    target = ["--to", "wandb", "--uri", str(folder)]
    result = CliRunner().invoke(app, ["push", run.name, "--runs", str(run.parent), *target])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def records(folder: Path) -> list[dict[str, Any]]:
    """What is in the one offline run of a folder."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    python = environment_python([REQUIREMENT], python=None, field="", say=say)
    read = subprocess.run([python, READER, path], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in read.stdout.splitlines()]


def test_an_offline_run_has_metrics_episodes_and_the_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert push(run, tmp_path / "wb") == "sent 6 episodes in 9 parts\n"
    found = records(tmp_path / "wb")
    begun, *_ = found
    assert (begun["name"], begun["project"]) == ("job-1", "job")
    assert begun["config"]["algorithm.groupSize"] == "2"
    history = [record["history"] for record in found if "history" in record]
    rewards = [(each["kestrl/step"], each["reward"]) for each in history if "reward" in each]
    assert rewards == [(1, 0.25), (2, 0.5)]
    assert [each["eval/reward"] for each in history if "eval/reward" in each] == [0.125, 0.5]
    tables = [each["episodes/train.path"] for each in history if "episodes/train.nrows" in each]
    (path,) = tmp_path.glob(f"wb/wandb/offline-run-*/files/{tables[0]}")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["episode"], row["reward"], row["failure"]) for row in rows] == [
        ("g1/0", 0.75, ""), ("g1/1", None, "tool/tool_raised"),
    ]  # fmt: skip
    summary = {name: each for record in found for name, each in record.get("summary", {}).items()}
    assert (summary["after/reward"], summary["status"]) == (0.5, "succeeded")
    assert found[-1] == {"exit": 0}
    assert push(run, tmp_path / "wb") == "nothing new to send\n"
    assert len(records(tmp_path / "wb")) == len(found), "and no further run is made"
