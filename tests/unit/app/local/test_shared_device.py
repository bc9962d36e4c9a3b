"""Division of a device that an engine and the learner share, by a plan: at the same time and in turns."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.accelerators import ASCEND_TABLE, NVIDIA, QUICKSTART, TURNS, Machine, gpu, planned, planned_site, visible
from tests.program import run_program

from kestrl._app.checks.doctor import accelerator
from kestrl._app.local import memory
from kestrl._app.local.rundir import cache_folder
from kestrl._shared.plan.memory import GIB, MemoryEstimate, MemoryPart
from kestrl._shared.plan.planning import plan
from kestrl._shared.spec import read_job
from kestrl.errors import UserInputError

pytestmark = pytest.mark.timeout(300)  # an estimate of the memory is 15 s of CPU time


@pytest.mark.share(2)
def test_one_device_is_shared_by_an_engine_and_the_learner(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, free=80_000))
    components = planned(tmp_path, *NVIDIA)
    assert visible(components) == {"engine-0": "0", "learner-0": "0"}
    arguments = components["engine-0"].args
    share = float(arguments[arguments.index("--gpu-memory-utilization") + 1])
    cache = int(arguments[arguments.index("--kv-cache-memory-bytes") + 1])
    assert 0.9 < share < 80_000 / 81_559, "what is free, less the learner's part"
    assert 2**30 < cache < 80_000 * 2**20 - 3 * 2**30
    assert list((tmp_path / "cache").glob("memory-*.json")), "the estimate is kept"


@pytest.mark.share(2)
def test_one_device_used_in_turns_has_more_room_for_the_engine(machine: Machine, tmp_path: Path) -> None:
    def cache(*overrides: str) -> int:
        arguments = planned(tmp_path, *overrides)["engine-0"].args
        return int(arguments[arguments.index("--kv-cache-memory-bytes") + 1])

    machine(gpu(0, free=80_000))
    assert cache(*TURNS) > cache(*NVIDIA)


@pytest.mark.share(2)
def test_turns_need_host_memory_for_the_weights_of_a_sleeping_engine(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(gpu(0, free=80_000))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1024 kB\nMemAvailable:       512 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    with pytest.raises(UserInputError, match=r"^spec\.inference\.sharing: turns keeps .* machine has 0\.0 free; use "):
        planned(tmp_path, *TURNS)
    assert planned(tmp_path, *NVIDIA), "both stay on the device"


OF_8B = {MemoryPart.BASE: 15 * GIB, MemoryPart.ADAPTER: GIB // 6, MemoryPart.OPTIMIZER: GIB // 3}
ACTIVE = {MemoryPart.ACTIVATIONS: 3 * GIB, MemoryPart.LOGPROBS: GIB, MemoryPart.PROGRAM: GIB // 2}


def test_the_base_leaves_a_device_that_cannot_hold_the_weights_twice(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate = MemoryEstimate(parts=OF_8B | ACTIVE, rows=1)
    monkeypatch.setattr(memory, "cached_estimate", lambda *_, **__: estimate)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {64 * 2**20} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)

    def learner_and_note(free: int) -> tuple[Any, str]:
        machine(gpu(0, free=free))
        job = read_job(QUICKSTART, (*TURNS, "model.dtype=bfloat16"))
        site = planned_site(tmp_path, job)
        assert site.devices is not None
        (learner,) = (component for component in plan(job, site) if component.name == "learner-0")
        return learner.settings, site.devices.notes[0]

    learner, note = learner_and_note(48_000)
    assert (learner.turns, learner.base_offload) == (True, False)
    assert "base weights" not in note
    learner, note = learner_and_note(32_000)
    assert (learner.turns, learner.base_offload) == (True, True)
    assert re.search(
        r" the learner keeps 1\.1 on it .*, and 15\.0 of base weights in host memory, and the engine ", note
    )
    meminfo.write_text(f"MemAvailable: {40 * 2**20} kB\n")
    message = (
        r"3[0-9]\.[0-9] of them weights of the engine and 15\.0 the learner's base, and this machine has 40\.0 free"
    )
    with pytest.raises(UserInputError, match=message):
        learner_and_note(32_000)
    learner_and_note(48_000)


def test_turns_are_refused_where_each_has_a_device(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0), gpu(1))
    with pytest.raises(UserInputError, match=r"^spec\.inference\.sharing: turns is for one device, and this machine "):
        planned(tmp_path, *TURNS)
    machine(gpu(0), gpu(1), CUDA_VISIBLE_DEVICES="1")
    assert visible(planned(tmp_path, *TURNS)) == {"engine-0": "1", "learner-0": "1"}


@pytest.mark.share(2)
def test_the_user_s_own_limits_of_memory_are_left_alone(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0))
    arguments = planned(tmp_path, *NVIDIA, "inference.args={gpu_memory_utilization: 0.3}")["engine-0"].args
    assert "--kv-cache-memory-bytes" not in arguments


def test_sglang_shares_a_device_only_within_the_user_s_own_limit(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, free=80_000))
    sglang = "inference.engine=sglang"
    with pytest.raises(UserInputError, match=r"spec\.inference\.engine: sglang and the learner would share a nvidia"):
        planned(tmp_path, *NVIDIA, sglang)
    components = planned(tmp_path, *NVIDIA, sglang, "inference.args={mem-fraction-static: 0.4}")
    arguments = components["engine-0"].args
    assert arguments[arguments.index("--mem-fraction-static") + 1] == "0.4"
    assert "--gpu-memory-utilization" not in arguments
    machine(gpu(0), gpu(1))
    assert visible(planned(tmp_path, *NVIDIA, sglang)) == {"engine-0": "0", "learner-0": "1"}


@pytest.mark.share(2)
def test_a_device_that_is_too_small_for_both_is_refused_with_the_figures(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, free=3_000))
    with pytest.raises(
        UserInputError, match=r"share device 0, which has 2\.9 GiB free, and need more than [4-6]\.[0-9]"
    ):
        planned(tmp_path, *NVIDIA)


def machine_of_8b(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: int = 64) -> None:
    """A machine with some GiB of host memory, and the estimate of an 8B model."""
    monkeypatch.setattr(memory, "cached_estimate", lambda *_, **__: MemoryEstimate(parts=OF_8B | ACTIVE, rows=1))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {host * 2**20} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)


@pytest.mark.parametrize(
    ("overrides", "free", "host", "advice"),
    [
        ((), 40_000, 64, "a cache for one row. spec.inference.sharing: turns fits; spec.model.base: "),
        (
            ("algorithm.maxStaleness=1",),
            40_000,
            64,
            "one row. spec.inference.sharing: turns fits, with spec.algorithm.maxStaleness: 0, which it needs; spec.",
        ),
        ((), 20_000, 64, "a cache for one row. spec.model.base: "),
        ((), 40_000, 16, "a cache for one row. spec.model.base: "),
    ],
    ids=["turns fit", "turns fit without staleness", "an update does not fit", "host memory does not suffice"],
)
def test_a_refusal_names_turns_where_they_fit(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: tuple[str, ...],
    free: int,
    host: int,
    advice: str,
) -> None:
    machine_of_8b(monkeypatch, tmp_path, host)
    machine(gpu(0, free=free))
    job = (*NVIDIA, "model.dtype=bfloat16", *overrides)
    with pytest.raises(UserInputError, match=re.escape(advice)):
        planned(tmp_path, *job)
    if "turns" in advice:
        assert planned(tmp_path, *job, "algorithm.maxStaleness=0", "inference.sharing=turns")


def test_a_job_that_cannot_take_turns_is_not_advised_to(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_of_8b(monkeypatch, tmp_path)
    machine(gpu(0, free=40_000), gpu(1, free=40_000))
    two_ranks = ("model.dtype=bfloat16", "learner.accelerator.count=2")
    with pytest.raises(UserInputError, match=r"with a cache for one row\. spec\.model\.base: "):
        planned(tmp_path, *NVIDIA, *two_ranks)


def test_a_cache_is_said_in_rows(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of_8b(monkeypatch, tmp_path)
    of_row = MemoryEstimate(parts=OF_8B | ACTIVE, rows=1, cached_token=2**20)
    monkeypatch.setattr(memory, "cached_estimate", lambda *_, **__: of_row)
    machine(gpu(0))
    job = (*NVIDIA, "model.dtype=bfloat16", "inference.contextLength=4096", "agent.maxTokens=64")

    def note(*overrides: str) -> str:
        devices = planned_site(tmp_path, read_job(QUICKSTART, (*job, *overrides))).devices
        assert devices is not None
        return devices.notes[0]

    assert re.search(r" for the engine, 3[0-9]\.[0-9] of them KV cache \(9 of 64 rows of 4096 tokens\), and ", note())
    limit = "inference.args={gpu_memory_utilization: 0.3}"
    assert ": for the engine what spec.inference.args.gpu_memory_utilization says, and 22.0 for " in note(limit)


@pytest.mark.share(2)
def test_doctor_and_validate_say_what_a_run_says(machine: Machine, tmp_path: Path) -> None:
    job, runs = read_job(QUICKSTART, NVIDIA), tmp_path / "runs"
    options = [argument for override in NVIDIA for argument in ("--set", override)]

    def validated() -> subprocess.CompletedProcess[str]:
        command = ("validate", str(QUICKSTART), "--no-data", "--no-model", "--runs", str(runs), *options)
        done = run_program(*command, timeout=140)
        assert done.returncode == 0, "another machine may run it"
        return done

    machine(gpu(0))
    *_, line = validated().stdout.splitlines()
    assert line.startswith("how the learner and an engine divide their device, and whether it holds both, is not ")
    assert not runs.exists()
    devices = planned_site(tmp_path, job, cache_dir=cache_folder(runs)).devices
    assert devices is not None
    (note,) = devices.notes
    *_, finding = accelerator(job, QUICKSTART.parent, runs)
    assert (finding.status, finding.fix) == (note, "")
    *_, line = validated().stdout.splitlines()
    assert line == note
    machine(gpu(0, free=3_000))
    with pytest.raises(UserInputError) as refusal:
        planned_site(tmp_path, job, cache_dir=cache_folder(runs))
    *_, finding = accelerator(job, QUICKSTART.parent, runs)
    assert (finding.status, finding.fix) == ("unusable", str(refusal.value))
    assert f"warning: kestrl run refuses this here: {refusal.value}" in validated().stderr.splitlines()


def test_memory_that_is_not_reported_is_said(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, total="[N/A]"))
    site = planned_site(tmp_path, read_job(QUICKSTART, NVIDIA))
    assert site.devices is not None
    (note,) = site.devices.notes
    assert note.startswith("the learner shares nvidia device 0 with an engine, and its memory is not known")


def test_a_die_is_used_in_turns_only_within_the_user_s_own_limit(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cached_estimate", lambda *_, **__: MemoryEstimate(parts=OF_8B | ACTIVE, rows=1))
    machine(table=ASCEND_TABLE, ASCEND_RT_VISIBLE_DEVICES="1")
    ascend = tuple(override.replace("nvidia", "ascend") for override in (*TURNS, "model.dtype=bfloat16"))
    message = (
        "spec.inference.sharing: turns divides ascend device 1, whose memory is not known here; set spec.inference.args"
        ".gpu-memory-utilization to the engine's share, which leaves 17.6 GiB for what the learner keeps on it, or use "
        "split"
    )
    with pytest.raises(UserInputError, match=f"^{re.escape(message)}$"):
        planned(tmp_path, *ascend)
    limited = read_job(QUICKSTART, (*ascend, "inference.args={gpu_memory_utilization: 0.5}"))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {64 * 2**20} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    site = planned_site(tmp_path, limited)
    assert site.devices is not None
    (note,) = site.devices.notes
    assert note.startswith("the learner and an engine share ascend device 1 in turns, whose memory is not known; the ")
    components = {component.name: component for component in plan(limited, site)}
    assert visible(components, "ASCEND_RT_VISIBLE_DEVICES") == {"engine-0": "1", "learner-0": "1"}
    assert "--enable-sleep-mode" in components["engine-0"].args
    assert components["engine-0"].env["VLLM_SERVER_DEV_MODE"] == "1"
    meminfo.write_text(f"MemAvailable: {16 * 2**20} kB\n")
    with pytest.raises(UserInputError, match=r"turns keeps up to 3[0-9]\.[0-9] GiB in host memory"):
        planned_site(tmp_path, limited)
