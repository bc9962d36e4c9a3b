"""Files that tools read, on one machine: local ones where they are, others downloaded once and kept by digest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from kestrl._app.interpreters.places import data_folder
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.job import DataFile
from kestrl._shared.spec.scalars import OBJECT_SCHEMES, PinnedFile
from kestrl.errors import UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.pinned import Download, digest_of, fetch, fetch_object
from kestrl.storage.uris import local_path, scheme_of

VARIABLE = "KESTRL_FILES"
DIGEST = "#sha256="


def present_files(job: AgentRLJob, base: Path) -> Mapping[str, str]:
    """Paths of the files that are on this machine, by uri.

    Raises:
        UserInputError: A local file does not exist, or has another digest.
    """
    paths = {file.uri: _path(file, base, field) for file, field in _listed(job)}
    return {uri: str(path) for uri, path in paths.items() if path.is_file()}


def fetched_files(
    job: AgentRLJob, base: Path, opened: Callable[[str], ObjectStore], say: Callable[[str], None]
) -> Mapping[str, str]:
    """Paths of all files by uri, downloaded where they are not here yet.

    Args:
        job: The job.
        base: The manifest's folder.
        opened: Opens the store at an address.
        say: Takes lines on how far a download is.

    Raises:
        UserInputError: A file does not exist, is larger than the manifest states, or has another digest.
        StorageError: It cannot be read, or is not here in time.
    """
    for file, field in _listed(job):
        pinned = PinnedFile.read(file.uri)
        if pinned is not None:
            bounds = Download(field, file.most_bytes, file.timeout)
            fetch(*pinned, _path(file, base, field), bounds, opened=opened, say=say)
    return present_files(job, base)


def with_fetched_data(job: AgentRLJob, cache_dir: Path, opened: Callable[[str], ObjectStore]) -> AgentRLJob:
    """The job with its data sets of object stores downloaded into a folder, as the learner's pod does on a cluster.

    Raises:
        StorageError: One does not exist, or cannot be read.
    """
    data = job.spec.data
    changed = {
        name: data_set.model_copy(update={"uri": _fetched_data(data_set.uri, cache_dir, opened)})
        for name, data_set in (("train", data.train), ("validation", data.validation))
        if data_set is not None and scheme_of(data_set.uri) in OBJECT_SCHEMES
    }
    spec = job.spec.model_copy(update={"data": data.model_copy(update=changed)})
    return job.model_copy(update={"spec": spec}) if changed else job


def _fetched_data(uri: str, cache_dir: Path, opened: Callable[[str], ObjectStore]) -> str:
    target = cache_dir / "downloaded" / uri.replace("://", "/")
    fetch_object(uri, target, opened=opened)
    return str(target)


def _listed(job: AgentRLJob) -> list[tuple[DataFile, str]]:
    return [(file, f"spec.data.files[{index}]") for index, file in enumerate(job.spec.data.files)]


def _path(file: DataFile, base: Path, field: str) -> Path:
    """Path of a file, which exists if it is a local one."""
    pinned = PinnedFile.read(file.uri)
    if pinned is not None:
        return Path(pinned.place(str(data_folder("files", VARIABLE))))
    address, _, digest = file.uri.partition(DIGEST)
    path = (base / local_path(address)).resolve()
    if not path.is_file():
        raise UserInputError(f"{field}.uri: {path} does not exist")
    if digest and digest != (content := digest_of(path)):
        raise UserInputError(f"{field}.uri: {path} has the sha256 {content}, and the manifest says {digest}")
    return path
