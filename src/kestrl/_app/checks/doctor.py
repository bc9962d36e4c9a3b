"""Checks of what a run on this machine needs. Each finding is either ok or has a fix."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlparse

from kestrl._app.checks.accelerators import UNUSABLE, examined_devices
from kestrl._app.checks.manifests import ReadManifest, check_manifest, job_of
from kestrl._app.checks.needs import job_disk, set_up
from kestrl._app.checks.sft import device_environment
from kestrl._app.engines.interpreter import engine_build, installed_engine
from kestrl._app.engines.variables import sockets_note
from kestrl._app.local.memory import host_memory_free
from kestrl._app.local.processes import LOCAL, SERVICES, missing_services
from kestrl._app.local.secrets import open_storage
from kestrl._app.local.site import storage_root
from kestrl._shared.plan.tools import sandbox_claim
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.inference import Inference
from kestrl._shared.spec.sft import SFTJob
from kestrl._shared.spec.threshold import Threshold
from kestrl.data.locate import locate_model
from kestrl.errors import KestrlError, UserInputError, place_error
from kestrl.storage import ObjectStore, open_store
from kestrl.storage.uris import file_uri, is_local, local_path

SANDBOX = "kestrl_sandbox"
CONNECT_SECONDS = 5.0
PROGRAM_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    status: str
    """Observed state."""
    fix: str = ""
    """How to fix it; empty if there is nothing to fix."""


def examine(parsed_manifest: ReadManifest | None, *, runs: Path) -> Iterator[Finding]:
    """Checks this machine, and what a manifest references.

    Args:
        parsed_manifest: The manifest of what is to run, if any.
        runs: Folder for the runs.
    """
    yield machine()
    yield runs_folder(runs)
    if parsed_manifest is not None and isinstance(parsed_manifest.manifest, SFTJob):
        yield from _examine_sft(parsed_manifest, parsed_manifest.manifest, runs)
        return
    yield parts()
    job, base = (None, Path.cwd()) if parsed_manifest is None else job_of(parsed_manifest)
    yield _tried("engine", lambda: engine(job, base))
    yield Finding(name="ledger", status=f"SQLite {sqlite3.sqlite_version}")
    if job is None or parsed_manifest is None:
        return
    yield from accelerator(job, base, runs)
    yield from code_sandbox(job)
    yield _tried("model", lambda: locate_model(job.spec.model.base, base=base))
    opened, place = partial(open_storage, job, base), storage_root(job, base) or file_uri(runs)
    yield _tried("storage", lambda: storage(place, opened))
    yield from disk(job, base, place)
    yield Finding(name="set-up", status=set_up(job, runs))
    yield named(parsed_manifest)
    if job.spec.telemetry.otlp:
        yield collector(job.spec.telemetry.otlp)


def _examine_sft(parsed_manifest: ReadManifest, job: SFTJob, runs: Path) -> Iterator[Finding]:
    yield parts(["kestrl-learner"])
    yield _tried("accelerator", lambda: ", ".join(device_environment(job).values()) or job.spec.learner.device)
    yield _tried("model", lambda: locate_model(job.spec.model.base, base=parsed_manifest.base))
    place = job.spec.storage.uri or file_uri(runs)
    yield _tried("storage", lambda: storage(place, open_store))
    yield from disk(job, parsed_manifest.base, place)
    yield named(parsed_manifest)


def disk(job: AgentRLJob | SFTJob, base: Path, place: str) -> Iterator[Finding]:
    """What the job writes, and whether the disk holds it; nothing where the model does not exist, which is a finding of
    its own.
    """
    try:
        model = locate_model(job.spec.model.base, base=base)
    except UserInputError:
        return
    folder = nearest_folder(local_path(place)) if is_local(place) else None
    status, fix = job_disk(job, model, folder)
    yield Finding(name="disk", status=status, fix=fix)


def _tried(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name=name, status=look())
    except KestrlError as error:
        return Finding(name=name, status=UNUSABLE, fix=str(error))
    except OSError as error:
        unusable = place_error(error, str(error.filename or name))
        if unusable is None:
            raise
        return Finding(name=name, status=UNUSABLE, fix=str(unusable))


def named(parsed_manifest: ReadManifest) -> Finding:
    """Whether the user code, template and rows of a manifest can be loaded and are consistent."""
    findings = check_manifest(
        parsed_manifest, data=True, model=True, engine=False
    )  # the engine has a finding of its own
    counts = findings.summary
    status = "; ".join([f"can be loaded, {counts}" if counts else "can be loaded", *findings.warnings])
    name = "threshold" if isinstance(parsed_manifest.manifest, Threshold) else "job"
    return Finding(name=name, status=UNUSABLE if findings.problems else status, fix="\n".join(findings.problems))


def machine() -> Finding:
    """Cores and memory that are available to this process."""
    free = host_memory_free() / 2**30
    return Finding(name="machine", status=f"{len(os.sched_getaffinity(0))} cores, {free:.1f} GiB of memory free")


def runs_folder(runs: Path) -> Finding:
    """Whether the folder of the runs can be created or written, and the free space. Creates nothing."""
    try:
        standing = nearest_folder(runs)
        with tempfile.NamedTemporaryFile(dir=standing) as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        unusable = place_error(error, str(runs))
        return Finding(
            name="runs", status=str(runs), fix=str(unusable or f"{runs}: {error.strerror}; choose another with --runs")
        )
    return Finding(name="runs", status=f"{runs.resolve()}, {shutil.disk_usage(standing).free / 2**30:.1f} GiB free")


def nearest_folder(path: Path) -> Path:
    """Nearest existing folder of a path."""
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def code_sandbox(job: AgentRLJob) -> Iterator[Finding]:
    """Whether this machine isolates code as the job's code interpreter asks for; nothing for a job without one."""
    sandbox_tool = next((tool for tool in job.spec.tools if (tool.use or "").startswith(f"{SANDBOX}.")), None)
    if sandbox_tool is None:
        return
    claim = sandbox_claim(job.spec)
    if claim is not None:
        fix = f"{claim[1]}: code runs in sandboxes that are claimed on a cluster; remove it to run here"
        yield Finding(name="sandbox", status=f"claimed from the warm pool {claim[0].warm_pool}", fix=fix)
        return
    isolation = str(sandbox_tool.config.get("isolation", "namespaces"))
    try:
        process = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", f"{SANDBOX}.report", isolation],
            capture_output=True,
            text=True,
            check=True,
            timeout=PROGRAM_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        yield Finding(name="sandbox", status=UNUSABLE, fix=lines[-1])
        return
    except subprocess.TimeoutExpired:
        yield Finding(name="sandbox", status=UNUSABLE, fix=f"it did not start within {PROGRAM_SECONDS:g} s")
        return
    report = json.loads(process.stdout)
    yield Finding(name="sandbox", status=report.get("status", UNUSABLE), fix=report.get("problem", ""))


def parts(services: Sequence[str] = SERVICES) -> Finding:
    """Whether some services are installed in this environment."""
    if missing_names := missing_services(services):
        return Finding(name="parts", status="missing: " + ", ".join(missing_names), fix=LOCAL)
    names = "all its services" if services is SERVICES else ", ".join(services)
    return Finding(name="parts", status=f"kestrl {version('kestrl')} and {names}")


def engine(job: AgentRLJob | None, base: Path) -> str:
    """The engine in the interpreter that the job names, or in this one.

    Raises:
        UserInputError: It is missing, or not what the job needs.
    """
    build = installed_engine(Inference(), base) if job is None else engine_build(job.spec.inference, base)
    return "; ".join(filter(None, (f"{build} of {build.python}", build.doubt, sockets_note())))


def accelerator(job: AgentRLJob, base: Path, runs: Path) -> Iterator[Finding]:
    """The devices of this machine, which components use and share them, and whether they compute in the job's dtype."""
    for finding in examined_devices(job, base, runs):
        yield Finding(name="accelerator", status=finding.status, fix=finding.fix)


def storage(uri: str, opened: Callable[[str], ObjectStore]) -> str:
    """Writes, reads and removes an object in the storage of the run; for a local folder, in its nearest existing
    parent.
    """
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
        raise KestrlError(f"{store.address(path)} was read back with different content than written")
    return f"{store.uri}, written and read back"


def collector(endpoint: str) -> Finding:
    """Whether the OTLP endpoint accepts connections."""
    address = urlparse(endpoint)
    try:
        with socket.create_connection(
            (address.hostname or "", address.port or (443 if address.scheme == "https" else 4317)),
            timeout=CONNECT_SECONDS,
        ):
            return Finding(name="telemetry", status=f"{endpoint} answers")
    except OSError as error:
        return Finding(
            name="telemetry",
            status=f"{endpoint}: {error}",
            fix="start a collector there, or remove spec.telemetry.otlp: spans would be lost",
        )
