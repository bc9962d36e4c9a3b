"""How `kestrl_inference.inside.vllm_cpu` starts vLLM, with vLLM's own modules. No engine is started."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from kestrl._app.engines.interpreter import ENGINE_FOLDER, engine_python, write_engine_folder
from kestrl._app.engines.variables import engine_environment
from kestrl._shared.spec.inference import Inference

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("formats")]


def test_the_model_is_inspected_without_a_second_process(tmp_path: Path) -> None:
    folder = tmp_path / ENGINE_FOLDER
    write_engine_folder(folder)
    python = engine_python(Inference(), tmp_path)
    assert python is not None
    command = [python, Path(__file__).parent / "inside_vllm" / "inspection.py", folder, tmp_path / "answer.json"]
    # In its cache an earlier start keeps what was read.
    variables = engine_environment(os.environ, python) | {"VLLM_CACHE_ROOT": str(tmp_path)}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert json.loads((tmp_path / "answer.json").read_text()) == {
        "starts_process": True,
        "replaced": True,
        "architecture": "Qwen3ForCausalLM",
    }
