"""What a job will take of this machine: devices, disk, and the time until its first rollout."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from kestrl._app.local.rundir import RECORD, RunDir
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.job import Adapter
from kestrl._shared.spec.sft import SFTJob
from kestrl.errors import KestrlError
from kestrl.runstate.events import VersionVerified
from kestrl.runstate.stored import read_events
from kestrl.storage import open_store
from kestrl.storage.uris import file_uri

FLOAT_BYTES = 4
"""Bytes of a parameter of an adapter, which is stored in float32."""
CHECKPOINT_COPIES = 3
"""Adapters that a checkpoint has the size of: the weights, and two moments of each parameter."""
LARGEST_HEADER = 100 * 2**20
GIB, MIB = 2**30, 2**20
LOOKED_AT = 20
"""Newest runs that are searched for one of the same job."""


def cpu_parts(job: AgentRLJob, cores: int) -> str:
    """Where engines and learner of a job without accelerators compute."""
    engines = job.spec.inference.replicas.min
    return f"none requested: {engines} engine{'s' * (engines > 1)} and the learner share {cores} CPU cores"


def adapter_bytes(model: Path, adapter: Adapter) -> int | None:
    """Size of an adapter of a model whose weights lie in a folder as safetensors; None if that is not known."""
    shapes = dict(_shapes(model))
    if not shapes:
        return None
    targets = adapter.targets
    names = [name for name in shapes if _is_target(name, targets)]
    return FLOAT_BYTES * adapter.rank * sum(sum(shapes[name]) for name in names)


def _is_target(name: str, targets: str | list[str]) -> bool:
    module = name.removesuffix(".weight").rpartition(".")[2]
    if not isinstance(targets, str):
        return module in targets
    return "embed" not in name and module != "lm_head"


def _shapes(model: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Shapes of the matrices of a model, by name, from the headers of its files."""
    for file in sorted(model.glob("*.safetensors")):
        for name, shape in _header(file).items():
            if len(shape) == 2 and name.endswith(".weight"):
                yield name, (shape[0], shape[1])


def _header(file: Path) -> dict[str, list[int]]:
    """Shapes of the tensors of a file; empty for a file that is damaged, which is reported where it is loaded."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header: Any = json.loads(opened.read(size)) if size <= LARGEST_HEADER else {}
    except (OSError, ValueError):
        return {}
    tensors = cast("Mapping[str, Any]", header) if isinstance(header, dict) else dict[str, Any]()
    return {
        name: cast("Mapping[str, Any]", tensor)["shape"]
        for name, tensor in tensors.items()
        if name != "__metadata__" and isinstance(tensor, dict) and "shape" in tensor
    }


def run_bytes(job: AgentRLJob, adapter: int) -> int | None:
    """Most bytes of the versions and checkpoints that a run keeps; None if the number of its steps is not known."""
    schedule = job.spec.schedule
    checkpoints = (schedule.keep_checkpoints + 1) * CHECKPOINT_COPIES * adapter  # a new one is written before one goes
    if schedule.keep_adapters is not None:
        return checkpoints + (schedule.keep_adapters + schedule.keep_checkpoints + 2) * adapter
    steps = steps_of(job)
    return None if steps is None else checkpoints + (steps + 1) * adapter


def steps_of(job: AgentRLJob) -> int | None:
    """Optimiser steps, as far as the manifest has them."""
    schedule, size = job.spec.schedule, job.spec.data.train.size
    by_data = None if size is None else math.ceil(size * schedule.epochs / job.spec.algorithm.groups_per_step)
    return min((steps for steps in (by_data, schedule.max_steps) if steps is not None), default=None)


def job_disk(job: AgentRLJob | SFTJob, model: str, place: Path | None) -> tuple[str, str]:
    """What a job writes beside episodes and logs, and the fix where the disk does not hold it.

    Args:
        job: The job.
        model: Folder of its model, or a Hugging Face id.
        place: Existing folder on the disk that it writes to; None for object storage.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model} is downloaded at its first use, into the cache of huggingface_hub (HF_HOME)", ""
    adapter_size = adapter_bytes(folder, job.spec.model.adapter)
    if adapter_size is None:
        return "the size of the adapter is not known before the model is loaded", ""
    if isinstance(job, SFTJob):
        all_parameters = job.spec.training.parameters == "all"
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if all_parameters else adapter_size
        needed, text = size, f"the {'model' if all_parameters else 'adapter'} has {_size(size)}"
    else:
        most = run_bytes(job, adapter_size)
        checkpoints = f"{job.spec.schedule.keep_checkpoints} checkpoints of {_size(CHECKPOINT_COPIES * adapter_size)}"
        needed = 0 if most is None else most
        whole_run = "" if most is None else f", up to {_size(most)} in all"
        version = f"a version of the adapter has {_size(adapter_size)}"
        text = f"{version}, and {checkpoints} are kept{whole_run}, beside episodes and logs"
    if place is None:
        return text, ""
    free = shutil.disk_usage(place).free
    fix = "" if needed <= free else _smaller(job, place, free)
    return f"{text}; {_size(free)} free", fix


def _smaller(job: AgentRLJob | SFTJob, place: Path, free: int) -> str:
    other = "write elsewhere (--runs, spec.storage.uri)"
    if isinstance(job, AgentRLJob) and job.spec.schedule.keep_adapters is None:
        return f"{place} has {_size(free)} free: set spec.schedule.keepAdapters, which is all, or {other}"
    return f"{place} has {_size(free)} free: {other}"


def _size(number: int) -> str:
    return f"{number / GIB:.1f} GiB" if number >= GIB else f"{number / MIB:.1f} MiB"


def set_up(job: AgentRLJob, runs: Path) -> str:
    """How long it takes until engines have verified the first version, as measured in the newest run of this job
    here.
    """
    for folder in _newest(runs, job.metadata.name):
        seconds = measured(folder)
        if seconds is not None:
            return f"{seconds:.0f} s from the start to the first rollout, as measured in {folder.name}"
    return (
        "not measured here yet: engines take half a minute with a small model and some minutes with a large one, then "
        "the first version is verified; a later `kestrl doctor` says what this job took"
    )


def _newest(runs: Path, job: str) -> list[Path]:
    folders = [path.parent for path in runs.glob(f"{job}-*/{RECORD}")]
    return sorted(folders, key=lambda folder: (folder / RECORD).stat().st_mtime, reverse=True)[:LOOKED_AT]


def measured(folder: Path) -> float | None:
    """Seconds from the start of a run to its first version that engines had verified; None if it was resumed, did not
    get there, or cannot be read.
    """
    try:
        record = RunDir(folder).record()
        entries = read_events(open_store(file_uri(folder)))
    except KestrlError:
        return None
    if record is None or not entries or record.started_at > entries[0].at:
        return None
    for entry in entries:
        if isinstance(entry.event, VersionVerified):
            return entry.at - record.started_at
    return None
