"""Stored episodes: what the learner appends at each step and evaluation, and what `kestrl episodes` reads.

`EpisodeStore` is the protocol; `ObjectEpisodeStore` keeps one Parquet file a step in a run's storage. Test an
implementation of your own with `kestrl.testing.episode_store.check_episode_store`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from google.protobuf.message import DecodeError

from kestrl.api.common.v1 import common_pb2 as pb
from kestrl.episode import Purpose
from kestrl.episode.codec import group_from_proto
from kestrl.errors import StorageError
from kestrl.storage import layout
from kestrl.storage.objects import ObjectStore
from kestrl.storage.stored_groups import (
    SCORED_OUTCOMES,
    TRAINED_OUTCOMES,
    EpisodeBatch,
    EpisodeFilter,
    GroupOutcome,
    StoredEpisode,
    StoredGroup,
    TrainedTokens,
)
from kestrl.storage.table.decoding import groups_of
from kestrl.storage.table.files import DAMAGED, TableFile, damaged, file_of

__all__ = [
    "DAMAGED",
    "SCORED_OUTCOMES",
    "TRAINED_OUTCOMES",
    "EpisodeBatch",
    "EpisodeFilter",
    "EpisodeStore",
    "GroupOutcome",
    "ObjectEpisodeStore",
    "StoredEpisode",
    "StoredGroup",
    "TrainedTokens",
    "select_in",
]


class EpisodeStore(Protocol):
    """The episodes of one run. Methods may block and may be called from several threads.

    A class that inherits from it needs to implement `append`, `steps`, `read` and `delete` only.
    """

    def append(self, batch: EpisodeBatch) -> None:
        """Stores a batch, whole or not at all. A batch of the same purpose and step is replaced: a resumed run makes
        its last steps again.

        Raises:
            StorageError, PlaceError: The store refused.
        """
        ...

    def steps(self, purpose: Purpose) -> Sequence[int]:
        """The stored steps, ascending."""
        ...

    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        """Reads a batch.

        Raises:
            StorageError: It is not stored (code `not_found`), damaged (code `episodes_damaged`), or the store refused.
        """
        ...

    def delete(self, purpose: Purpose, step: int) -> None:
        """Deletes a batch; a missing one is not an error."""
        ...

    def select(self, chosen: EpisodeFilter) -> Iterator[StoredEpisode]:
        """The episodes that a filter matches, by purpose, step and place in the batch. Holds one batch at a time."""
        for purpose in Purpose if chosen.purpose is None else (chosen.purpose,):
            for step in self.steps(purpose):
                if chosen.step in {None, step}:
                    yield from select_in(self.read(purpose, step), chosen)


def select_in(batch: EpisodeBatch, chosen: EpisodeFilter) -> Iterator[StoredEpisode]:
    """The episodes of a batch that a filter matches."""
    for stored in batch.stored:
        for episode in stored.group.episodes:
            if chosen.matches(stored, episode):
                yield StoredEpisode(batch.purpose, batch.step, stored, episode)


class ObjectEpisodeStore(EpisodeStore):
    """Episodes in object storage: `episodes/train/step=NNNNNN.parquet` and `episodes/eval/step=NNNNNN.parquet`, with
    the columns of `kestrl.storage.table.columns`. Reads what KestRL 0.1 stored, too.

    Args:
        store: The run's storage.
        run: Id of the run, for the column of this name.
    """

    def __init__(self, store: ObjectStore, run: str = "") -> None:
        self._store, self._run = store, run

    def append(self, batch: EpisodeBatch) -> None:
        self._store.put(layout.episode_batch(batch.purpose, batch.step), file_of(batch, self._run))

    def steps(self, purpose: Purpose) -> Sequence[int]:
        paths = self._store.list(layout.episodes_folder(purpose))
        return sorted({step for path in paths if (step := layout.episode_step(path)) is not None})

    def table(self, purpose: Purpose, step: int) -> TableFile | None:
        """The Parquet file of a batch; None of one that KestRL 0.1 stored. Raises as `read` does."""
        try:
            return TableFile(self._store, layout.episode_batch(purpose, step))
        except StorageError as error:
            if error.code != "not_found" or not self._store.exists(layout.old_episode_batch(purpose, step)):
                raise
            return None

    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        return self._read(purpose, step, None)

    def group(self, purpose: Purpose, step: int, place: int) -> StoredGroup | None:
        """One group by its place in the batch; None if the batch has fewer. Raises as `read` does."""
        file = self.table(purpose, step)
        if file is None:
            return next(iter(self._read_old(purpose, step).stored[place : place + 1]), None)
        groups = file.read(["group_index"]).column("group_index").to_pylist()
        rows = file.rows([row for row, group in enumerate(groups) if group == place])
        return next(iter(self._decoded(rows, purpose, step)), None)

    def select(self, chosen: EpisodeFilter) -> Iterator[StoredEpisode]:
        """As the protocol's; transfers only the rows of groups with an episode that the filter may match."""
        for purpose in Purpose if chosen.purpose is None else (chosen.purpose,):
            for step in self.steps(purpose):
                if chosen.step in {None, step}:
                    yield from select_in(self._read(purpose, step, chosen), chosen)

    def _read(self, purpose: Purpose, step: int, episode_filter: EpisodeFilter | None) -> EpisodeBatch:
        file = self.table(purpose, step)
        if file is None:
            return self._read_old(purpose, step)
        places = None if episode_filter is None else _places(file, episode_filter)
        return EpisodeBatch(purpose=purpose, step=step, stored=self._decoded(file.rows(places), purpose, step))

    def _decoded(self, rows: Sequence[dict[str, object]], purpose: Purpose, step: int) -> list[StoredGroup]:
        try:
            return groups_of(rows)
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(self._store.address(layout.episode_batch(purpose, step)), error) from error

    def _read_old(self, purpose: Purpose, step: int) -> EpisodeBatch:
        path = layout.old_episode_batch(purpose, step)
        content = self._store.get(path)
        try:
            groups = [group_from_proto(group) for group in pb.GroupBatch.FromString(content).groups]
        except (DecodeError, ValueError) as error:
            raise damaged(self._store.address(path), error) from error
        outcome = GroupOutcome.TRAINED if purpose is Purpose.TRAIN else GroupOutcome.EVALUATED
        stored = [StoredGroup(group=group, outcome=outcome) for group in groups]
        return EpisodeBatch(purpose=purpose, step=step, stored=stored)

    def delete(self, purpose: Purpose, step: int) -> None:
        self._store.delete(layout.episode_batch(purpose, step))
        self._store.delete(layout.old_episode_batch(purpose, step))


def _places(file: TableFile, episode_filter: EpisodeFilter) -> Sequence[int] | None:
    """Places of the rows of groups with an episode of the selected id and scenario; None for all."""
    if episode_filter.id is None and episode_filter.scenario is None:
        return None
    keys = file.read(["group_index", "episode", "scenario"]).to_pylist()
    groups = {
        key["group_index"]
        for key in keys
        if episode_filter.id in {None, key["episode"]} and episode_filter.scenario in {None, key["scenario"]}
    }
    return [place for place, key in enumerate(keys) if key["group_index"] in groups]
