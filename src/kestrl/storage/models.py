"""Models in storage, made by supervised fine-tuning of all parameters: folders of Hugging Face's form with a manifest.

`config.json` is uploaded after the other files of the model, and the manifest last, so that an incomplete folder is
neither a model nor published.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict

from kestrl.episode import PolicyVersion
from kestrl.storage.files import digest, fetch_files, read_document
from kestrl.storage.layout import MANIFEST, MODELS, model_folder
from kestrl.storage.objects import ObjectStore
from kestrl.storage.pinned import write_object

CONFIG = "config.json"
WEIGHTS = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ggml", ".onnx", ".onnx_data", ".h5", ".msgpack", ".npz"}
)
"""Suffixes of files with weights, in any of the forms that a repository may have them in."""


class ModelManifest(BaseModel):
    """Manifest of a model, written after all of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    job: str
    step: int
    sha256: str
    """Digest of the names and digests of the files."""
    files: dict[str, str]
    """SHA-256 of every file, by name."""
    base_model: str
    """Folder or Hugging Face id of the model that training began with."""
    schema_version: int = 1

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(job=self.job, step=self.step, sha256=self.sha256)


def digest_of(files: dict[str, str]) -> str:
    """Digest of the names and digests of files, in the form of `sha256sum`."""
    return digest("".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode())


def model_folders(store: ObjectStore) -> list[str]:
    """Folders of the published models of a run, oldest first."""
    return [path.removesuffix(f"/{MANIFEST}") for path in store.list(MODELS) if path.endswith(f"/{MANIFEST}")]


def publish_model(store: ObjectStore, folder: Path, *, job: str, step: int, base: str) -> tuple[ModelManifest, str]:
    """Uploads the files of a folder, then their manifest; returns it and the address. Publishing the same files again
    is not an error.

    Args:
        store: The run's storage.
        folder: A model's files, without folders in it.
        job: Name of the run.
        step: Steps done.
        base: Folder or Hugging Face id of the model that training began with.

    Raises:
        StorageError: The store refused.
    """
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == CONFIG, name))
    files = {name: digest((folder / name).read_bytes()) for name in names}
    manifest = ModelManifest(job=job, step=step, sha256=digest_of(files), files=files, base_model=base)
    target = model_folder(manifest.policy)
    for name in names:
        store.put(f"{target}/{name}", (folder / name).read_bytes())
    store.put(f"{target}/{MANIFEST}", manifest.model_dump_json().encode())
    return manifest, store.address(target)


def read_model_manifest(store: ObjectStore, folder: str = "") -> ModelManifest:
    """Reads a model's manifest.

    Raises:
        StorageError: It is missing (the model was not completely published) or malformed.
    """
    return read_document(store, ModelManifest, MANIFEST, folder)


def is_published(store: ObjectStore) -> bool:
    """Whether an address has the manifest of a model; other folders of models may have a manifest.json of their own."""
    if not store.exists(MANIFEST):
        return False
    try:
        manifest: Any = json.loads(store.get(MANIFEST))
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.keys() >= {"base_model", "files", "sha256"}


def is_weights(name: str) -> bool:
    """Whether a file of a model has its weights, which are nearly all of its bytes."""
    return PurePosixPath(name).suffix in WEIGHTS


def fetch_model(store: ObjectStore, target: Path, folder: str = "", *, weights: bool = True) -> ModelManifest:
    """Downloads a published model into a new local folder and verifies every digest; the folder appears only when
    complete.

    Args:
        store: The storage.
        target: The local folder.
        folder: Of the model in the storage.
        weights: Whether its weights are downloaded, too.

    Raises:
        StorageError: A file is missing or a digest differs (code `digest_mismatch`).
    """
    manifest = read_model_manifest(store, folder)
    files = {name: sha256 for name, sha256 in manifest.files.items() if weights or not is_weights(name)}
    fetch_files(store, files, target, folder, download=write_object)
    return manifest
