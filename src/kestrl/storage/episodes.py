"""Stored episodes: what the learner appends at each step and evaluation, and what `kestrl episodes` reads.

`EpisodeStore` is the protocol; `ObjectEpisodeStore` keeps one object a step in a run's storage. Test an implementation
of your own with `kestrl.testing.episode_store.check_episode_store`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from kestrl.api.common.v1 import common_pb2 as pb
from kestrl.episode import Episode, Group, Purpose
from kestrl.episode.codec import group_from_proto, group_to_proto
from kestrl.errors import StorageError
from kestrl.storage import layout
from kestrl.storage.objects import ObjectStore

DAMAGED = "episodes_damaged"
"""Failure code of a batch that cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBatch:
    """The groups that one step or evaluation consumed."""

    purpose: Purpose
    step: int
    """Optimiser steps that had been done: the batch 0 of training is the first step's."""
    groups: Sequence[Group]


class StoredEpisode(NamedTuple):
    """An episode and where it is stored."""

    purpose: Purpose
    step: int
    group: Group
    episode: Episode


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """Selection of episodes; None in a field selects all."""

    purpose: Purpose | None = None
    step: int | None = None
    id: str | None = None
    """Id of one episode."""
    scenario: str | None = None
    """Id of the scenario."""
    failed: bool | None = None
    """Whether something other than the model failed."""

    def matches(self, episode: Episode) -> bool:
        """Whether an episode has the selected id, scenario and outcome."""
        return (
            self.id in {None, episode.id}
            and self.scenario in {None, episode.scenario_id}
            and self.failed in {None, episode.failure is not None}
        )


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
    for group in batch.groups:
        for episode in group.episodes:
            if chosen.matches(episode):
                yield StoredEpisode(batch.purpose, batch.step, group, episode)


class ObjectEpisodeStore(EpisodeStore):
    """Episodes in object storage: `episodes/train/NNNNNN.pb` and `episodes/eval/NNNNNN.pb`, a `GroupBatch` each.

    Args:
        store: The run's storage.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def append(self, batch: EpisodeBatch) -> None:
        message = pb.GroupBatch(
            step=batch.step, purpose=batch.purpose, groups=[group_to_proto(group) for group in batch.groups]
        )
        self._store.put(layout.episode_batch(batch.purpose, batch.step), message.SerializeToString())

    def steps(self, purpose: Purpose) -> Sequence[int]:
        paths = self._store.list(layout.episodes_folder(purpose))
        return sorted(step for path in paths if (step := layout.episode_step(path)) is not None)

    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        path = layout.episode_batch(purpose, step)
        content = self._store.get(path)
        try:
            message = pb.GroupBatch.FromString(content)
            groups = [group_from_proto(group) for group in message.groups]
        except (DecodeError, ValueError) as error:
            raise StorageError(
                f"{self._store.address(path)} is damaged: {error}; restore it or remove it", code=DAMAGED
            ) from error
        return EpisodeBatch(purpose=purpose, step=step, groups=groups)

    def delete(self, purpose: Purpose, step: int) -> None:
        self._store.delete(layout.episode_batch(purpose, step))
