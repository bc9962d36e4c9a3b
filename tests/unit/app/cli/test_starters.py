"""Starters of `kestrl new`: each, below a path with a space, is valid and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kestrl._app.starters.writing import STARTERS, write_starter
from kestrl._shared.spec import read_job
from kestrl.data.rows import load_scenarios
from kestrl.errors import UserInputError


def types(folder: Path, *arguments: str) -> str:
    """What a program of this environment prints in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.agents) if name == "langgraph" else name for name in STARTERS],
)
def test_a_starter_is_valid_and_passes_its_tests(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "my jobs" / name
    program = "kestrl._app.cli.main"
    assert "kestrl validate job.yaml" in types(tmp_path, program, "new", str(folder), "--template", name)
    assert "job.yaml: valid, " in types(folder, program, "validate", "job.yaml")
    assert " passed" in types(folder, "pytest", "-q", "-p", "no:cacheprovider")
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "job.yaml"} < names
    assert not any(each.endswith(".template") for each in names)
    if (folder / "data.jsonl").exists():
        assert len(load_scenarios(folder / "data.jsonl", promptless=name == "environment")) == 10
    assert [path.name for path in folder.parent.iterdir()] == [name]


def test_the_starter_of_langgraph_passes_its_tests_without_langgraph(tmp_path: Path) -> None:
    write_starter("langgraph", tmp_path / "agent")
    agent = read_job(tmp_path / "agent" / "job.yaml").spec.agent
    assert agent.python is not None
    assert (agent.run, [item.partition(">")[0] for item in agent.python.requirements]) == (
        "agent:agent",
        ["langchain", "langchain-openai"],
    )
    assert len(load_scenarios(tmp_path / "agent" / "data.jsonl")) == 10
    assert " passed" in types(tmp_path / "agent", "pytest", "-q", "-p", "no:cacheprovider")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for folder in (tmp_path, tmp_path / "notes"):
        with pytest.raises(UserInputError, match="is there and not an empty folder; name a new one"):
            write_starter("tool", folder)
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]
    (tmp_path / "empty").mkdir()
    write_starter("tool", tmp_path / "empty")
    assert (tmp_path / "empty" / "mine.py").exists()


def test_an_unknown_starter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserInputError, match="--template: 'tools' is none of tool, reward-only, email, langgraph, environment"
    ):
        write_starter("tools", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
