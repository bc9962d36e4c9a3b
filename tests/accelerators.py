"""Programs of vendors that print what real ones print, and plans of a job beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kestrl._app.local.rundir import RunDir
from kestrl._app.local.site import local_devices, reserved_ports, site_of
from kestrl._shared.plan.components import Component
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.site import Site
from kestrl._shared.spec import AgentRLJob, read_job

QUICKSTART = Path(__file__).parents[1] / "examples" / "email-search" / "quickstart.yaml"
NVIDIA = ("inference.accelerator.profile=nvidia", "learner.accelerator.profile=nvidia", "inference.replicas=1")
TURNS = (*NVIDIA, "inference.sharing=turns")
ASCEND_TABLE = """
        NPU ID                         Chip ID                        Chip Logic ID                  Chip Name
        0                              0                              0                              Ascend 910B3
        0                              1                              -                              Mcu
        4                              0                              1                              Ascend 910B3
        4                              1                              -                              Mcu
"""


def gpu(index: int, *, free: int = 80_000, capability: str = "9.0", mig: str = "Disabled", total: str = "81559") -> str:
    return (
        f"{index}, GPU-{index}a{'0' * 6}-beef, NVIDIA H100 80GB HBM3, {total}, {free}, 570.86.15, {capability}, {mig}"
    )


class Machine:
    """A machine whose vendors' programs print lines of a test's choice."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        folder.mkdir()

    def __call__(self, *gpus: str, table: str = "", code: int = 0, **variables: str) -> None:
        (self._folder / "rows").write_text("".join(f"{line}\n" for line in gpus))
        (self._folder / "table").write_text(table)
        for name, file in {"nvidia-smi": "rows", "npu-smi": "table"}.items():
            program = self._folder / name
            program.write_text(f"#!/bin/sh\ncat '{self._folder / file}'\nexit {code}\n")
            program.chmod(0o755)
        for name, content in variables.items():
            self._monkeypatch.setenv(name, content)


def planned_site(tmp_path: Path, job: AgentRLJob, cache_dir: Path | None = None) -> Site:
    with reserved_ports(job, None) as ports:
        return site_of(
            job,
            RunDir(tmp_path / "run"),
            QUICKSTART.parent,
            ports=ports,
            cache_dir=cache_dir or tmp_path / "cache",
            devices=local_devices(job),
        )


def planned(tmp_path: Path, *overrides: str) -> dict[str, Component]:
    job = read_job(QUICKSTART, overrides)
    return {component.name: component for component in plan(job, planned_site(tmp_path, job))}


def visible(components: Mapping[str, Component], variable: str = "CUDA_VISIBLE_DEVICES") -> dict[str, str]:
    return {name: item.env[variable] for name, item in components.items() if variable in item.env}
