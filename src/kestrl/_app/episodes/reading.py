"""The stored episodes of a run, as commands read them: rows of the table, or whole episodes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from kestrl.episode import Group, Purpose
from kestrl.errors import StorageError, UserInputError
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import DAMAGED, EpisodeFilter, ObjectEpisodeStore, StoredEpisode, StoredGroup
from kestrl.storage.table.encoding import table_of


class Batch(NamedTuple):
    """Place of a stored batch."""

    purpose: Purpose
    step: int


def stored_episodes(store: ObjectStore, episode_filter: EpisodeFilter) -> Iterator[StoredEpisode]:
    """The selected episodes of a run.

    Raises:
        UserInputError: A stored object is damaged: a person restores it, like any damaged file of a run.
    """
    try:
        yield from ObjectEpisodeStore(store).select(episode_filter)
    except StorageError as error:
        raise UserInputError(str(error)) if error.code == DAMAGED else error from error


def stored_group(store: ObjectStore, batch: Batch, place: int) -> StoredGroup | None:
    """One group of a batch by its place; None if the batch has fewer. Raises as `stored_episodes` does."""
    try:
        return ObjectEpisodeStore(store).group(*batch, place)
    except StorageError as error:
        raise UserInputError(str(error)) if error.code == DAMAGED else error from error


def evaluated_groups(store: ObjectStore, step: int | None = None) -> Sequence[Group]:
    """The groups of a run's evaluations, or of one. Raises as `stored_episodes` does."""
    stored = stored_episodes(store, EpisodeFilter(purpose=Purpose.EVALUATION, step=step))
    return list({stored_group.group.id: stored_group.group for stored_group in stored}.values())


def batches(store: ObjectStore, purpose: Purpose | None, step: int | None) -> Sequence[Batch]:
    """The stored batches, in order. Without a purpose those of training, or of evaluations if nothing was trained."""
    episodes = ObjectEpisodeStore(store)
    for kind in (Purpose.TRAIN, Purpose.EVALUATION) if purpose is None else (purpose,):
        steps = episodes.steps(kind)
        if steps:
            return [Batch(kind, number) for number in steps if step in {None, number}]
    return ()


def batch_table(store: ObjectStore, batch: Batch, columns: Collection[str]) -> Any:
    """The Arrow table of some columns of a batch.

    Raises:
        UserInputError: A stored object is damaged, or was written by a later version of KestRL.
        StorageError: The store refused.
    """
    episodes = ObjectEpisodeStore(store)
    try:
        file = episodes.table(*batch)
        return table_of(episodes.read(*batch), "").select(list(columns)) if file is None else file.read(columns)
    except StorageError as error:
        raise UserInputError(str(error)) if error.code == DAMAGED else error from error
