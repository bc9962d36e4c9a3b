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


def steps(store: ObjectStore) -> list[int]:
    """Steps of the whole checkpoints, oldest first."""
    return [int(path.split("/")[1]) for path in store.list("checkpoints") if path.endswith(f"/{MANIFEST}")]


def write(store: ObjectStore, checkpoint: Checkpoint, *, keep: int) -> None:
    """Writes a checkpoint and removes all but the newest `keep`, manifest first, so that none is ever half there.

    Raises:
        StorageError: The store refused.
    """
    folder = _folder(checkpoint.step)
    store.put(f"{folder}/state.pt", checkpoint.state)
    manifest = {"step": checkpoint.step, "sha256": digest(checkpoint.state), "facts": checkpoint.facts}
    store.put(f"{folder}/{MANIFEST}", json.dumps(manifest).encode())
    for old in steps(store)[:-keep]:
        store.delete(f"{_folder(old)}/{MANIFEST}")
        store.delete(f"{_folder(old)}/state.pt")


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
    state = store.get(f"{folder}/state.pt")
    if digest(state) != manifest["sha256"]:
        raise StorageError(
            f"{store.address(folder)}/state.pt is corrupt; delete {store.address(folder)} to go on from the one before",
            code="digest_mismatch",
        )
    return Checkpoint(step=manifest["step"], state=state, facts=manifest["facts"])
