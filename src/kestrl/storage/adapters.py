"""Adapters in storage: files are uploaded first, the manifest last; readers start from the manifest (design.md,
invariant 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from kestrl.episode import PolicyVersion
from kestrl.errors import StorageError
from kestrl.storage.files import digest, fetch_files, read_document
from kestrl.storage.layout import ADAPTERS, MANIFEST, adapter_folder
from kestrl.storage.objects import ObjectStore

WEIGHTS = "adapter_model.safetensors"


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest |ours - theirs| over a probe, in nats."""
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


class Probe(BaseModel):
    """A fixed sequence with the learner's log-probabilities, which an engine must reproduce to verify that it serves
    the version.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-prob of token i+1 given the tokens up to i, at temperature 1, under this version: len(token_ids) -
    1."""
    base_logprobs: tuple[float, ...]
    """The same under the base model; an engine with these log-probs has not applied the adapter."""

    def apart(self, other: Probe) -> float | None:
        """Largest log-prob difference of two versions in nats; below an engine's bound, its check cannot distinguish
        them.

        None if their sequences differ, as after an upgrade of KestRL.
        """
        return largest_gap(self.logprobs, other.logprobs) if self.token_ids == other.token_ids else None


class AdapterManifest(BaseModel):
    """Manifest of an adapter, written after all of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    job: str
    step: int
    sha256: str
    """Digest of `adapter_model.safetensors`."""
    files: dict[str, str]
    """SHA-256 of every file, by name."""
    base_model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    parent: str | None
    """`PolicyVersion.name` of the parent version."""
    probe: Probe
    schema_version: int = 1

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.step < 0 or self.rank < 1:
            raise ValueError(f"step {self.step} and rank {self.rank} are not those of an adapter")
        return self

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(job=self.job, step=self.step, sha256=self.sha256)


def adapter_folders(store: ObjectStore) -> list[str]:
    """Folders of the published versions of a run, oldest first."""
    return [path.removesuffix(f"/{MANIFEST}") for path in store.list(ADAPTERS) if path.endswith(f"/{MANIFEST}")]


def publish_adapter(store: ObjectStore, files: Mapping[str, bytes], manifest: AdapterManifest) -> str:
    """Uploads the files, then the manifest, and returns the folder's address. Publishing the same content again is not
    an error.

    The manifest is only written if it does not exist: if two learners publish different files as one version, one of
    them fails.

    Raises:
        StorageError: The store refused, the manifest does not match the files, or the version exists with other files
            (code `exists`).
    """
    if {name: digest(content) for name, content in files.items()} != manifest.files:
        raise StorageError(f"manifest of {manifest.policy.name} does not describe its files", code="digest_mismatch")
    folder = adapter_folder(manifest.policy)
    for name, content in files.items():
        store.put(f"{folder}/{name}", content)
    try:
        store.put(f"{folder}/{MANIFEST}", manifest.model_dump_json().encode(), create=True)
    except StorageError as error:
        # A resumed run publishes its newest version again, and a retried write may already have succeeded.
        if error.code != "exists" or read_manifest(store, folder).files != manifest.files:
            raise
    return store.address(folder)


def read_manifest(store: ObjectStore, folder: str = "") -> AdapterManifest:
    """Reads a version's manifest.

    Raises:
        StorageError: The manifest is missing (the version was not completely published) or malformed.
    """
    return read_document(store, AdapterManifest, MANIFEST, folder)


def fetch_adapter(store: ObjectStore, target: Path, folder: str = "") -> AdapterManifest:
    """Downloads a version into a new local folder and verifies every digest; the folder appears only when complete.

    Raises:
        StorageError: A file is missing or a digest differs (code `digest_mismatch`).
    """
    manifest = read_manifest(store, folder)
    fetch_files(store, manifest.files, target, folder)
    return manifest
