"""The folder of a run: name, lock and layout.

```
runs/<job>-<n>/
    job.json       the manifest as it runs      run.json      state seen by the runner, rewritten on changes
    settings/      one file per component       logs/         one file per component, bounded
    adapters/ checkpoints/ episodes/ metrics/   ledger.db     summary.json
    lock           locked (flock) by the runner while it lives, so the kernel knows whether a run is alive
```
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from kestrl._app.engines.interpreter import ENGINE_FOLDER, write_engine_folder
from kestrl._app.local.files import write_atomic
from kestrl._app.local.runner_record import RunnerRecord
from kestrl._shared.spec import AgentRLJob, parse_job
from kestrl.errors import StorageError, UserInputError
from kestrl.runstate.states import RunPhase
from kestrl.runstate.versioned import Versioned
from kestrl.storage import ObjectStore
from kestrl.storage.layout import SUMMARY
from kestrl.storage.summary import RunSummary

RECORD = "run.json"
ENGINES = "engines.json"
"""File that lists the engines of a run while it goes on."""
Content = TypeVar("Content", bound=Versioned)
IDENTITY = ("model", "data", "agent", "tools", "rewards", "sampling", "evaluation", "algorithm")
"""Parts of the spec that identify a run: it is resumed only if they are unchanged."""


def cache_folder(runs: Path) -> Path:
    """Folder beside the runs for generated and fetched data, and estimates of the learner's memory."""
    return runs.resolve() / ".data"


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def summary_path(self) -> Path:
        return self.path / SUMMARY

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Reads a JSON file of the run; None if it does not exist yet.

        Raises:
            UserInputError: The file is not a JSON object because it was truncated or edited.
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
                f"{path} is damaged: it is not a JSON object; restore it, or start a new run with --new"
            )
        return cast("dict[str, Any]", document)

    def _read(self, kind: type[Content], name: str) -> Content | None:
        document = self.read_json(name)
        if document is None:
            return None
        source = str(self.path / name)
        try:
            return kind.from_json(document, source)
        except ValidationError as error:
            raise UserInputError(f"{source} is damaged: {error}; restore it, or start a new run with --new") from error

    def record(self) -> RunnerRecord | None:
        """What the runner has observed; None before it started.

        Raises:
            UserInputError: The file is damaged, or of a later version of KestRL.
        """
        return self._read(RunnerRecord, RECORD)

    def summary(self) -> RunSummary | None:
        """How the run ended; None if it has not ended.

        Raises:
            UserInputError: The file is damaged, or of a later version of KestRL.
        """
        return self._read(RunSummary, SUMMARY)

    def copy_summary(self, store: ObjectStore) -> RunSummary | None:
        """Summary of the run, copied from its storage to its folder; None if there is none.

        Raises:
            StorageError: The store refused.
            UserInputError: The file is damaged, or of a later version of KestRL.
        """
        try:
            content = store.get(SUMMARY)
        except StorageError as error:
            if error.code != "not_found":
                raise
            return None
        if not self.summary_path.exists() or self.summary_path.read_bytes() != content:
            write_atomic(self.summary_path, content.decode())
        return self.summary()

    def job(self) -> AgentRLJob:
        """Job of this run.

        Raises:
            UserInputError: The folder has no job.
        """
        document = self.read_json("job.json")
        if document is None:
            raise UserInputError(f"{self.path} holds no run: job.json is missing")
        return parse_job(document)

    @property
    def manifest_dir(self) -> Path:
        """Folder of the manifest, the base of relative paths in the job."""
        return Path((self.read_json("origin.json") or {}).get("manifest_dir", self.path))

    def succeeded(self) -> bool:
        summary = self.summary()
        return summary is not None and summary.status is RunPhase.SUCCEEDED

    def lock(self) -> int | None:
        """Locks the run; None if another runner holds the lock. The kernel releases it when the process ends.

        Raises:
            UserInputError: The folder cannot be created or written.
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
        """Pid of the live runner, or None."""
        try:
            handle = os.open(self.path / "lock", os.O_RDONLY | os.O_CLOEXEC)  # a reader may have no right to write
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.read(handle, 32).decode()
            return int(text) if text.isdigit() else None
        finally:
            os.close(handle)
        return None


def identity(job: AgentRLJob) -> dict[str, Any]:
    """Parts of a job that must be unchanged to resume a run."""
    spec: Mapping[str, Any] = job.model_dump(by_alias=True, mode="json")["spec"]
    return {part: spec.get(part) for part in IDENTITY}


def runs_of(root: Path, name: str) -> list[RunDir]:
    """The runs of a job, oldest first."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    numbered_paths = [
        (int(match[1]), path) for path in root.glob(f"{name}-*") if (match := pattern.fullmatch(path.name))
    ]
    return [RunDir(path) for _, path in sorted(numbered_paths)]


def latest_run(root: Path) -> RunDir | None:
    """The most recently written run."""
    runs = [path.parent for path in root.glob("*/job.json")]
    return RunDir(max(runs, key=lambda path: path.stat().st_mtime)) if runs else None


def find_run(root: Path, run_id: str | None) -> RunDir:
    """Finds a run by id, or the latest run.

    Raises:
        UserInputError: There is no such run.
    """
    if run_id is None:
        latest = latest_run(root)
        if latest is None:
            raise UserInputError(
                f"there is no run in {root}; start one with `kestrl run JOB.yaml`, or name another folder with --runs"
            )
        return latest
    if not (root / run_id / "job.json").is_file():
        run_ids = ", ".join(sorted(path.parent.name for path in root.glob("*/job.json"))) or "none"
        raise UserInputError(f"no run {run_id!r} in {root} (there are: {run_ids})")
    return RunDir(root / run_id)


def open_run(root: Path, job: AgentRLJob, *, new: bool) -> tuple[RunDir, bool]:
    """Selects the folder to run in, and whether to resume: the newest run of the job is resumed if it is unfinished and
    unchanged.

    Writes nothing, since another runner may hold the run's lock.

    Raises:
        UserInputError: A file of the earlier run is damaged.
    """
    runs = runs_of(root.resolve(), job.metadata.name)
    if runs and not new:
        last = runs[-1]
        if not (last.path / "job.json").exists():  # interrupted before it started
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


@contextmanager
def removed_if_refused(run: RunDir) -> Generator[ExitStack]:
    """Removes what a run that is refused before its start has made: its folder, and empty folders above it. Nothing is
    removed of a run that was there before, nor once the yielded stack is emptied by `pop_all`.
    """
    missing_folders = [path for path in (run.path, *run.path.parents) if not path.exists()]
    with ExitStack() as cleaning:
        if missing_folders:
            cleaning.callback(_remove, missing_folders)
        yield cleaning


def _remove(paths: Sequence[Path]) -> None:
    run, *parents = paths
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):  # another run is there, or generated data
        for path in parents:
            path.rmdir()


def make_folders(run: RunDir, job: AgentRLJob, manifest_dir: Path) -> None:
    """Creates the folders of a run and records its job. The caller must hold the lock of the run.

    Raises:
        UserInputError: The folder cannot be created or written.
    """
    with _making(run.path):
        for part in ("logs", "settings", "work"):
            (run.path / part).mkdir(parents=True, exist_ok=True)
        write_engine_folder(run.path / ENGINE_FOLDER)
        write_atomic(run.path / "job.json", job.model_dump_json(by_alias=True, indent=2))
        write_atomic(run.path / "origin.json", json.dumps({"manifest_dir": str(manifest_dir.resolve())}))
