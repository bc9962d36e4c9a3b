"""Checkpoints in storage: the state first, the manifest last; read only through the manifest."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from kestrl.errors import PlaceError, StorageError
from kestrl.storage import ObjectStore, layout
from kestrl.storage.files import digest
from kestrl_learner.store.run_record import RunRecord

log = logging.getLogger(__name__)
WHOLE_BYTES = 8 * 1024 * 1024
"""A state up to this size is read back whole when it is confirmed; for a larger one only its existence is checked."""


class Unconfirmed(StorageError):
    """A checkpoint was written and cannot be read back. Earlier checkpoints are kept."""

    code = "checkpoint_unconfirmed"


class Manifest(NamedTuple):
    """Manifest of a checkpoint."""

    step: int
    sha256: str
    """Digest of the state, in hex."""
    size: int | None
    """Size of the state in bytes; None in manifests of older versions."""
    record: RunRecord

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "sha256": self.sha256, "size": self.size, "facts": self.record.to_json()}


class Checkpoint(NamedTuple):
    """A state to resume from."""

    step: int
    """Optimiser steps done: the trained frontier."""
    state: bytes
    record: RunRecord


def steps(store: ObjectStore) -> list[int]:
    """Steps of the whole checkpoints, oldest first."""
    return [step for path in store.list(layout.CHECKPOINTS) if (step := layout.checkpoint_step(path)) is not None]


def write(store: ObjectStore, checkpoint: Checkpoint, *, keep: int) -> None:
    """Writes a checkpoint, reads it back, and removes all but the newest `keep`.

    A manifest is removed before its state, so that a manifest never names a missing state.

    Raises:
        StorageError: The store refused.
        Unconfirmed: It was written and cannot be read back.
    """
    folder, sha256 = layout.checkpoint_folder(checkpoint.step), digest(checkpoint.state)
    paths = layout.checkpoint_manifest(checkpoint.step), layout.checkpoint_state(checkpoint.step, sha256)
    store.put(paths[1], checkpoint.state)
    manifest = Manifest(checkpoint.step, sha256, len(checkpoint.state), checkpoint.record)
    content = json.dumps(manifest.to_json()).encode()
    store.put(paths[0], content)
    _read_back(store, manifest, content)
    kept_folders = {layout.checkpoint_folder(step) for step in steps(store)[-keep:]}
    unneeded = [
        path
        for path in store.list(layout.CHECKPOINTS)
        if (path not in paths if path.startswith(f"{folder}/") else path.rpartition("/")[0] not in kept_folders)
    ]
    for path in sorted(unneeded, key=lambda path: layout.checkpoint_step(path) is None):
        store.delete(path)


def _read_back(store: ObjectStore, manifest: Manifest, content: bytes) -> None:
    path = layout.checkpoint_manifest(manifest.step)
    try:
        if store.get(path) != content:
            raise StorageError(f"{store.address(path)} holds other bytes", code="digest_mismatch")
        confirm(store, manifest)
    except (StorageError, PlaceError) as error:
        raise Unconfirmed(
            f"the checkpoint of step {manifest.step} was written and cannot be read back: {error}"
        ) from error


def _manifest(store: ObjectStore, step: int) -> Manifest:
    path = layout.checkpoint_manifest(step)
    try:
        fields = json.loads(store.get(path))
        record = RunRecord.from_json(fields["facts"], store.address(path))
        return Manifest(fields["step"], fields["sha256"], fields.get("size"), record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{store.address(path)} is not a manifest: {error}", code="manifest_malformed") from error


def newest_manifest(store: ObjectStore) -> Manifest | None:
    """The manifest of the newest whole checkpoint, or None.

    Raises:
        StorageError: The store refused, or it is malformed.
        UserInputError: It was written by a later version of KestRL.
    """
    checkpoint_steps = steps(store)
    return _manifest(store, checkpoint_steps[-1]) if checkpoint_steps else None


def confirm(store: ObjectStore, manifest: Manifest) -> None:
    """Checks that the state named by a manifest exists, and up to `WHOLE_BYTES` that it is intact.

    Raises:
        StorageError: It is missing (code `not_found`) or corrupt (code `digest_mismatch`).
    """
    path = layout.checkpoint_state(manifest.step, manifest.sha256)
    if manifest.size is not None and manifest.size <= WHOLE_BYTES:
        _whole(store, manifest)
    elif not store.exists(path):
        raise StorageError(f"{store.address(path)} does not exist", code="not_found")


def _whole(store: ObjectStore, manifest: Manifest) -> bytes:
    path = layout.checkpoint_state(manifest.step, manifest.sha256)
    state = store.get(path)
    if digest(state) != manifest.sha256:
        raise StorageError(
            f"{store.address(path)} is corrupt; delete {store.address(layout.checkpoint_folder(manifest.step))} "
            f"to resume from the checkpoint before it",
            code="digest_mismatch",
        )
    return state


def newest(store: ObjectStore, *, outdated: Callable[[Manifest], bool] = lambda _: False) -> Checkpoint | None:
    """The newest whole checkpoint, or None.

    Args:
        store: The run's storage.
        outdated: Whether a checkpoint belongs to an abandoned branch of the run; such a checkpoint is skipped.

    Raises:
        StorageError: It is corrupt: code `digest_mismatch`.
        UserInputError: It was written by a later version of KestRL.
    """
    for step in reversed(steps(store)):
        manifest = _manifest(store, step)
        if not outdated(manifest):
            return Checkpoint(step=manifest.step, state=_whole(store, manifest), record=manifest.record)
        log.warning("the checkpoint of step %d was written by a learner that had been replaced; it is skipped", step)
    return None
