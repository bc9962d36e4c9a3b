"""`python -m kestrl.prepare --settings FILE`: what a pod needs before its program starts, put where every pod of the job has it.

Model, data and chat template come from wherever the manifest says and lie at the same paths in every pod, so that rows which name
files by their path mean the same everywhere. Generated data is generated in each pod: the same seed gives the same bytes.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from kestrl.data import locate_data
from kestrl.data.locate import locate_model
from kestrl.errors import StorageError, UserInputError
from kestrl.plan.settings import Model, read_settings
from kestrl.service import exit_code, settings_path
from kestrl.storage import open_store
from kestrl.uris import local_path, scheme_of

OBJECT_SCHEMES = frozenset({"s3", "gs", "az"})


class DataSource(Model):
    """One data set."""

    uri: str
    size: int | None
    target: str
    field: str
    """Of the manifest, for messages."""


class PrepareSettings(Model):
    """What a pod of a role needs."""

    model: str | None = None
    """`model.base` of the manifest."""
    model_target: str = ""
    data: tuple[DataSource, ...] = ()
    data_dir: str = ""
    """Where generated data goes, and the databases that its rows name."""
    seed: int = 0
    template: str | None = None
    template_target: str = ""
    volumes: str = "/kestrl/pvc"
    """Where claims are mounted that `pvc://CLAIM/PATH` names."""


def prepare(settings: PrepareSettings) -> None:
    """Puts everything in place; what lies there already, whole, is kept.

    Raises:
        UserInputError: Something that the manifest names is not there.
        StorageError: A store did not give it.
    """
    if settings.model is not None:
        put_model(settings.model, Path(settings.model_target), Path(settings.volumes))
    for source in settings.data:
        put_data(source, settings)
    if settings.template is not None:
        put_file(settings.template, Path(settings.template_target), Path(settings.volumes), "spec.agent.template.uri")


def put_model(uri: str, target: Path, volumes: Path) -> None:
    """A model's folder."""
    scheme, parsed = scheme_of(uri), urlparse(uri)
    if scheme in OBJECT_SCHEMES:
        _download_folder(uri, target)
    elif scheme == "hf":
        _download_hub(f"{parsed.netloc}{parsed.path}", target)
    elif scheme == "demo":
        _copy(Path(locate_model(uri, base=Path("/"))), target)
    else:
        found = _in_volume(uri, volumes, "spec.model.base") or Path(locate_model(uri, base=Path("/")))
        _link(found, target)
    if not (target / "config.json").is_file():
        raise UserInputError(f"spec.model.base: {uri} holds no model: config.json is missing")


def put_data(source: DataSource, settings: PrepareSettings) -> None:
    """A data set's file."""
    target = Path(source.target)
    if scheme_of(source.uri) != "demo":
        put_file(source.uri, target, Path(settings.volumes), source.field)
        return
    made = locate_data(
        source.uri,
        size=source.size,
        base=Path("/"),
        seed=settings.seed,
        cache_dir=Path(settings.data_dir),
        field=source.field,
    )
    _link(made, target)


def put_file(uri: str, target: Path, volumes: Path, field: str) -> None:
    """A single file."""
    scheme = scheme_of(uri)
    if scheme in OBJECT_SCHEMES:
        _download_file(uri, target)
        return
    found = _in_volume(uri, volumes, field)
    if found is None and scheme != "file":
        raise UserInputError(
            f"{field}: {uri!r} is a path on the machine that applied the manifest; on a cluster name s3://..., pvc://CLAIM/PATH or demo://..."
        )
    source = local_path(uri) if found is None else found
    if not source.is_file():
        raise UserInputError(f"{field}: {source} does not exist in the pod")
    _link(source, target)


def _in_volume(uri: str, volumes: Path, field: str) -> Path | None:
    """Where `pvc://CLAIM/PATH` is mounted; None for another address.

    Raises:
        UserInputError: It leads out of its claim.
    """
    if scheme_of(uri) != "pvc":
        return None
    parsed = urlparse(uri)
    claim = (volumes / parsed.netloc).resolve()
    found = (claim / parsed.path.lstrip("/")).resolve()
    if not found.is_relative_to(claim):
        raise UserInputError(f"{field}: {uri} leads out of its claim")
    if not found.exists():
        raise UserInputError(f"{field}: {uri} does not exist in its claim")
    return found


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.is_symlink():
        target.unlink()
    target.symlink_to(source.resolve())


def _copy(source: Path, target: Path) -> None:
    """A folder of this image, for containers of the pod that run another one."""
    if target.exists():
        return
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.replace(target)


def _download_file(uri: str, target: Path) -> None:
    folder, _, name = uri.rpartition("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    partial.write_bytes(open_store(folder).get(name))
    partial.replace(target)


def _download_folder(uri: str, target: Path) -> None:
    """All objects beneath an address, whole or not at all."""
    if target.exists():
        return
    store, partial = open_store(uri), target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    paths = store.list("")
    if not paths:
        raise StorageError(f"{uri} holds no objects", code="not_found")
    for path in paths:
        if not (partial / path).resolve().is_relative_to(partial.resolve()):
            raise StorageError(f"{uri} holds an object whose name leads out of it: {path!r}", code="unsafe_path")
        (partial / path).parent.mkdir(parents=True, exist_ok=True)
        (partial / path).write_bytes(store.get(path))
    partial.replace(target)


def _download_hub(name: str, target: Path) -> None:
    """A repository of a Hugging Face hub (HF_ENDPOINT and HF_TOKEN hold as everywhere)."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise UserInputError(f"spec.model.base: hf://{name} needs huggingface_hub in this image") from error
    errors: Any = importlib.import_module("huggingface_hub.errors")
    try:
        hub.snapshot_download(name, local_dir=str(target))
    except errors.RepositoryNotFoundError as error:
        raise UserInputError(f"spec.model.base: hf://{name} is not there, or not for this HF_TOKEN") from error
    except (OSError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        raise StorageError(f"hf://{name} could not be fetched: {error}", retryable=True) from error


if __name__ == "__main__":
    sys.exit(exit_code(lambda: prepare(read_settings(PrepareSettings, settings_path()))))
