"""Devices of one machine: which ones each engine and the learner use. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kestrl._shared.plan.components import Component
from kestrl._shared.plan.settings.inference import LEAST_MOVE_SECONDS
from kestrl._shared.spec.inference import MOST_ENGINES
from kestrl._shared.spec.job import JobSpec
from kestrl.engines import EngineMemory
from kestrl.errors import UserInputError

VISIBLE: Mapping[str, str] = {"nvidia": "CUDA_VISIBLE_DEVICES", "ascend": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variable that restricts a process to devices of a profile; the process numbers them from 0."""
ORDER: Mapping[str, Mapping[str, str]] = {"nvidia": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}
"""Variables that make the runtime number devices as `nvidia-smi` does. CUDA numbers the fastest one first by default.
"""
LEARNER = "learner-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Devices that a component needs."""

    component: str
    profile: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineDevices:
    """What the components of a job use of one machine's devices."""

    assigned: Mapping[str, tuple[str, ...]]
    """Indices by component, of engines that may join the run, too."""
    engine_limit: int | None = None
    """Engines that have devices; None if engines need none."""
    memory: Mapping[str, EngineMemory] = field(default_factory=dict[str, EngineMemory])
    """Memory of the engines that share a device with the learner."""
    base_offload: bool = False
    """Whether the learner keeps its base in host memory while an engine has their device."""
    move_seconds: float = LEAST_MOVE_SECONDS
    """Longest time in which an engine's weights move between its devices and host memory."""
    notes: tuple[str, ...] = ()
    """How devices are shared, for a person."""


def device_needs(spec: JobSpec) -> Iterator[Need]:
    """The needs of a job on one machine, engines first. Nothing for profile cpu."""
    engines, learner = spec.inference.accelerator, spec.learner.accelerator
    if engines.profile in VISIBLE:
        for index in range(spec.inference.replicas.min):
            yield Need(component=f"engine-{index}", profile=engines.profile, count=engines.count)
    if learner.profile in VISIBLE:
        yield Need(component=LEARNER, profile=learner.profile, count=learner.count * spec.learner.replicas)


def assigned_devices(needs: Sequence[Need], available: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Indices of the devices of each component.

    Engines have devices of their own. So has the learner where there are enough; otherwise it shares the last ones with
    engines, as on a machine with one GPU.

    Args:
        needs: Those of a job.
        available: Indices by profile.

    Raises:
        UserInputError: There are not enough.
    """
    assigned: dict[str, tuple[str, ...]] = {}
    for profile in dict.fromkeys(need.profile for need in needs):
        devices = tuple(available.get(profile, ()))
        engines = [need for need in needs if need.profile == profile and need.component != LEARNER]
        learner = sum(need.count for need in needs if need.profile == profile and need.component == LEARNER)
        engine_devices = sum(need.count for need in engines)
        if max(engine_devices, learner) > len(devices):
            raise UserInputError(_shortage(profile, engines, learner, devices))
        first = 0
        for need in engines:
            assigned[need.component] = devices[first : first + need.count]
            first += need.count
        if learner:
            first = min(engine_devices, len(devices) - learner)
            assigned[LEARNER] = devices[first : first + learner]
    return assigned


def joining_devices(
    spec: JobSpec, assigned: Mapping[str, Sequence[str]], available: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Indices of the devices of engines that may join a run: those that nobody has, up to the most of a range."""
    engines, replicas = spec.inference.accelerator, spec.inference.replicas
    if engines.profile not in VISIBLE:
        return {}
    taken = {index for component in assigned.values() for index in component}
    rest = [index for index in available.get(engines.profile, ()) if index not in taken]
    most = MOST_ENGINES if replicas.fixed else replicas.max
    count = min(len(rest) // engines.count, most - replicas.min)
    return {
        f"engine-{replicas.min + number}": tuple(rest[number * engines.count : (number + 1) * engines.count])
        for number in range(count)
    }


def shared_devices(assigned: Mapping[str, Sequence[str]], needs: Sequence[Need]) -> dict[str, tuple[str, ...]]:
    """Devices that an engine shares with the learner, by engine."""
    profiles = {need.component: need.profile for need in needs}
    learner = set(assigned.get(LEARNER, ()))
    return {
        name: common
        for name, devices in assigned.items()
        if name != LEARNER and profiles[name] == profiles.get(LEARNER)
        if (common := tuple(device for device in devices if device in learner))
    }


def device_variables(profile: str, devices: Sequence[str]) -> dict[str, str]:
    """Environment of a process that uses only these devices; empty for profiles without devices."""
    variable = VISIBLE.get(profile)
    return {} if variable is None or not devices else {variable: ",".join(devices), **ORDER.get(profile, {})}


def with_devices(component: Component, devices: MachineDevices) -> Component:
    """A component restricted to its devices."""
    indices = devices.assigned.get(component.name, ())
    if not indices:
        return component
    device = replace(component.device, indices=indices)
    return replace(component, device=device, env={**component.env, **device_variables(device.profile, indices)})


def _shortage(profile: str, engines: Sequence[Need], learner: int, devices: Sequence[str]) -> str:
    parts: list[str] = []
    changes: list[str] = []
    engine_devices = sum(need.count for need in engines)
    if engines:
        parts.append(f"{engine_devices} for {len(engines)} engine{'s' if len(engines) > 1 else ''}")
    if engine_devices > len(devices):
        changes += ["spec.inference.replicas"] if len(engines) > 1 else []
        changes += ["spec.inference.accelerator.count"] if engines[0].count > 1 else []
    if learner:
        parts.append(f"{learner} for the learner")
    if learner > len(devices):
        changes.append("spec.learner.accelerator.count")
    count = f"{len(devices)} ({', '.join(devices)})" if devices else "none"
    fix = f"lower {' and '.join(changes)}" if devices and changes else "use profile cpu"
    return f"the job needs {profile} devices, {' and '.join(parts)}, and this machine offers {count}; {fix}"
