"""What a job makes of the accelerators of this machine, for `kestrl doctor` and `kestrl validate`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kestrl._app.checks.needs import cpu_parts
from kestrl._app.local.check import fitted_job
from kestrl._app.local.devices import BFLOAT16, LocalDevice, are_listed
from kestrl._app.local.memory import NotEstimatedError, machine_devices
from kestrl._app.local.rundir import cache_folder
from kestrl._app.local.site import local_devices
from kestrl._shared.plan.devices import assigned_devices, device_needs
from kestrl._shared.spec import AgentRLJob
from kestrl.data.locate import locate_model
from kestrl.errors import UserInputError

UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFinding:
    """Devices of a profile and who uses them, or how one is shared."""

    status: str
    fix: str = ""
    """What to change; empty if nothing has to be."""

    @property
    def is_refused(self) -> bool:
        """Whether `kestrl run` refuses the job on this machine."""
        return self.status == UNUSABLE


def examined_devices(job: AgentRLJob, base: Path, runs: Path) -> Iterator[DeviceFinding]:
    """Devices that a job uses on this machine; estimates the learner's memory where it shares one with an engine.

    Args:
        job: A job.
        base: The manifest's folder.
        runs: Folder of the runs, beside which estimates of the learner's memory are kept.
    """
    if any(device_needs(job.spec)):
        yield from _examined(job, base, runs, only_kept=False)
    else:
        yield DeviceFinding(status=cpu_parts(job, len(os.sched_getaffinity(0))))


def known_devices(job: AgentRLJob, base: Path, runs: Path) -> tuple[list[str], list[str]]:
    """What is known of a job's devices within a second: lines and warnings, none where this machine lists no devices.

    The learner's memory is not estimated, which takes up to minutes. A job that this machine cannot run is valid, since
    a manifest is checked on other machines than those that run it.

    Args:
        job: A job.
        base: The manifest's folder.
        runs: Folder of the runs, beside which estimates are kept.
    """
    lines: list[str] = []
    warnings: list[str] = []
    profiles = {need.profile for need in device_needs(job.spec)}
    if not profiles or not all(map(are_listed, profiles)):
        return lines, warnings
    for finding in _examined(job, base, runs, only_kept=True):
        if not finding.is_refused:
            lines.append(finding.status)
        if finding.fix:
            warnings.append(f"kestrl run refuses this here: {finding.fix}" if finding.is_refused else finding.fix)
    return lines, warnings


def _examined(job: AgentRLJob, base: Path, runs: Path, *, only_kept: bool) -> Iterator[DeviceFinding]:
    needs = tuple(device_needs(job.spec))
    try:
        devices = local_devices(job)
        assigned = assigned_devices(
            needs, {name: [item.index for item in profile_devices] for name, profile_devices in devices.items()}
        )
    except UserInputError as error:
        yield DeviceFinding(status=UNUSABLE, fix=str(error))
        return
    for profile, usable in devices.items():
        drivers = ", ".join(dict.fromkeys(device.driver for device in usable if device.driver))
        users = [f"{name} on {', '.join(assigned[name])}" for name in assigned]
        yield DeviceFinding(
            status=f"{profile}{drivers and f', driver {drivers}'}: {'; '.join(map(str, usable))}; {'; '.join(users)}",
            fix=dtype_problem(job, usable),
        )
    try:
        fitted, model = fitted_job(job, base), locate_model(job.spec.model.base, base=base)
    except UserInputError:  # a finding of its own
        return
    try:
        notes = machine_devices(
            fitted, needs, devices, model=model, cache_dir=cache_folder(runs), only_kept=only_kept
        ).notes
    except NotEstimatedError as error:
        notes = (str(error),)
    except UserInputError as error:
        yield DeviceFinding(status=UNUSABLE, fix=str(error))
        return
    for note in notes:
        yield DeviceFinding(status=note)


def dtype_problem(job: AgentRLJob, devices: Sequence[LocalDevice]) -> str:
    """What to change where a device cannot compute in the job's dtype; empty if all can."""
    if job.spec.model.dtype != "bfloat16":
        return ""
    for device in devices:
        if device.capability is not None and device.capability < BFLOAT16:
            return (
                f"spec.model.dtype: bfloat16 needs compute capability {BFLOAT16:g}, and device {device} has "
                f"{device.capability:g}; use float32"
            )
    return ""
