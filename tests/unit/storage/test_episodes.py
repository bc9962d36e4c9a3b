"""Stored episodes: the conformance suite for our store, what it writes, and that the suite finds faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from kestrl.api.common.v1 import common_pb2
from kestrl.episode import PolicyVersion, Purpose
from kestrl.errors import StorageError
from kestrl.storage import ObjectStore, layout
from kestrl.storage.episodes import (
    DAMAGED,
    EpisodeBatch,
    EpisodeFilter,
    EpisodeStore,
    ObjectEpisodeStore,
    StoredEpisode,
)
from kestrl.testing.episode_store import check_episode_store


def test_our_store_conforms(store: ObjectStore) -> None:
    check_episode_store(lambda: ObjectEpisodeStore(store))


class Memory(EpisodeStore):
    """The smallest store: `select` is inherited."""

    def __init__(self) -> None:
        self.batches: dict[tuple[Purpose, int], EpisodeBatch] = {}

    def append(self, batch: EpisodeBatch) -> None:
        self.batches[batch.purpose, batch.step] = batch

    def steps(self, purpose: Purpose) -> Sequence[int]:
        return sorted(step for kind, step in self.batches if kind == purpose)

    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        if (purpose, step) not in self.batches:
            raise StorageError(f"there are no episodes of step {step}", code="not_found")
        return self.batches[purpose, step]

    def delete(self, purpose: Purpose, step: int) -> None:
        self.batches.pop((purpose, step), None)


class KeepsTheFirst(Memory):
    def append(self, batch: EpisodeBatch) -> None:
        self.batches.setdefault((batch.purpose, batch.step), batch)


class Unordered(Memory):
    def steps(self, purpose: Purpose) -> Sequence[int]:
        return [step for kind, step in self.batches if kind == purpose][::-1]


class RaisesKeyError(Memory):
    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        try:
            return super().read(purpose, step)
        except StorageError as error:
            raise StorageError("no such key") from error


class LosesRewards(Memory):
    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        batch = super().read(purpose, step)
        groups = [
            replace(group, episodes=[replace(episode, reward=episode.reward or None) for episode in group.episodes])
            for group in batch.groups
        ]
        return replace(batch, groups=groups)


class IgnoresTheFilter(Memory):
    def select(self, chosen: EpisodeFilter) -> Iterator[StoredEpisode]:
        return super().select(replace(chosen, failed=None))


class DeletesBoth(Memory):
    def delete(self, purpose: Purpose, step: int) -> None:
        for kind in Purpose:
            super().delete(kind, step)


def test_a_small_store_conforms() -> None:
    store = Memory()
    check_episode_store(lambda: store)


@pytest.mark.parametrize(
    ("kind", "property_"),
    [
        (KeepsTheFirst, "stored before replaces it"),
        (Unordered, "ascending order"),
        (RaisesKeyError, "code not_found"),
        (LosesRewards, "differs from what was stored"),
        (IgnoresTheFilter, r"select\("),
        (DeletesBoth, "one step of one purpose"),
    ],
)
def test_the_suite_finds_a_fault(kind: type[Memory], property_: str) -> None:
    store = kind()
    with pytest.raises(AssertionError, match=property_):
        check_episode_store(lambda: store)


def test_a_store_that_forgets_is_found() -> None:
    with pytest.raises(AssertionError, match="not the stored"):
        check_episode_store(Memory)


def test_a_batch_is_one_object_that_names_its_step_and_purpose(store: ObjectStore) -> None:
    episodes = ObjectEpisodeStore(store)
    for purpose in Purpose:
        episodes.append(EpisodeBatch(purpose=purpose, step=4, groups=[]))
    assert store.list("") == ["episodes/eval/000004.pb", "episodes/train/000004.pb"]
    stored = common_pb2.GroupBatch.FromString(store.get("episodes/eval/000004.pb"))
    assert (stored.step, stored.purpose) == (4, "evaluation")


def test_files_of_others_among_the_episodes_are_left_alone(store: ObjectStore) -> None:
    episodes = ObjectEpisodeStore(store)
    store.put("episodes/train/notes.txt", b"a person's own")
    episodes.append(EpisodeBatch(purpose=Purpose.TRAIN, step=1, groups=[]))
    assert list(episodes.steps(Purpose.TRAIN)) == [1]


@pytest.mark.parametrize(
    "content", [b"\xff\xff", common_pb2.GroupBatch(groups=[{"episodes": [{}]}]).SerializeToString()]
)
def test_a_damaged_batch_is_a_typed_error_that_names_the_object(store: ObjectStore, content: bytes) -> None:
    store.put(layout.episode_batch(Purpose.TRAIN, 0), content)
    with pytest.raises(StorageError, match=r"episodes/train/000000\.pb is damaged") as caught:
        list(ObjectEpisodeStore(store).select(EpisodeFilter()))
    assert caught.value.code == DAMAGED


def test_paths_are_read_as_they_are_written() -> None:
    policy = PolicyVersion(job="job", step=3, sha256="0123456789abcdef" * 4)
    assert layout.adapter_version(layout.adapter_folder(policy)) == (3, "0123456789ab")
    assert layout.episode_step(layout.episode_batch(Purpose.EVALUATION, 12)) == 12
    assert layout.checkpoint_step(layout.checkpoint_manifest(7)) == 7
    for path in (layout.checkpoint_state(7, "ab" * 32), "checkpoints/notes.txt", "adapters/notes.txt", layout.SUMMARY):
        assert layout.checkpoint_step(path) is layout.episode_step(path) is layout.adapter_version(path) is None
