"""Adapters in storage: published files first, manifest last; read only through the manifest (design.md, invariant 4)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kestrl.episode import PolicyVersion
from kestrl.errors import StorageError
from kestrl.storage.objects import ObjectStore

MANIFEST = "manifest.json"
WEIGHTS = "adapter_model.safetensors"
PIECE_BYTES = 1024 * 1024
"""Written at once: ext4 of Linux 6.18 takes 7 ms for 20 MB in pieces of this size, and 57 ms where they come whole."""


def largest_gap(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest |ours - theirs| over a probe, in nats."""
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0.0)


class Probe(BaseModel):
    """A fixed sequence with the learner's log-probabilities: what an engine must reproduce to prove that it serves the version."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log-prob of token i+1 given the tokens up to i, at temperature 1, under this version: len(token_ids) - 1."""
    base_logprobs: tuple[float, ...]
    """The same under the base model: an engine that answers these has not applied the adapter."""

    def apart(self, other: Probe) -> float | None:
        """Largest difference of two versions' log-probs, in nats: where it is below an engine's bound, its proof cannot tell them apart.

        None where their sequences differ, as those of a run that is resumed by another version of KestRL may.
        """
        return largest_gap(self.logprobs, other.logprobs) if self.token_ids == other.token_ids else None


class AdapterManifest(BaseModel):
    """What readers trust."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    job: str
    step: int
    sha256: str
    """Digest of `adapter_model.safetensors`."""
    files: dict[str, str]
    """Every file's SHA-256, by name."""
    base_model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    parent: str | None
    """`PolicyVersion.name` of the version it was trained from."""
    probe: Probe
    schema_version: int = 1

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(job=self.job, step=self.step, sha256=self.sha256)


def adapter_folder(policy: PolicyVersion) -> str:
    """The folder of a version beneath a run's storage: never used twice, since it names the bytes."""
    return f"adapters/{policy.step:06d}-{policy.sha256[:12]}"


def digest(content: bytes | memoryview) -> str:
    return hashlib.sha256(content).hexdigest()


def publish_adapter(store: ObjectStore, files: Mapping[str, bytes], manifest: AdapterManifest) -> str:
    """Uploads the files, then the manifest, and returns the folder's address. Publishing the same bytes again is no error.

    The manifest is written only where there is none: of two learners that publish different files as one version, one fails.

    Raises:
        StorageError: The store refused, the manifest does not describe the files, or the version exists with others (code `exists`).
    """
    if {name: digest(content) for name, content in files.items()} != manifest.files:
        raise StorageError(f"manifest of {manifest.policy.name} does not describe its files", code="digest_mismatch")
    folder = adapter_folder(manifest.policy)
    for name, content in files.items():
        store.put(f"{folder}/{name}", content)
    try:
        store.put(f"{folder}/{MANIFEST}", manifest.model_dump_json().encode(), create=True)
    except StorageError as error:
        # A resumed run publishes its newest version again; and a write whose answer was lost is found done when asked again.
        if error.code != "exists" or read_manifest(store, folder).files != manifest.files:
            raise
    return store.address(folder)


def read_manifest(store: ObjectStore, folder: str = "") -> AdapterManifest:
    """Reads a version's manifest.

    Raises:
        StorageError: Missing (the version was never published whole) or malformed.
    """
    path = f"{folder}/{MANIFEST}" if folder else MANIFEST
    content = store.get(path)
    try:
        return AdapterManifest.model_validate_json(content)
    except ValueError as error:
        raise StorageError(f"{store.address(path)} is not a manifest: {error}", code="manifest_malformed") from error


def fetch_adapter(store: ObjectStore, target: Path, folder: str = "") -> AdapterManifest:
    """Downloads a version into a new local folder, every digest checked, nothing visible there until all is well.

    Raises:
        StorageError: Something is missing or a digest differs (code `digest_mismatch`).
    """
    manifest = read_manifest(store, folder)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name, expected in manifest.files.items():
        if Path(name).name != name:
            raise StorageError(f"manifest names a file outside its folder: {name!r}", code="manifest_malformed")
        if _download(store, f"{folder}/{name}" if folder else name, partial / name) != expected:
            raise StorageError(
                f"{store.address(folder)}/{name} is corrupt: its digest is not the manifest's", code="digest_mismatch"
            )
    if not target.exists():
        partial.rename(target)
    return manifest


def _download(store: ObjectStore, path: str, target: Path) -> str:
    """Copies an object into a file and returns its digest."""
    content = store.view(path)
    if len(content) <= PIECE_BYTES:
        _write(target, content)
        return digest(content)
    with ThreadPoolExecutor(1) as writer:
        # Written while the digest is taken: both let go of the interpreter. A small one takes less time than a thread does to start.
        written = writer.submit(_write, target, content)
        taken = digest(content)
        written.result()
    return taken


def _write(target: Path, content: memoryview) -> None:
    with target.open("wb", buffering=0) as file:
        while content:
            content = content[file.write(content[:PIECE_BYTES]) :]
