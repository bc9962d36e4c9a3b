"""Devices of one machine: as the vendors' programs list them, within the user's variable, and by the plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.accelerators import ASCEND_TABLE, NVIDIA, QUICKSTART, Machine, gpu, planned, visible
from tests.program import run_program

from kestrl._app.checks.doctor import Finding, accelerator
from kestrl._app.checks.manifests import add_devices, read_manifest
from kestrl._app.checks.sft import device_environment
from kestrl._app.local.devices import usable_devices
from kestrl._app.local.findings import Findings
from kestrl._shared.spec import read_job
from kestrl._shared.spec.sft import read_sft_job
from kestrl.errors import UserInputError

ROOT = Path(__file__).parents[4]
THRESHOLD = ROOT / "examples" / "convergence" / "letters-threshold.yaml"
SFT = ROOT / "src" / "kestrl" / "_app" / "starters" / "files" / "tool" / "sft.yaml"


def findings_of_doctor(runs: Path, *overrides: str) -> list[Finding]:
    return list(accelerator(read_job(QUICKSTART, overrides), QUICKSTART.parent, runs))


def plan_command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    overrides = [argument for override in NVIDIA for argument in ("--set", override)]
    command = ("plan", str(QUICKSTART), "--runs", str(tmp_path), *overrides, *arguments)
    done = run_program(*command, env={**os.environ, "COLUMNS": "200"}, timeout=140)
    assert done.returncode == 0, done.stderr
    return done


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


def test_doctor_lists_devices_and_who_uses_them(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0), gpu(1))
    (finding,) = findings_of_doctor(tmp_path, *NVIDIA)
    assert finding.fix == ""
    assert finding.status == (
        "nvidia, driver 570.86.15: 0 (NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free); "
        "1 (NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free); engine-0 on 0; learner-0 on 1"
    )


def test_doctor_names_a_device_without_bfloat16(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, capability="7.5"), gpu(1))
    (finding,) = findings_of_doctor(tmp_path, *NVIDIA, "model.dtype=bfloat16")
    assert finding.fix.startswith("spec.model.dtype: bfloat16 needs compute capability 8, and device 0 ")
    assert finding.fix.endswith("has 7.5; use float32")


def test_doctor_says_what_a_broken_driver_says(machine: Machine, tmp_path: Path) -> None:
    machine("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code=9)
    (finding,) = findings_of_doctor(tmp_path, *NVIDIA)
    assert "failed: NVIDIA-SMI has failed because it couldn't communicate" in finding.fix


def test_ranks_of_sft_have_a_device_each(machine: Machine) -> None:
    machine(*map(gpu, range(4)), CUDA_VISIBLE_DEVICES="1,2,3")
    cuda = ["learner.device=cuda", "learner.accelerator.profile=nvidia", "learner.accelerator.count=2"]
    assert device_environment(read_sft_job(SFT, cuda))["CUDA_VISIBLE_DEVICES"] == "1,2"
    assert device_environment(read_sft_job(SFT, ())) == {}
    with pytest.raises(UserInputError, match=r"lower spec.learner.accelerator.count"):
        device_environment(read_sft_job(SFT, [*cuda[:2], "learner.accelerator.count=4"]))


def validated(*overrides: str, runs: Path, **environment: str) -> tuple[list[str], list[str]]:
    """Lines and warnings of a job that is valid."""
    options = [argument for override in overrides for argument in ("--set", override)]
    command = ("validate", str(QUICKSTART), "--runs", str(runs), "--no-data", *options)
    done = run_program(*command, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[1:], done.stderr.splitlines()


def test_validate_lists_devices_and_names_one_without_bfloat16(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0, capability="7.5"), gpu(1))
    lines, warnings = validated(*NVIDIA, "model.dtype=bfloat16", runs=tmp_path)
    assert lines == [
        "nvidia, driver 570.86.15: 0 (NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free); "
        "1 (NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free); engine-0 on 0; learner-0 on 1"
    ]
    assert any(line.startswith("warning: spec.model.dtype: bfloat16 needs compute capability 8") for line in warnings)


def test_validate_takes_a_job_for_another_machine(machine: Machine, tmp_path: Path) -> None:
    """A manifest is checked where it is written, which may be no machine that runs it."""
    machine(gpu(0))
    lines, warnings = validated(*NVIDIA, "inference.replicas=8", runs=tmp_path)
    assert lines == []
    assert any("kestrl run refuses this here: the job needs nvidia devices, 8 for 8 " in line for line in warnings)
    lines, warnings = validated(*NVIDIA, runs=tmp_path, PATH="/nowhere")
    assert lines == [line for line in warnings if "nvidia" in line] == [], "no program lists devices"


def test_validate_lists_devices_for_the_job_of_a_threshold(machine: Machine, tmp_path: Path) -> None:
    machine(gpu(0), gpu(1))
    findings = Findings()
    add_devices(findings, read_manifest(THRESHOLD, NVIDIA), tmp_path)
    assert [line.rpartition("; engine-0")[2] for line in findings.devices] == [" on 0; learner-0 on 1"]
    assert findings.warnings == []
