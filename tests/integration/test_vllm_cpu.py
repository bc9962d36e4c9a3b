"""How `kestrl_inference.inside.vllm_cpu` starts vLLM, with vLLM's own modules. No engine is started."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kestrl_inference.inside.vllm_cpu import INSPECTS, inspect_in_process

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("formats")]


def test_the_model_is_inspected_without_a_second_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from vllm.model_executor.models import registry

    run = subprocess.run

    def started(command: Any, **options: Any) -> Any:
        assert command != registry._SUBPROCESS_COMMAND, "a second process was started"
        return run(command, **options)  # importing the model runs other programs

    inspected = registry.ModelRegistry.models["Qwen3ForCausalLM"]
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # there an earlier start keeps what it found
    monkeypatch.setattr(subprocess, "run", started)
    with pytest.raises(AssertionError, match="second process"):
        inspected.inspect_model_cls()
    monkeypatch.setattr(registry, INSPECTS, getattr(registry, INSPECTS))  # restored with the test
    assert inspect_in_process(registry)
    assert inspected.inspect_model_cls().architecture == "Qwen3ForCausalLM"
