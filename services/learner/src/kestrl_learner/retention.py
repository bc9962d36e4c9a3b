"""What storage may forget: adapters that nothing needs any more, and the episodes of old steps. Nothing unless the job says so."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kestrl.storage import ObjectStore
from kestrl.storage.adapters import MANIFEST

VERSION = re.compile(r"adapters/(?P<step>\d+)-(?P<digest>[0-9a-f]+)$")
NAME = re.compile(r"\.(?P<step>\d+)\.(?P<digest>[0-9a-f]+)$")


def expendable(folders: Sequence[str], *, keep: int, names: Collection[str], steps: Collection[int]) -> list[str]:
    """The adapter folders that may go, oldest first.

    Args:
        folders: `adapters/<step>-<digest>` of every version in storage.
        keep: How many of the newest stay in any case.
        names: `PolicyVersion.name` of those that an engine serves or a request may name.
        steps: Of the checkpoints: who resumes from one publishes that version again, and may find it.
    """
    needed = {(int(found["step"]), found["digest"]) for name in names if (found := NAME.search(name))}
    known = sorted(
        (int(found["step"]), found["digest"], folder) for folder in folders if (found := VERSION.match(folder))
    )
    return [folder for step, digest, folder in known[:-keep] if (step, digest) not in needed and step not in steps]


def forget_adapters(store: ObjectStore, *, keep: int, names: Collection[str], steps: Collection[int]) -> list[str]:
    """Removes them, manifest first, so that none is ever half there; returns their folders.

    Raises:
        StorageError: The store refused.
    """
    paths = store.list("adapters")
    folders = sorted({path.rpartition("/")[0] for path in paths})
    gone = expendable(folders, keep=keep, names=names, steps=steps)
    for folder in gone:
        files = [path for path in paths if path.startswith(f"{folder}/")]
        for path in sorted(files, key=lambda path: not path.endswith(f"/{MANIFEST}")):
            store.delete(path)
    return gone


def forget_episodes(store: ObjectStore, *, keep: int) -> list[str]:
    """Removes the episodes of all but the newest `keep` training steps; evaluations stay.

    Raises:
        StorageError: The store refused.
    """
    gone = store.list("episodes/train")[:-keep]
    for path in gone:
        store.delete(path)
    return gone
