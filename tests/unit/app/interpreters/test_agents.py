"""The environment of an agent: its requirements are installed for it and known afterwards, and `plan` installs none."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tests.program import run_program

INFO = "agentlib-1.0.dist-info"
WHEEL = {
    "agentlib.py": "def ask(row):\n    return None\n",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: agentlib\nVersion: 1.0\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/RECORD": f"agentlib.py,,\n{INFO}/METADATA,,\n{INFO}/WHEEL,,\n{INFO}/RECORD,,\n",
}
AGENT = """\
import agentlib


def agent(row, base_url, key, deadline):
    return agentlib.ask(row)
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A job whose agent needs a package that only its own environment has."""
    wheel = tmp_path / "agentlib-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in WHEEL.items():
            file.writestr(name, text)
    (tmp_path / "mine.py").write_text(AGENT, encoding="utf-8")
    (tmp_path / "data.jsonl").write_text('{"question": "1 + 1?", "ground_truth": "2"}\n', encoding="utf-8")
    path = tmp_path / "job.yaml"
    document: dict[str, Any] = {
        "apiVersion": "kestrl.dev/v1alpha1",
        "kind": "AgentRLJob",
        "metadata": {"name": "own"},
        "spec": {
            "model": {"base": "demo://tiny"},
            "data": {"train": {"uri": "data.jsonl"}},
            "agent": {
                "run": "mine:agent",
                "maxTokens": 64,
                "python": {"requirements": [f"agentlib @ {wheel.as_uri()}"]},
            },
            "rewards": [{"rule": "flexible_answer"}],
            "algorithm": {"groupsPerStep": 1},
        },
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def kestrl(command: str, manifest: Path, *arguments: str, code: int = 0) -> str:
    environments = manifest.parent / "environments"
    variables = {**os.environ, "COLUMNS": "200", "KESTRL_ENVIRONMENTS": str(environments), "UV_OFFLINE": "1"}
    done = run_program(command, manifest, *arguments, env=variables)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def environments(manifest: Path) -> list[str]:
    return [path.name for path in (manifest.parent / "environments").glob("[!.]*")]


def test_an_agent_has_what_it_requires_once_and_the_worker_has_not(manifest: Path) -> None:
    assert "mine:agent, in a process beside each worker with agentlib @" in kestrl("plan", manifest)
    assert environments(manifest) == []
    assert "installing agentlib" in kestrl("validate", manifest)
    (name,) = environments(manifest)
    (manifest.parent / "agentlib-1.0-py3-none-any.whl").unlink()  # known by its digest, and needed no more
    assert "installing" not in kestrl("validate", manifest)
    assert environments(manifest) == [name]
    without = kestrl("validate", manifest, "--set", "agent.python=null", code=2)
    assert "agent.run: mine:agent cannot be imported: ModuleNotFoundError: No module named 'agentlib'" in without


def test_requirements_that_cannot_be_installed_are_named_by_field(manifest: Path) -> None:
    (manifest.parent / "agentlib-1.0-py3-none-any.whl").unlink()
    printed = kestrl("validate", manifest, code=2)
    assert "spec.agent.python.requirements: agentlib" in printed
    assert "agent.run" not in printed
