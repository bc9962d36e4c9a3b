"""Checkpoints in storage: the state first, the manifest last; read only through the manifest."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kestrl.errors import StorageError
from kestrl.storage import ObjectStore
from kestrl.storage.adapters import digest

MANIFEST = "manifest.json"


class Checkpoint(NamedTuple):
    """A point to go on from."""

    step: int
    """Optimiser steps done: the trained frontier."""
    state: bytes
    facts: dict[str, Any]


def _folder(step: int) -> str:
    return f"checkpoints/{step:06d}"


def _state(folder: str, sha256: str) -> str:
    return f"{folder}/{sha256[:16]}.pt"


def steps(store: ObjectStore) -> list[int]:
    """Steps of the whole checkpoints, oldest first."""
    return [int(path.split("/")[1]) for path in store.list("checkpoints") if path.endswith(f"/{MANIFEST}")]


def write(store: ObjectStore, checkpoint: Checkpoint, *, keep: int) -> None:
    """Writes a checkpoint and removes all but the newest `keep`, manifest first, so that none is ever half there.

    The state is named by its digest: a step that is checkpointed again replaces nothing that its manifest still names.

    Raises:
        StorageError: The store refused.
    """
    folder, sha256 = _folder(checkpoint.step), digest(checkpoint.state)
    store.put(_state(folder, sha256), checkpoint.state)
    manifest = {"step": checkpoint.step, "sha256": sha256, "facts": checkpoint.facts}
    store.put(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
    kept = {_folder(step) for step in steps(store)[-keep:]}
    written = {f"{folder}/{MANIFEST}", _state(folder, sha256)}
    unneeded = [
        path
        for path in store.list("checkpoints")
        if (path not in written if path.startswith(f"{folder}/") else path.rpartition("/")[0] not in kept)
    ]
    for path in sorted(unneeded, key=lambda path: not path.endswith(f"/{MANIFEST}")):
        store.delete(path)


def newest(store: ObjectStore) -> Checkpoint | None:
    """The newest whole checkpoint, or None.

    Raises:
        StorageError: It is corrupt: code `digest_mismatch`.
    """
    known = steps(store)
    if not known:
        return None
    folder = _folder(known[-1])
    manifest = json.loads(store.get(f"{folder}/{MANIFEST}"))
    path = _state(folder, manifest["sha256"])
    state = store.get(path)
    if digest(state) != manifest["sha256"]:
        raise StorageError(
            f"{store.address(path)} is corrupt; delete {store.address(folder)} to go on from the one before",
            code="digest_mismatch",
        )
    return Checkpoint(step=manifest["step"], state=state, facts=manifest["facts"])
