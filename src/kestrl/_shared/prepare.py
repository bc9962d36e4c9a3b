"""`python -m kestrl._shared.prepare --settings FILE`: init container that puts model, data and template into a pod.

Model, data and chat template have the same paths in every pod, so that rows can reference files by path. Generated data
is generated in each pod: the same seed gives the same bytes.
"""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from kestrl._shared.environments import package_folder
from kestrl._shared.plan.settings.common import SettingsModel, read_settings
from kestrl._shared.service import exit_code, settings_path
from kestrl._shared.spec.scalars import OBJECT_SCHEMES
from kestrl.data import locate_data
from kestrl.data.locate import locate_model
from kestrl.errors import StorageError, UserInputError, place_error
from kestrl.storage import open_store
from kestrl.storage.model_cache import exclusive, shared_folder, stored_name
from kestrl.storage.models import WEIGHTS, fetch_model, is_published, is_weights
from kestrl.storage.objects import ObjectStore
from kestrl.storage.pinned import Download, fetch, fetch_object, write_object
from kestrl.storage.uris import local_path, scheme_of

LOOK_SECONDS = 1.0
"""Seconds between two looks for a file that another pod brings: a network's file system reports no change."""
STORED, HUB = "stored", "hub"
"""Folders of a cache of models: those from object storage, and those from a hub, in the form of its client."""
REACHED = OBJECT_SCHEMES | {"pvc", "demo", "file"}
"""Schemes of files that pods can reach; `file` is of the image."""


class DataSource(SettingsModel):
    """A data set."""

    uri: str
    size: int | None
    target: str
    field: str
    """Manifest field, for messages."""


class FileSource(SettingsModel):
    """A file that tools read."""

    address: str
    digest: str
    target: str
    most_bytes: int
    seconds: float
    field: str
    """Manifest field, for messages."""


class PrepareSettings(SettingsModel):
    """Inputs of a pod."""

    files: tuple[FileSource, ...] = ()
    """Files for the volume that tools mount."""
    fetches: bool = False
    """Whether this pod downloads them; others wait until they are there."""

    model: str | None = None
    """`model.base` of the manifest."""
    model_target: str = ""
    model_weights: bool = True
    """Whether its weights are downloaded, too, which are nearly all of its bytes. What is linked or copied from this
    machine has them in any case."""
    model_cache: str = ""
    """Folder that pods share, where a model with its weights is kept once one of them has downloaded it."""
    data: tuple[DataSource, ...] = ()
    data_dir: str = ""
    """Folder for generated data and the databases that its rows reference."""
    seed: int = 0
    template: str | None = None
    template_target: str = ""
    template_field: str = "spec.agent.template.uri"
    """Manifest field of the template, for messages."""
    packages: tuple[str, ...] = ()
    """Packages of this image that a container of the pod with another image runs."""
    packages_target: str = ""
    """Folder for them."""
    volumes: str = "/kestrl/pvc"
    """Mount path of each claim, for `pvc://CLAIM/PATH`."""


def prepare(settings: PrepareSettings) -> None:
    """Puts all files in place; complete existing ones are kept.

    Raises:
        UserInputError: Something that the manifest references does not exist.
        StorageError: A download failed.
    """
    if settings.model is not None:
        put_model(settings.model, settings)
    for file in settings.files:
        (fetch_file if settings.fetches else await_file)(file)
    for source in settings.data:
        put_data(source, settings)
    if settings.template is not None:
        put_file(settings.template, Path(settings.template_target), Path(settings.volumes), settings.template_field)
    for name in settings.packages:
        _copy(package_folder(name), Path(settings.packages_target) / name)


def fetch_file(file: FileSource) -> None:
    """Downloads a file that tools read; one that is there is kept.

    Raises:
        UserInputError: It is larger than the manifest states, has another digest, or does not fit into the volume.
        StorageError: It cannot be read, or is not there in time.
    """
    bounds = Download(file.field, file.most_bytes, file.seconds)
    try:
        fetch(file.address, file.digest, Path(file.target), bounds, opened=open_store, say=say)
    except OSError as error:
        unusable = place_error(error, file.target)
        if unusable is None:
            raise
        raise UserInputError(f"{file.field}.size: {unusable}; raise it, which the volume is sized by") from error


def await_file(file: FileSource) -> None:
    """Waits until another pod has put a file into the volume of both.

    Raises:
        StorageError: It is not there in time.
    """
    target, until = Path(file.target), time.monotonic() + file.seconds
    say(f"waiting for {file.address}, which the pod of the role files downloads")
    while not target.is_file():
        if time.monotonic() > until:
            raise StorageError(
                f"{file.address} was not there within {file.seconds:g} s; see the pod of the role files", retryable=True
            )
        time.sleep(LOOK_SECONDS)


def say(line: str) -> None:
    """Prints a line to the pod's log."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def put_model(uri: str, settings: PrepareSettings) -> None:
    """Puts the folder of a model in place: downloaded with or without its weights, copied, or a link to where it is."""
    target, weights, volumes = Path(settings.model_target), settings.model_weights, Path(settings.volumes)
    cache = Path(settings.model_cache) if settings.model_cache and weights else None
    scheme, parsed = scheme_of(uri), urlparse(uri)
    if scheme in OBJECT_SCHEMES:
        _download_folder(uri, target, weights=weights, cache=cache)
    elif scheme == "hf":
        _download_hub(f"{parsed.netloc}{parsed.path}", target, weights=weights, cache=cache)
    elif scheme == "demo":
        _copy(Path(locate_model(uri, base=Path("/"))), target)
    else:
        folder = _in_volume(uri, volumes, "spec.model.base") or Path(locate_model(uri, base=Path("/")))
        _link(folder, target)
    if not (target / "config.json").is_file():
        raise UserInputError(f"spec.model.base: {uri} holds no model: config.json is missing")


def put_data(source: DataSource, settings: PrepareSettings) -> None:
    """Puts the file of a data set in place."""
    target = Path(source.target)
    if scheme_of(source.uri) != "demo":
        put_file(source.uri, target, Path(settings.volumes), source.field)
        return
    data_file = locate_data(
        source.uri,
        size=source.size,
        base=Path("/"),
        seed=settings.seed,
        cache_dir=Path(settings.data_dir),
        field=source.field,
    )
    _link(data_file, target)


def check_reach(uri: str, field: str) -> None:
    """Checks by the address alone that pods can reach a file.

    Raises:
        UserInputError: It is a path of the machine that the manifest was written on.
    """
    if scheme_of(uri) not in REACHED:
        raise UserInputError(
            f"{field}: {uri!r} is a local path, which does not exist on a cluster; use s3://..., pvc://CLAIM/PATH or "
            "demo://..."
        )


def check_model(uri: str) -> None:
    """Checks by the address alone that pods can reach a model. An absolute path may be one of their image.

    Raises:
        UserInputError: It is a path of the machine that the manifest was written on.
    """
    if not scheme_of(uri) and not uri.startswith("/"):
        raise UserInputError(
            f"spec.model.base: {uri!r} is a local path, which does not exist on a cluster; use hf://ORG/NAME, "
            "s3://..., pvc://CLAIM/PATH or demo://NAME"
        )


def check_addresses(settings: PrepareSettings) -> None:
    """Checks by their addresses alone that pods can reach model, data and template.

    Raises:
        UserInputError: A path of the machine that the manifest was written on; the message names the field.
    """
    if settings.model is not None:
        check_model(settings.model)
    for source in settings.data:
        check_reach(source.uri, source.field)
    if settings.template is not None:
        check_reach(settings.template, settings.template_field)


def put_file(uri: str, target: Path, volumes: Path, field: str) -> None:
    """Puts a single file in place."""
    scheme = scheme_of(uri)
    if scheme in OBJECT_SCHEMES:
        fetch_object(uri, target, opened=open_store)
        return
    check_reach(uri, field)
    volume_path = _in_volume(uri, volumes, field)
    source = local_path(uri) if volume_path is None else volume_path
    if not source.is_file():
        raise UserInputError(f"{field}: {source} does not exist in the pod")
    _link(source, target)


def _in_volume(uri: str, volumes: Path, field: str) -> Path | None:
    """Mounted path of `pvc://CLAIM/PATH`; None for other addresses.

    Raises:
        UserInputError: The path leads out of its claim.
    """
    if scheme_of(uri) != "pvc":
        return None
    parsed = urlparse(uri)
    claim = (volumes / parsed.netloc).resolve()
    path = (claim / parsed.path.lstrip("/")).resolve()
    if not path.is_relative_to(claim):
        raise UserInputError(f"{field}: {uri} leads out of its claim")
    if not path.exists():
        raise UserInputError(f"{field}: {uri} does not exist in its claim")
    return path


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    target.symlink_to(source.resolve())


def _copy(source: Path, target: Path) -> None:
    """Copies a folder of this image, for containers of the pod with other images."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, ignore=shutil.ignore_patterns("__pycache__"))
    unfinished.replace(target)


def _download_folder(uri: str, target: Path, *, weights: bool, cache: Path | None) -> None:
    """Downloads the objects under an address, a part in memory at a time; the target appears only when complete. The
    files of a model that `kestrl sft` published must have their digests.
    """
    if target.exists():
        return
    store = open_store(uri)
    if cache is None:
        _download_objects(store, uri, target, weights=weights)
        return
    download = partial(_download_named, store, uri, name := stored_name(store, uri))
    _link(shared_folder(cache / STORED, name, download, say), target)


def _download_named(store: ObjectStore, uri: str, name: str, target: Path) -> None:
    """Downloads the content that has a name, whole."""
    _download_objects(store, uri, target, weights=True)
    if stored_name(store, uri) != name:
        shutil.rmtree(target)
        raise StorageError(f"{uri} was written again while it was downloaded", code="changed", retryable=True)


def _download_objects(store: ObjectStore, uri: str, target: Path, *, weights: bool) -> None:
    if is_published(store):
        fetch_model(store, target, weights=weights)
        return
    unfinished = target.with_name(f".{target.name.lstrip('.')}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    paths = store.list("")
    if not paths:
        raise StorageError(f"{uri} holds no objects", code="not_found")
    for path in (path for path in paths if weights or not is_weights(path)):
        if not (unfinished / path).resolve().is_relative_to(unfinished.resolve()):
            raise StorageError(
                f"{uri} contains an object whose name leads out of the folder: {path!r}", code="unsafe_path"
            )
        (unfinished / path).parent.mkdir(parents=True, exist_ok=True)
        write_object(store, path, unfinished / path)
    unfinished.replace(target)


def _download_hub(name: str, target: Path, *, weights: bool, cache: Path | None) -> None:
    """Downloads a repository of a Hugging Face hub (HF_ENDPOINT and HF_TOKEN apply)."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UserInputError(f"spec.model.base: hf://{name} needs huggingface_hub in this image") from error
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        if cache is None:
            ignored = None if weights else [f"*{suffix}" for suffix in sorted(WEIGHTS)]
            hub.snapshot_download(name, local_dir=str(target), ignore_patterns=ignored)
        else:
            _link(_shared_repository(hub, name, cache / HUB), target)
    except errors.RepositoryNotFoundError as error:
        raise UserInputError(f"spec.model.base: hf://{name} does not exist, or HF_TOKEN has no access to it") from error
    except (OSError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise StorageError(f"hf://{name} could not be fetched: {error}", retryable=True) from error


def _shared_repository(hub: Any, name: str, cache: Path) -> Path:
    """The folder of a repository's present revision in a cache of the hub's own form, which keeps complete files. It
    gives each download a name of its own, so that what a killed process has left is removed here.
    """
    folder = f"models--{name.replace('/', '--')}"
    with exclusive(cache, folder, say) as holds_lock:
        if holds_lock:
            for leftover in (cache / folder / "blobs").glob("*.incomplete"):
                leftover.unlink()
        return Path(hub.snapshot_download(name, cache_dir=str(cache)))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: prepare(read_settings(PrepareSettings, settings_path()))))
