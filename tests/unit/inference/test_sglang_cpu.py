"""What SGLang gets on a CPU: the hash of its seeds, tensors that are not pinned, names of kernels; and its launcher."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrl._app.engines.interpreter import write_engine_folder
from kestrl._shared.engine_failure import VARIABLE, read
from kestrl_inference.inside import sglang_cpu
from kestrl_inference.inside.sglang_launcher import read_options, server_arguments
from kestrl_inference.inside.sglang_plugin import record_failed_starts

WORD = 0xFFFFFFFF


def murmur3(content: bytes) -> int:
    """MurmurHash3 (x86, 32 bits, seed 0) of whole words, as its author defines it."""
    state = 0
    for start in range(0, len(content), 4):
        block = int.from_bytes(content[start : start + 4], "little") * 0xCC9E2D51 & WORD
        block = (block << 15 | block >> 17) & WORD
        state ^= block * 0x1B873593 & WORD
        state = (state << 13 | state >> 19) & WORD
        state = (state * 5 + 0xE6546B64) & WORD
    state ^= len(content)
    state = (state ^ state >> 16) * 0x85EBCA6B & WORD
    state = (state ^ state >> 13) * 0xC2B2AE35 & WORD
    return state ^ state >> 16


def test_the_reference_is_murmur3() -> None:
    assert murmur3(b"") == 0
    assert murmur3(b"test") == 0xBA6BD213  # of the published vectors


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4))
def test_the_hash_is_murmur3_of_seed_position_and_column(rows: list[tuple[int, int]]) -> None:
    seeds = torch.tensor([seed for seed, _ in rows], dtype=torch.uint64)
    positions = torch.tensor([position for _, position in rows])
    columns = torch.arange(5)
    expected = [
        [murmur3(seed.to_bytes(8, "little") + p.to_bytes(4, "little") + c.to_bytes(4, "little")) for c in range(5)]
        for seed, p in rows
    ]
    assert sglang_cpu.hashed(seeds, positions, columns).tolist() == expected


def test_the_operation_is_registered_unless_a_build_has_it() -> None:
    sglang_cpu.add_hash(torch)
    operation = torch.ops.sgl_kernel.murmur_hash32_cpu.default
    seeds, positions, columns = torch.tensor([7], dtype=torch.uint64), torch.tensor([3]), torch.arange(2)
    assert operation(seeds, positions, columns).tolist() == sglang_cpu.hashed(seeds, positions, columns).tolist()
    sglang_cpu.add_hash(torch)  # a second registration would raise


def test_no_constructor_pins_memory() -> None:
    names = {name: sglang_cpu.pageable(getattr(torch, name)) for name in sglang_cpu.CONSTRUCTORS}
    assert names["tensor"]([1, 2], dtype=torch.int32, pin_memory=True).tolist() == [1, 2]
    assert names["zeros"]((2,), pin_memory=True).tolist() == [0.0, 0.0]
    assert not names["arange"](3, pin_memory=True).is_pinned()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("sgl_kernel", None)


@pytest.mark.usefixtures("stand_ins")
def test_names_of_kernels_can_be_imported_and_not_be_called() -> None:
    sglang_cpu.add_stand_ins()
    sglang_cpu.add_stand_ins()
    assert sys.path.count(str(sglang_cpu.STAND_INS)) == 1
    assert sys.path[-1] == str(sglang_cpu.STAND_INS)  # a real build comes first
    kernels = importlib.import_module("sgl_kernel")
    with pytest.raises(NotImplementedError, match="kernel silu_and_mul is not there on a CPU"):
        kernels.silu_and_mul(1)
    assert not hasattr(kernels, "__wrapped__")


def test_the_launcher_reads_its_options() -> None:
    options = read_options(["--cpu", "--guard", "--version", "0.5", "--", "--enable-trace", "--port", "1", "--cpu"])
    assert (options.cpu, options.guard, options.version) == (True, True, "0.5")
    assert server_arguments(options, traces=True) == ["--enable-trace", "--port", "1", "--cpu"]
    assert server_arguments(options, traces=False) == ["--port", "1", "--cpu"]
    assert not read_options(["--", "--guard"]).guard


@pytest.mark.parametrize("version", [None, "9.9"])
def test_an_sglang_that_a_job_cannot_use_does_not_start(tmp_path: Path, version: str | None) -> None:
    """In an interpreter without SGLang, and in one with another version than the job names."""
    record = tmp_path / "failure.json"
    if version is not None:
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang" / "__init__.py").touch()
        (tmp_path / "sglang-0.5.23.dist-info").mkdir()
        (tmp_path / "sglang-0.5.23.dist-info" / "METADATA").write_text("Name: sglang\nVersion: 0.5.23\n")
    write_engine_folder(tmp_path / "engine")
    options = [] if version is None else ["--version", version]
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "kestrl_inference.inside.sglang_launcher", *options, "--", "--port", "1"],
        env={"PYTHONPATH": f"{tmp_path / 'engine'}:{tmp_path}", VARIABLE: str(record)},
        capture_output=True,
        text=True,
        check=False,
    )
    field = "spec.inference.python" if version is None else "spec.inference.version: 9.9 is asked for"
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {field}")
    failure = read(record)
    assert failure is not None
    assert failure.lasting
    assert failure.message.startswith(field)


def test_a_scheduler_records_why_it_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler(SimpleNamespace):
        def __init__(self, model: str) -> None:
            if not model:
                raise ValueError("the model has no weights")
            super().__init__(model=model)

    record = tmp_path / "failure.json"
    monkeypatch.setenv(VARIABLE, str(record))
    record_failed_starts(Scheduler)
    assert Scheduler("tiny").model == "tiny"
    assert not record.exists()
    with pytest.raises(ValueError, match="no weights"):
        Scheduler("")
    failure = read(record)
    assert failure is not None
    assert failure.message == "ValueError: the model has no weights"
