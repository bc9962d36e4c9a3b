"""People's labels of episodes, a small Parquet file each, so that two people overwrite nothing of each other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

from kestrl.storage import ObjectStore
from kestrl.storage.layout import LABELS, episode_label
from kestrl.storage.table.arrow import arrow, parquet
from kestrl.storage.table.files import TableFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What a person says about an episode."""

    episode: str
    label: str
    note: str = ""
    labelled_at: float = 0.0
    """Unix seconds."""


def write_label(store: ObjectStore, label: Label) -> None:
    """Stores a label in place of an earlier one of the same episode.

    Raises:
        StorageError, PlaceError: The store refused.
    """
    sink = arrow().BufferOutputStream()
    parquet().write_table(arrow().Table.from_pylist([asdict(label)]), sink, compression="zstd")
    store.put(_path(label.episode), sink.getvalue().to_pybytes())


def delete_label(store: ObjectStore, episode: str) -> None:
    """Deletes the label of an episode; a missing one is not an error."""
    store.delete(_path(episode))


def labelled(episode: str, label: str, note: str) -> Label:
    """A label as of now."""
    return Label(episode=episode, label=label, note=note, labelled_at=time.time())


def read_labels(store: ObjectStore) -> Mapping[str, Label]:
    """All labels, by id of the episode.

    Raises:
        StorageError: One is damaged, or the store refused.
    """
    files = [TableFile(store, path) for path in store.list(LABELS) if path.endswith(".parquet")]
    labels = [Label(**row) for file in files for row in file.rows()]
    return {label.episode: label for label in labels}


def with_labels(table: Any, labels: Mapping[str, Label]) -> Any:
    """An Arrow table of episodes with the column `label`, null where there is none."""
    names = table.column("episode").to_pylist()
    column = [labels[name].label if name in labels else None for name in names]
    return table.append_column("label", arrow().array(column, arrow().string()))


def _path(episode: str) -> str:
    return episode_label(sha256(episode.encode()).hexdigest()[:32])
