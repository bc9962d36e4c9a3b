"""Programs of other environments: they end with the block, and have no variable of our interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kestrl._app.push.guarded import guarded

CODE = """
import json, os, sys
print(json.dumps(dict(os.environ)), flush=True)
sys.stdin.read()
"""


def test_a_program_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    with guarded(
        [sys.executable, "-c", CODE],
        variables={"WANDB_MODE": "offline"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        environment = json.loads(process.stdout.readline())
        assert process.poll() is None
    assert process.returncode is not None
    assert environment["WANDB_MODE"] == "offline"
    assert "PYTHONPATH" not in environment
