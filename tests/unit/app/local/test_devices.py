"""Devices of one machine: as the vendors' programs list them, within the user's variable, and by the plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.program import run_program

from kestrl._app.checks import doctor
from kestrl._app.checks.sft import device_environment
from kestrl._app.local import memory
from kestrl._app.local.devices import usable_devices
from kestrl._app.local.rundir import RunDir
from kestrl._app.local.site import local_devices, reserved_ports, site_of
from kestrl._shared.plan.components import Component
from kestrl._shared.plan.memory import GIB, MemoryEstimate, MemoryPart
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.site import Site
from kestrl._shared.spec import AgentRLJob, read_job
from kestrl._shared.spec.sft import read_sft_job
from kestrl.errors import UserInputError

ROOT = Path(__file__).parents[4]
QUICKSTART = ROOT / "examples" / "email-search" / "quickstart.yaml"
SFT = ROOT / "src" / "kestrl" / "_app" / "starters" / "files" / "tool" / "sft.yaml"
pytestmark = pytest.mark.timeout(150)  # an estimate of the memory is 15 s of CPU time

NVIDIA = ("inference.accelerator.profile=nvidia", "learner.accelerator.profile=nvidia", "inference.replicas=1")
ASCEND_TABLE = """
        NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
        0                              0                              0                              Ascend 910B3
        0                              1                              -                              Mcu
        4                              0                              1                              Ascend 910B3
        4                              1                              -                              Mcu
"""
Machine = Callable[..., None]


def gpu(index: int, *, free: int = 80_000, capability: str = "9.0", mig: str = "Disabled", total: str = "81559") -> str:
    return (
        f"{index}, GPU-{index}a{'0' * 6}-beef, NVIDIA H100 80GB HBM3, {total}, {free}, 570.86.15, {capability}, {mig}"
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose vendors' programs print these lines."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)

    def install(*gpus: str, table: str = "", code: int = 0, **variables: str) -> None:
        (programs / "rows").write_text("".join(f"{line}\n" for line in gpus))
        (programs / "table").write_text(table)
        for name, file in {"nvidia-smi": "rows", "npu-smi": "table"}.items():
            program = programs / name
            program.write_text(f"#!/bin/sh\ncat '{programs / file}'\nexit {code}\n")
            program.chmod(0o755)
        for name, content in variables.items():
            monkeypatch.setenv(name, content)

    return install


def planned_site(tmp_path: Path, job: AgentRLJob) -> Site:
    with reserved_ports(job, None) as ports:
        return site_of(
            job,
            RunDir(tmp_path / "run"),
            QUICKSTART.parent,
            ports=ports,
            cache_dir=tmp_path / "cache",
            devices=local_devices(job),
        )


def planned(tmp_path: Path, *overrides: str) -> dict[str, Component]:
    job = read_job(QUICKSTART, overrides)
    return {component.name: component for component in plan(job, planned_site(tmp_path, job))}


def plan_command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    overrides = [argument for override in NVIDIA for argument in ("--set", override)]
    command = ("plan", str(QUICKSTART), "--runs", str(tmp_path), *overrides, *arguments)
    done = run_program(*command, env={**os.environ, "COLUMNS": "200"}, timeout=140)
    assert done.returncode == 0, done.stderr
    return done


def visible(components: Mapping[str, Component], variable: str = "CUDA_VISIBLE_DEVICES") -> dict[str, str]:
    return {name: item.env[variable] for name, item in components.items() if variable in item.env}


def test_engines_and_ranks_have_devices_of_their_own(machine: Machine, tmp_path: Path) -> None:
    machine(*map(gpu, range(8)))
    components = planned(
        tmp_path, *NVIDIA, "inference.replicas=2", "inference.accelerator.count=2", "learner.accelerator.count=4"
    )
    assert visible(components) == {"engine-0": "0,1", "engine-1": "2,3", "learner-0": "4,5,6,7"}
    assert components["engine-0"].env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert components["learner-0"].device.indices == ("4", "5", "6", "7")
    assert "gpu-memory-utilization" not in " ".join(components["engine-1"].args)


def test_a_job_on_the_cpu_asks_for_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert visible(planned(tmp_path)) == {}


@pytest.mark.parametrize(
    ("value", "indices"),
    [("1,3", "1 3"), ("GPU-2a", "2"), ("GPU-3a000000-beef, 0", "3 0"), ("", ""), ("-1", ""), ("none", "")],
)
def test_the_user_s_variable_restricts_the_devices(machine: Machine, value: str, indices: str) -> None:
    machine(*map(gpu, range(4)), CUDA_VISIBLE_DEVICES=value)
    assert [device.index for device in usable_devices("nvidia")] == indices.split()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", "CUDA_VISIBLE_DEVICES: '7' is no device of this machine, which has 0, 1"),
        ("GPU-", "CUDA_VISIBLE_DEVICES: 'GPU-' is no device of this machine, which has 0, 1"),
        ("0,", "CUDA_VISIBLE_DEVICES: '' is no device of this machine, which has 0, 1"),
        ("1,GPU-1a", "CUDA_VISIBLE_DEVICES: names device 1 twice; name it once"),
        ("MIG-0a", "CUDA_VISIBLE_DEVICES: MIG-0a is a MIG instance, which engines do not accept on one machine; "),
    ],
)
def test_a_variable_that_names_something_else_is_refused(machine: Machine, value: str, message: str) -> None:
    machine(gpu(0), gpu(1), CUDA_VISIBLE_DEVICES=value)
    with pytest.raises(UserInputError, match=f"^{re.escape(message)}"):
        usable_devices("nvidia")


def test_a_divided_device_is_refused_unless_it_is_left_out(machine: Machine) -> None:
    machine(gpu(0, mig="Enabled"), gpu(1))
    with pytest.raises(UserInputError, match="device 0 is divided into MIG instances"):
        usable_devices("nvidia")
    machine(gpu(0, mig="Enabled"), gpu(1), CUDA_VISIBLE_DEVICES="1")
    assert [device.index for device in usable_devices("nvidia")] == ["1"]


def test_dies_are_named_by_logic_id(machine: Machine, tmp_path: Path) -> None:
    machine(table=ASCEND_TABLE)
    ascend = [override.replace("nvidia", "ascend") for override in NVIDIA]
    components = planned(tmp_path, *ascend)
    assert visible(components, "ASCEND_RT_VISIBLE_DEVICES") == {"engine-0": "0", "learner-0": "1"}
    assert "CUDA_DEVICE_ORDER" not in components["engine-0"].env


def test_without_the_vendor_s_program_the_variable_says_which_devices_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert visible(planned(tmp_path, *NVIDIA)) == {"engine-0": "2", "learner-0": "5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a")
    with pytest.raises(UserInputError, match=r"nvidia-smi is not.* in CUDA_VISIBLE_DEVICES, or use profile"):
        planned(tmp_path, *NVIDIA)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["inference.replicas=3"],
            "the job needs nvidia devices, 3 for 3 engines and 1 for the learner, and this machine offers 2 (0, 1); "
            "lower spec.inference.replicas",
        ),
        (
            ["inference.accelerator.count=3", "learner.accelerator.count=4"],
            "the job needs nvidia devices, 3 for 1 engine and 4 for the learner, and this machine offers 2 (0, 1); "
            "lower spec.inference.accelerator.count and spec.learner.accelerator.count",
        ),
    ],
)
def test_too_few_devices_are_one_line(machine: Machine, tmp_path: Path, overrides: list[str], message: str) -> None:
    machine(gpu(0), gpu(1))
    with pytest.raises(UserInputError) as error:
        planned(tmp_path, *NVIDIA, *overrides)
    assert str(error.value) == message


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


TURNS = (*NVIDIA, "inference.sharing=turns")


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
    monkeypatch.setattr(memory, "cached_estimate", lambda *_: estimate)
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


def test_memory_that_is_not_reported_is_said(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, total="[N/A]"))
    site = planned_site(tmp_path, read_job(QUICKSTART, NVIDIA))
    assert site.devices is not None
    (note,) = site.devices.notes
    assert note.startswith("the learner shares nvidia device 0 with an engine, and its memory is not known")


def test_a_die_is_used_in_turns_only_within_the_user_s_own_limit(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cached_estimate", lambda *_: MemoryEstimate(parts=OF_8B | ACTIVE, rows=1))
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


def test_the_plan_shows_the_devices(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0), gpu(1))
    devices = {item["name"]: item["device"] for item in json.loads(plan_command(tmp_path, "--json").stdout)}
    assert devices["learner-0"] == {"profile": "nvidia", "count": 1, "indices": ["1"]}
    assert "nvidia x1: 1" in plan_command(tmp_path).stdout


def test_a_manifest_for_other_machines_is_planned_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    warning = "warning: no devices are assigned: profile nvidia: nvidia-smi is not on the PATH"
    assert warning in plan_command(tmp_path).stderr


def test_doctor_lists_devices_and_who_uses_them(machine: Machine) -> None:
    machine(gpu(0), gpu(1))
    (finding,) = doctor.accelerator(read_job(QUICKSTART, NVIDIA))
    assert finding.fix == ""
    assert finding.status == (
        "nvidia, driver 570.86.15: 0 (NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free); "
        "1 (NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free); engine-0 on 0; learner-0 on 1"
    )


def test_doctor_names_a_device_without_bfloat16(machine: Machine) -> None:
    machine(gpu(0, capability="7.5"), gpu(1))
    (finding,) = doctor.accelerator(read_job(QUICKSTART, [*NVIDIA, "model.dtype=bfloat16"]))
    assert finding.fix.startswith("spec.model.dtype: bfloat16 needs compute capability 8, and device 0 ")
    assert finding.fix.endswith("has 7.5; use float32")


def test_doctor_says_what_a_broken_driver_says(machine: Machine) -> None:
    machine("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code=9)
    (finding,) = doctor.accelerator(read_job(QUICKSTART, NVIDIA))
    assert "failed: NVIDIA-SMI has failed because it couldn't communicate" in finding.fix


def test_ranks_of_sft_have_a_device_each(machine: Machine) -> None:
    machine(*map(gpu, range(4)), CUDA_VISIBLE_DEVICES="1,2,3")
    cuda = ["learner.device=cuda", "learner.accelerator.profile=nvidia", "learner.accelerator.count=2"]
    assert device_environment(read_sft_job(SFT, cuda))["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert device_environment(read_sft_job(SFT, ())) == {}
    with pytest.raises(UserInputError, match=r"lower spec.learner.accelerator.count"):
        device_environment(read_sft_job(SFT, [*cuda[:2], "learner.accelerator.count=4"]))
