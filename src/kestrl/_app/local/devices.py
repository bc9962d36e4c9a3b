"""Accelerators of this machine, as the vendors' programs list them."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kestrl._shared.plan.devices import VISIBLE
from kestrl.errors import UserInputError

SECONDS = 30.0
"""Time limit in seconds for a vendor's program."""
NVIDIA_COLUMNS = "index,uuid,name,memory.total,memory.free,driver_version,compute_cap,mig.mode.current"
NO_DEVICE = frozenset({"", "-1", "none", "void", "NoDevFiles"})
"""Values of a variable that hide all devices."""
BFLOAT16 = 8.0
"""Smallest compute capability of an NVIDIA device that computes in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """One accelerator."""

    index: str
    """Number in the order of the PCI bus, or the logic id of an Ascend die."""
    uuid: str = ""
    name: str = ""
    """Product name; empty where the vendor's program is missing and the user's variable names the device."""
    total: float | None = None
    """GiB of memory; None where the vendor's program does not report it."""
    free: float | None = None
    driver: str = ""
    capability: float | None = None
    """Compute capability of an NVIDIA device."""
    divided: bool = False
    """Whether it is divided into MIG instances."""

    def __str__(self) -> str:
        memory = "" if self.total is None or self.free is None else f", {self.free:.1f} of {self.total:.1f} GiB free"
        return f"{self.index} ({self.name or 'not listed'}{memory})"


def devices_for(profiles: Iterable[str]) -> dict[str, tuple[LocalDevice, ...]]:
    """Devices by profile that this process may use; of profiles with devices only.

    Raises:
        UserInputError: They cannot be listed, or the user's variable names something else.
    """
    return {profile: usable_devices(profile) for profile in dict.fromkeys(profiles) if profile in VISIBLE}


def are_listed(profile: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the vendor's program is installed, or the user's variable names devices of a profile."""
    names_devices = bool(_names(environ.get(VISIBLE[profile], "")))
    return names_devices or shutil.which(PROGRAMS[profile], path=environ.get("PATH")) is not None


def usable_devices(profile: str, environ: Mapping[str, str] = os.environ) -> tuple[LocalDevice, ...]:
    """Devices of a profile within what the user's own variable, such as CUDA_VISIBLE_DEVICES, allows.

    Raises:
        UserInputError: As `devices_for`.
    """
    variable = VISIBLE[profile]
    allowed = environ.get(variable)
    program = shutil.which(PROGRAMS[profile], path=environ.get("PATH"))
    if program is None:
        names = [] if allowed is None else _names(allowed)
        if not names or not all(name.isdecimal() for name in names):
            raise UserInputError(
                f"profile {profile}: {PROGRAMS[profile]} is not on the PATH, so that the devices of this machine are "
                f"not known; install the driver, name the devices by index in {variable}, or use profile cpu"
            )
        return tuple(LocalDevice(index=name) for name in names)
    devices = LISTINGS[profile](program)
    usable = devices if allowed is None else _allowed(devices, _names(allowed), variable)
    for device in usable:
        if device.divided:
            raise UserInputError(
                f"profile {profile}: device {device.index} is divided into MIG instances, which engines do not accept "
                f"on one machine; turn MIG off (nvidia-smi -i {device.index} -mig 0), or leave the device out of "
                f"{variable}"
            )
    return usable


def _names(value: str) -> list[str]:
    return [] if value.strip() in NO_DEVICE else [name.strip() for name in value.split(",")]


def _allowed(devices: Sequence[LocalDevice], names: Sequence[str], variable: str) -> tuple[LocalDevice, ...]:
    allowed_devices: list[LocalDevice] = []
    for name in names:
        if name.startswith("MIG-"):
            raise UserInputError(
                f"{variable}: {name} is a MIG instance, which engines do not accept on one machine; name whole devices"
            )
        matches = [item for item in devices if name == item.index or (item.uuid and _is_prefix(name, item.uuid))]
        if len(matches) != 1:
            indices = ", ".join(item.index for item in devices) or "none"
            raise UserInputError(
                f"{variable}: {name!r} {'is no device' if not matches else 'is more than one device'} of this machine, "
                f"which has {indices}"
            )
        if matches[0] in allowed_devices:
            raise UserInputError(f"{variable}: names device {matches[0].index} twice; name it once")
        allowed_devices += matches
    return tuple(allowed_devices)


def _is_prefix(name: str, uuid: str) -> bool:
    """Whether a name is a UUID or its beginning, as CUDA accepts it."""
    return len(name) > len("GPU-") and uuid.startswith(name)


def _output(command: Sequence[str]) -> str:
    try:
        return subprocess.run(  # noqa: S603 - the vendor's program
            command, capture_output=True, text=True, check=True, timeout=SECONDS
        ).stdout
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout).strip().splitlines() or [f"exit code {error.returncode}"]
        raise UserInputError(f"{command[0]} failed: {lines[-1]}; repair the driver, or use profile cpu") from error
    except subprocess.TimeoutExpired as error:
        raise UserInputError(
            f"{command[0]} did not answer within {SECONDS:g} s; repair the driver, or use profile cpu"
        ) from error
    except OSError as error:
        raise UserInputError(f"{command[0]}: {error.strerror}; repair the driver, or use profile cpu") from error


def _nvidia(program: str) -> tuple[LocalDevice, ...]:
    rows = csv.reader(
        _output([program, f"--query-gpu={NVIDIA_COLUMNS}", "--format=csv,noheader,nounits"]).splitlines(),
        skipinitialspace=True,
    )
    devices: list[LocalDevice] = []
    for row in rows:
        if len(row) != len(NVIDIA_COLUMNS.split(",")):
            raise UserInputError(f"{program}: {', '.join(row)!r} is no row of {NVIDIA_COLUMNS}; update the driver")
        index, uuid, name, total, free, driver, capability, mig = (cell.strip() for cell in row)
        devices.append(
            LocalDevice(
                index=index,
                uuid=uuid,
                name=name,
                total=_gib(total),
                free=_gib(free),
                driver=driver,
                capability=_number(capability),
                divided=mig == "Enabled",
            )
        )
    return tuple(devices)


def _ascend(program: str) -> tuple[LocalDevice, ...]:
    """Dies by logic id, from the table of `npu-smi info -m`: NPU, chip, logic id, name. Other chips have no logic
    id.
    """
    devices: list[LocalDevice] = []
    for line in _output([program, "info", "-m"]).splitlines():
        cells = line.split(maxsplit=3)
        if len(cells) == 4 and all(cell.isdecimal() for cell in cells[:3]):
            devices.append(LocalDevice(index=cells[2], name=cells[3].strip()))
    return tuple(devices)


def _number(text: str) -> float | None:
    """None for what the program writes where a device does not report something, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return None


def _gib(mebibytes: str) -> float | None:
    number = _number(mebibytes)
    return None if number is None else number / 1024


PROGRAMS: Mapping[str, str] = {"nvidia": "nvidia-smi", "ascend": "npu-smi"}
LISTINGS = {"nvidia": _nvidia, "ascend": _ascend}
