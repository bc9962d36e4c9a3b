"""A run's folder: what it is called, who holds it, what lies in it.

```
runs/<job>-<n>/
    job.json       the manifest as it runs      run.json      what the runner sees, rewritten as it changes
    settings/      one file a component         logs/         one file a component, bounded
    adapters/ checkpoints/ episodes/ metrics/   ledger.db     summary.json
    lock           held (flock) by the runner for as long as it lives: whether a run is alive is asked of the kernel
```
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kestrl.errors import UserInputError
from kestrl.spec import AgentRLJob, parse_job

IDENTITY = ("model", "data", "agent", "tools", "rewards", "sampling", "algorithm")
"""Parts of the spec that make a run what it is: a run is resumed only under the same."""


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file whole: a reader, or who comes after a power cut, sees the old content or the new."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def summary_path(self) -> Path:
        return self.path / "summary.json"

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run, or None where it is not there yet.

        Raises:
            UserInputError: It is not a JSON object: it was cut off or edited.
        """
        path = self.path / name
        try:
            document = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise UserInputError(f"{path} is damaged: {error}; restore it, or start a new run with --new") from error
        if not isinstance(document, dict):
            raise UserInputError(
                f"{path} is damaged: it holds no JSON object; restore it, or start a new run with --new"
            )
        return cast("dict[str, Any]", document)

    def job(self) -> AgentRLJob:
        """The job this run was started with.

        Raises:
            UserInputError: The folder holds none.
        """
        document = self.read_json("job.json")
        if document is None:
            raise UserInputError(f"{self.path} holds no run: job.json is missing")
        return parse_job(document)

    @property
    def manifest_dir(self) -> Path:
        """The folder of the manifest it was started from; relative addresses of the job start there."""
        return Path((self.read_json("origin.json") or {}).get("manifest_dir", self.path))

    def succeeded(self) -> bool:
        summary = self.read_json("summary.json")
        return summary is not None and summary.get("status") == "succeeded"

    def lock(self) -> int | None:
        """Takes the run; None if another runner holds it. The lock ends with the process, however that ends.

        Raises:
            UserInputError: The folder cannot be made or written.
        """
        with _making(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            return self._flock()

    def _flock(self) -> int | None:
        handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        return handle

    def runner_pid(self) -> int | None:
        """The pid of the runner that is alive now, or None."""
        try:
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(handle, 32).decode()
            return int(text) if text.isdigit() else None
        finally:
            os.close(handle)
        return None


def identity(job: AgentRLJob) -> dict[str, Any]:
    """The parts of a job that a resumed run must share."""
    spec: Mapping[str, Any] = job.model_dump(by_alias=True, mode="json")["spec"]
    return {part: spec.get(part) for part in IDENTITY}


def runs_of(root: Path, name: str) -> list[RunDir]:
    """The runs of a job, oldest first."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    found = [(int(match[1]), path) for path in root.glob(f"{name}-*") if (match := pattern.fullmatch(path.name))]
    return [RunDir(path) for _, path in sorted(found)]


def latest_run(root: Path) -> RunDir | None:
    """The run that was written to last."""
    runs = [path.parent for path in root.glob("*/job.json")]
    return RunDir(max(runs, key=lambda path: path.stat().st_mtime)) if runs else None


def find_run(root: Path, run_id: str | None) -> RunDir:
    """The run with an id, or the latest.

    Raises:
        UserInputError: There is none.
    """
    if run_id is None:
        latest = latest_run(root)
        if latest is None:
            raise UserInputError(
                f"no run lies in {root}; start one with `kestrl run JOB.yaml`, or name another folder with --runs"
            )
        return latest
    if not (root / run_id / "job.json").is_file():
        known = ", ".join(sorted(path.parent.name for path in root.glob("*/job.json"))) or "none"
        raise UserInputError(f"no run {run_id!r} in {root} (there are: {known})")
    return RunDir(root / run_id)


def open_run(root: Path, job: AgentRLJob, *, new: bool) -> tuple[RunDir, bool]:
    """The folder to run in, and whether it resumes an earlier run: the newest run of the job, if unfinished and the same job.

    Nothing is written: a run that another runner holds stays as it is until `lock` has said so.

    Raises:
        UserInputError: The record of the earlier run is damaged.
    """
    runs = runs_of(root.resolve(), job.metadata.name)
    if runs and not new:
        last = runs[-1]
        if not (last.path / "job.json").exists():  # it was cut off before it began
            return last, False
        if not last.succeeded() and identity(last.job()) == identity(job):
            return last, True
    number = int(runs[-1].id.rpartition("-")[2]) + 1 if runs else 1
    return RunDir((root / f"{job.metadata.name}-{number}").resolve()), False


@contextmanager
def _making(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UserInputError(f"{path}: cannot be made: {error.strerror}; choose another folder with --runs") from error


def make_folders(run: RunDir, job: AgentRLJob, manifest_dir: Path) -> None:
    """Makes a run's folders and records what it runs. Only the holder of the run's lock may call this.

    Raises:
        UserInputError: The folder cannot be made or written.
    """
    with _making(run.path):
        for part in ("logs", "settings", "work"):
            (run.path / part).mkdir(parents=True, exist_ok=True)
        write_atomic(run.path / "job.json", job.model_dump_json(by_alias=True, indent=2))
        write_atomic(run.path / "origin.json", json.dumps({"manifest_dir": str(manifest_dir.resolve())}))
