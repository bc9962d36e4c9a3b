"""The learner's memory, as its own program estimates it, and the division of a device that it shares with an engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from kestrl._app.local.devices import LocalDevice
from kestrl._app.local.files import write_atomic
from kestrl._shared.checking import ask
from kestrl._shared.plan.devices import (
    LEARNER,
    VISIBLE,
    MachineDevices,
    Need,
    assigned_devices,
    joining_devices,
    shared_devices,
)
from kestrl._shared.plan.memory import GIB, MemoryEstimate, MemorySettings, changes, memory_settings
from kestrl._shared.plan.sharing import SharedMemory, shared_memory, turns_instead
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.job import JobSpec
from kestrl.engines import EngineMemory
from kestrl.engines.vllm import MEMORY_OPTIONS
from kestrl.errors import SeveralProblems, UserInputError

SECONDS = 1800.0
"""Time limit of the estimate, which takes from seconds to a few minutes."""
MEMINFO = Path("/proc/meminfo")


def estimated(settings: MemorySettings) -> MemoryEstimate:
    """The learner's answer.

    Raises:
        UserInputError: It is not installed, or the model cannot be read.
    """
    report = ask("kestrl_learner.memory.estimate", settings, subject="spec.model.base", seconds=SECONDS)
    if report.missing:
        raise UserInputError(
            f"spec.learner: {report.missing} is not installed, whose program estimates its memory; install it"
        )
    if report.problems:
        raise SeveralProblems(report.problems)
    return MemoryEstimate.model_validate(report.facts)


class NotEstimatedError(UserInputError):
    """The learner's memory was not estimated before, and is not now."""


def cached_estimate(settings: MemorySettings, cache_dir: Path, *, only_kept: bool = False) -> MemoryEstimate:
    """`estimated`, kept in a file by settings, version and the model's config: an 8B model takes 40 s.

    Args:
        settings: The step.
        cache_dir: Folder of the files.
        only_kept: Whether to estimate nothing anew.

    Raises:
        NotEstimatedError: With `only_kept`, if there is no file.
        UserInputError: As `estimated`.
    """
    config = Path(settings.policy.model) / "config.json"
    parts = (settings.model_dump_json(), version("kestrl"), config.read_text() if config.is_file() else "")
    path = cache_dir / f"memory-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"
    if path.is_file():
        return MemoryEstimate.model_validate_json(path.read_bytes())
    if only_kept:
        raise NotEstimatedError(
            "how the learner and an engine divide their device, and whether it holds both, is not estimated yet: "
            "kestrl doctor with the same manifest does, in up to some minutes, and keeps the result"
        )
    estimate = estimated(settings)
    cache_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(path, estimate.model_dump_json())
    return estimate


def host_memory_free() -> int:
    """Bytes of host memory that are available to programs."""
    rows = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) * 1024


def machine_devices(
    job: AgentRLJob,
    needs: Sequence[Need],
    available: Mapping[str, Sequence[LocalDevice]],
    *,
    model: str,
    cache_dir: Path,
    only_kept: bool = False,
) -> MachineDevices:
    """Assigned devices of a job, and the memory of engines that share one with the learner.

    Args:
        job: The job.
        needs: Its devices.
        available: Devices of this machine by profile.
        model: Folder or Hugging Face id of the base model.
        cache_dir: Folder for estimates of the learner's memory.
        only_kept: Whether to use an estimate of that folder, and to make none.

    Raises:
        NotEstimatedError: With `only_kept`, if it has none, and one is needed.
        UserInputError: There are not enough devices, or one is too small.
    """
    indices = {profile: [device.index for device in devices] for profile, devices in available.items()}
    assigned = assigned_devices(needs, indices)
    common = shared_devices(assigned, needs)
    if job.spec.inference.sharing == "turns" and not common:
        raise UserInputError(
            "spec.inference.sharing: turns is for one device, and this machine gives engine and learner one each; use "
            "split, or offer one device by CUDA_VISIBLE_DEVICES"
        )
    if not common:
        return _separate_devices(job.spec, assigned, indices)
    profile = next(need.profile for need in needs if need.component == LEARNER)
    inference = job.spec.inference
    if inference.engine == "sglang":  # its share is of what is free when it starts, which the learner changes
        if "mem-fraction-static" in {name.replace("_", "-") for name in inference.args}:
            return MachineDevices(assigned=assigned, engine_limit=job.spec.inference.replicas.min)
        raise UserInputError(
            f"spec.inference.engine: sglang and the learner would share a {profile} device, whose memory is divided "
            "for vllm alone; offer one more device, use vllm, or limit the engine's part with "
            "spec.inference.args.mem-fraction-static"
        )
    settings = memory_settings(job, model=model, row=None)
    by_index = {device.index: device for device in available[profile]}
    unknown = [name for shared in common.values() for name in shared if by_index[name].total is None]
    if unknown and inference.sharing == "split":
        note = (
            f"the learner shares {profile} device {', '.join(unknown)} with an engine, and its memory is not known: "
            "limit the engine's part with inference.args, such as gpu-memory-utilization"
        )
        return MachineDevices(assigned=assigned, engine_limit=inference.replicas.min, notes=(note,))
    estimate = cached_estimate(settings, cache_dir, only_kept=only_kept)
    if unknown:
        return _of_unknown_memory(
            job.spec, assigned, f"{profile} device {', '.join(unknown)}", settings.ranks, estimate
        )
    return _divided(
        job.spec,
        assigned,
        {engine: [by_index[name] for name in shared] for engine, shared in common.items()},
        settings,
        estimate,
    )


def _divided(
    spec: JobSpec,
    assigned: Mapping[str, tuple[str, ...]],
    common: Mapping[str, Sequence[LocalDevice]],
    settings: MemorySettings,
    estimate: MemoryEstimate,
) -> MachineDevices:
    """The memory of engines that share devices with the learner.

    Raises:
        UserInputError: A device does not hold both, or host memory not what leaves it in turns.
    """
    turns, ranks, host_free = spec.inference.sharing == "turns", settings.ranks, host_memory_free()
    tightest = {engine: min(shared, key=_free_bytes) for engine, shared in common.items()}
    division = shared_memory(
        spec, estimate, ranks=ranks, free=min(map(_free_bytes, tightest.values())), host_free=host_free
    )
    memory: dict[str, EngineMemory] = {}
    notes: list[str] = []
    for engine, device in tightest.items():
        free, total = _free_bytes(device), (device.total or 0.0) * GIB
        part = division.engine(free=free, total=total)
        if part is None:
            fields = list(changes(settings, estimate))
            if not turns and (field := turns_instead(spec, estimate, ranks=ranks, free=free, host_free=host_free)):
                fields.insert(0, field)
            raise division.shortage(device.index, free, "; ".join(fields) or "Use a smaller model")
        memory[engine] = part
        names = ", ".join(shared.index for shared in common[engine])
        notes.append(
            f"{engine} and the learner share {spec.learner.accelerator.profile} device {names} of {total / GIB:.1f} GiB"
            f"{' in turns' if turns else ''}: {_engine_part(spec, division, part, total)}, and "
            f"{division.learner / GIB:.1f} for the learner{_beside(division) if turns else ''}"
        )
    if turns:
        _require_host_memory(division, host_free)
    return MachineDevices(
        assigned=assigned,
        engine_limit=spec.inference.replicas.min,
        memory=memory,
        base_offload=division.base_offload,
        move_seconds=division.move_seconds,
        notes=tuple(notes),
    )


def _free_bytes(device: LocalDevice) -> float:
    return (device.free or 0.0) * GIB


def _engine_part(spec: JobSpec, division: SharedMemory, part: EngineMemory, total: float) -> str:
    """The engine's memory for a person."""
    limits = [name for name in spec.inference.args if name.replace("_", "-") in MEMORY_OPTIONS]
    if limits:
        return f"for the engine what spec.inference.args.{limits[0]} says"
    rows = division.cached_rows(part.cache_bytes)
    held = (
        "" if rows is None else f" ({rows} of {division.rows_in_flight} rows of {spec.inference.context_length} tokens)"
    )
    return f"{part.utilization * total / GIB:.1f} for the engine, {part.cache_bytes / GIB:.1f} of them KV cache{held}"


def _of_unknown_memory(
    spec: JobSpec, assigned: Mapping[str, tuple[str, ...]], shared: str, ranks: int, estimate: MemoryEstimate
) -> MachineDevices:
    """Devices of a job of which an engine and the learner use one in turns whose memory the vendor's program does not
    list, as that of an Ascend die.

    Raises:
        UserInputError: The manifest does not say which part is the engine's; or host memory does not hold the engine's
            weights.
    """
    host_free = host_memory_free()
    division = shared_memory(spec, estimate, ranks=ranks, free=None, host_free=host_free)
    if "gpu-memory-utilization" not in {name.replace("_", "-") for name in spec.inference.args}:
        raise UserInputError(
            f"spec.inference.sharing: turns divides {shared}, whose memory is not known here; set spec.inference.args."
            f"gpu-memory-utilization to the engine's share, which leaves {division.beside / GIB:.1f} GiB for what the "
            "learner keeps on it, or use split"
        )
    _require_host_memory(division, host_free)
    note = f"the learner and an engine share {shared} in turns, whose memory is not known{_beside(division)}"
    return MachineDevices(
        assigned=assigned,
        engine_limit=spec.inference.replicas.min,
        move_seconds=division.move_seconds,
        notes=(note,),
    )


def _beside(division: SharedMemory) -> str:
    """What stays where while the other has the device."""
    base = f", and {division.base_host / GIB:.1f} of base weights in host memory" if division.base_offload else ""
    return (
        f"; the learner keeps {division.beside / GIB:.1f} on it while the engine computes{base}, and the engine up to "
        f"{division.engine_host / GIB:.1f} of weights in host memory while it sleeps"
    )


def _require_host_memory(division: SharedMemory, free: float) -> None:
    """Checks that the host's memory holds the weights of a sleeping engine, and what the learner keeps there.

    Raises:
        UserInputError: It does not.
    """
    if division.host > free:
        base = f" and {division.base_host / GIB:.1f} the learner's base" if division.base_offload else ""
        raise UserInputError(
            f"spec.inference.sharing: turns keeps up to {division.host / GIB:.1f} GiB in host memory during an update, "
            f"{division.engine_host / GIB:.1f} of them weights of the engine{base}, and this machine has "
            f"{free / GIB:.1f} free; use split or a smaller model"
        )


def _separate_devices(
    spec: JobSpec, assigned: Mapping[str, tuple[str, ...]], indices: Mapping[str, Sequence[str]]
) -> MachineDevices:
    """Devices of a job of which no engine shares one with the learner; further ones are for engines that join."""
    inference, replicas = spec.inference, spec.inference.replicas
    if inference.accelerator.profile not in VISIBLE:
        return MachineDevices(assigned=assigned)
    joining = joining_devices(spec, assigned, indices)
    limit = replicas.min + len(joining)
    note = (
        f"spec.inference.replicas.max: {replicas.max} engines, and this machine offers {inference.accelerator.profile} "
        f"devices for {limit}"
    )
    return MachineDevices(
        assigned={**assigned, **joining},
        engine_limit=limit,
        notes=() if replicas.fixed or limit >= replicas.max else (note,),
    )
