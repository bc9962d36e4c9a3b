"""Why an engine could not start: the root cause, whether another start would help, and where it is reported."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kestrl._shared import engine_failure
from kestrl.errors import EngineFailure
from kestrl_inference.inside import failure

WRAPPER = RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
KV = "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine"
FREE = (
    "Free memory on device cuda:0 (1.2/79.1 GiB) on startup is less than desired GPU memory utilization (0.9, 71 GiB)."
)


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        # As vLLM 0.32 ended on broken model folders and arguments.
        (RuntimeError("Cannot find any model weights with `noweights`"), True),
        (RuntimeError("start (0) + length (1152) exceeds dimension size (576)."), True),
        (
            RuntimeError(
                "The size of tensor a (384) must match the size of tensor b (192) at non-singleton dimension 1"
            ),
            True,
        ),
        (KeyError("model.layers.0.mlp.gate_proj.weight"), True),
        (OSError("/m does not appear to have a file named config.json."), True),
        (FileNotFoundError(2, "No such file or directory"), True),
        (ImportError("No module named 'flash_attn'"), True),
        # What another start may not meet.
        (ValueError(FREE), False),
        (ValueError(KV), False),
        (AssertionError("Error in memory profiling. Initial free memory 122.57 GiB, current 138.27 GiB."), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (OSError(98, "Address already in use"), False),
        (ConnectionResetError("reset by peer"), False),
        (TimeoutError("no answer"), False),
    ],
)
def test_another_start_helps_or_not(error: Exception, lasting: bool) -> None:
    found = failure.failure_of(error)
    assert found.lasting is lasting
    assert found.message.startswith(f"{type(error).__name__}: ")


def test_the_root_of_a_chain_is_named_and_decides_too() -> None:
    try:
        try:
            raise ConnectionError("the network is away")
        except ConnectionError as error:
            raise ValueError("the model cannot be fetched") from error
    except ValueError as error:
        found = failure.failure_of(error)
    assert found.message == "ValueError: the model cannot be fetched (from ConnectionError: the network is away)"
    assert not found.lasting


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "failure.json"
    monkeypatch.setenv(engine_failure.VARIABLE, str(path))
    return path


def test_an_error_that_refers_elsewhere_is_not_recorded(path: Path) -> None:
    failure.write_down(ValueError(KV))
    failure.write_down(WRAPPER)
    failure.write_down(SystemExit(1))
    assert engine_failure.read(path) == failure.failure_of(ValueError(KV))
    assert [part.name for part in path.parent.iterdir()] == ["failure.json"]


def test_a_damaged_record_is_none(path: Path) -> None:
    for content in ("", "[]", '{"message": "x"}', "\xff"):
        path.write_text(content)
        assert engine_failure.read(path) is None


PROCESS = """
import logging, sys
from kestrl_inference.inside import failure
failure.install()
if sys.argv[1] == "core":  # as vllm/v1/engine/core.py does
    try:
        raise ValueError("what was wrong")
    except ValueError:
        logging.getLogger("vllm.v1.engine.core").exception("EngineCore failed to start.")
    raise RuntimeError("Engine core initialization failed. See root cause above.")
if sys.argv[1] == "serving":
    try:
        raise ValueError("of one request")
    except ValueError:
        logging.getLogger("vllm.v1.engine.core").exception("Invocation of add_lora method failed")
    sys.exit(0)
raise ValueError("what was wrong")
"""


@pytest.mark.parametrize("process", ["core", "server", "serving"])
def test_a_process_that_cannot_start_writes_down_why(path: Path, process: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS, process], capture_output=True, text=True, check=False)
    if process == "serving":
        assert not path.exists()
        return
    assert json.loads(path.read_text()) == {"message": "ValueError: what was wrong", "lasting": True}
    assert "Traceback" in done.stderr  # the log keeps everything


async def test_the_agent_reports_the_root_cause_and_loads_fail_at_once(make_stage: Any, tmp_path: Path) -> None:
    stage = await make_stage()
    path = tmp_path / "failure.json"
    stage.watch.failure_file = path
    stage.engine.healthy = False
    path.write_text(json.dumps(engine_failure.EngineStartFailure("ValueError: why", lasting=True)._asdict()))
    await stage.look()
    seen = await stage.seen()
    assert (seen.failure.code, seen.failure.retryable) == (engine_failure.CODE, False)
    assert seen.failure.message == "the engine does not start: ValueError: why"
    with pytest.raises(EngineFailure) as caught:
        await stage.watch.wait_until_up(30)
    assert (caught.value.code, caught.value.retryable) == (engine_failure.CODE, False)
    stage.engine.healthy = True  # it was fixed
    await stage.look()
    assert not (await stage.seen()).HasField("failure")
    assert not path.exists()


async def test_what_may_pass_is_waited_for(make_stage: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    stage = await make_stage()
    path = stage.watch.failure_file = tmp_path / "failure.json"
    stage.engine.healthy = False
    path.write_text(json.dumps(failure.failure_of(ValueError(FREE))._asdict()))
    for _ in range(3):
        await stage.look()
    assert (await stage.seen()).failure.retryable
    assert caplog.text.count("the engine does not start: ValueError: Free memory") == 1
