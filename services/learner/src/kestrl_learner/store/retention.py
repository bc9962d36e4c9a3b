"""Retention: deletes adapters that are not needed any more and episodes of old steps, if the job's settings ask for
it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from kestrl.episode import Purpose
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import EpisodeStore
from kestrl.storage.layout import ADAPTERS, MANIFEST, adapter_version

NAME = re.compile(r"\.(?P<step>\d+)\.(?P<digest>[0-9a-f]+)$")


def expendable(folders: Sequence[str], *, keep: int, names: Collection[str], steps: Collection[int]) -> list[str]:
    """The adapter folders that can be deleted, oldest first.

    Args:
        folders: `adapters/<step>-<digest>` of every version in storage.
        keep: Number of newest versions that are always kept.
        names: `PolicyVersion.name` of versions that an engine serves or a request may use.
        steps: Steps of the checkpoints: a resume from one publishes its version again.
    """
    needed = {(int(match["step"]), match["digest"]) for name in names if (match := NAME.search(name))}
    versions = sorted((*version, folder) for folder in folders if (version := adapter_version(folder)) is not None)
    return [folder for step, digest, folder in versions[:-keep] if (step, digest) not in needed and step not in steps]


def delete_adapters(store: ObjectStore, *, keep: int, names: Collection[str], steps: Collection[int]) -> list[str]:
    """Deletes expendable adapters, manifest first, so that no manifest names missing files; returns their folders.

    Raises:
        StorageError: The store refused.
    """
    paths = store.list(ADAPTERS)
    folders = sorted({path.rpartition("/")[0] for path in paths})
    deleted = expendable(folders, keep=keep, names=names, steps=steps)
    for folder in deleted:
        files = [path for path in paths if path.startswith(f"{folder}/")]
        for path in sorted(files, key=lambda path: not path.endswith(f"/{MANIFEST}")):
            store.delete(path)
    return deleted


def delete_episodes(episodes: EpisodeStore, *, keep: int) -> Sequence[int]:
    """Deletes the episodes of all but the newest `keep` training steps and returns the deleted steps; those of
    evaluations are kept.

    Raises:
        StorageError: The store refused.
    """
    deleted = episodes.steps(Purpose.TRAIN)[:-keep]
    for step in deleted:
        episodes.delete(Purpose.TRAIN, step)
    return deleted
