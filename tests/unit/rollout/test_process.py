"""The worker as a process: what it imports, how it refuses bad input, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "vllm", "transformers", "numpy", "kopf", "kubernetes", "huggingface_hub", "sqlalchemy")


def settings(tmp_path: Path, model: Path, listen: str, **changes: Any) -> Path:
    values = {
        "component": "rollout-0",
        "job": "job",
        "run": "run",
        "listen": listen,
        "tokenizer": str(model),
        "agent": "tool_agent",
        "tools_address": "127.0.0.1:1",
        "judge_address": "127.0.0.1:1",
        "concurrency": 3,
        "context_length": 512,
        **changes,
    }
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(values))
    return path


def test_importing_the_worker_brings_in_nothing_heavy() -> None:
    program = f"import sys, kestrl_rollout.__main__; print([n for n in {HEAVY} if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"agent": "missing:Agent"}, "error: agent.loop: cannot import 'missing'"),
        ({"tokenizer": "/nowhere"}, "error: model.base: the folder /nowhere does not exist"),
        ({"concurrency": "many"}, "not readable as RolloutSettings"),
    ],
)
async def test_bad_input_ends_with_one_line_and_code_2(
    tmp_path: Path, model_folder: Path, changes: dict[str, Any], expected: str
) -> None:
    path = settings(tmp_path, model_folder, "127.0.0.1:0", **changes)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kestrl_rollout", "--settings", str(path), stderr=subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert expected in said.decode()
    assert "Traceback" not in said.decode()


async def test_it_serves_until_sigterm(tmp_path: Path, model_folder: Path) -> None:
    path = settings(tmp_path, model_folder, "127.0.0.1:0")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kestrl_rollout", "--settings", str(path), stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    said = b""
    while b"serves on" not in said:
        line = await process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
