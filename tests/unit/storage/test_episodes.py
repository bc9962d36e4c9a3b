"""Stored episodes: the conformance suite for our store, what it writes, and that the suite finds faults."""

from __future__ import annotations

import random
import re
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from kestrl.api.common.v1 import common_pb2
from kestrl.episode import Group, PolicyVersion, Purpose, Row, Scenario
from kestrl.episode.codec import group_to_proto
from kestrl.errors import StorageError, UserInputError
from kestrl.storage import ObjectStore, layout
from kestrl.storage.episodes import (
    DAMAGED,
    EpisodeBatch,
    EpisodeFilter,
    EpisodeStore,
    GroupOutcome,
    ObjectEpisodeStore,
    StoredEpisode,
)
from kestrl.storage.table.files import ROW_GROUP
from kestrl.testing.attempts import make_attempt
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
        return replace(batch, stored=[replace(each, group=self._damaged(each.group)) for each in batch.stored])

    def _damaged(self, group: Group) -> Group:
        return replace(group, episodes=[replace(each, reward=each.reward or None) for each in group.episodes])


class LosesOutcomes(Memory):
    def read(self, purpose: Purpose, step: int) -> EpisodeBatch:
        batch = super().read(purpose, step)
        return replace(batch, stored=[replace(each, outcome=GroupOutcome.TRAINED) for each in batch.stored])


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
        (LosesOutcomes, "differs from what was stored"),
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
        episodes.append(EpisodeBatch(purpose=purpose, step=4, stored=[]))
    assert store.list("") == ["episodes/eval/step=000004.parquet", "episodes/train/step=000004.parquet"]


def test_files_of_others_among_the_episodes_are_left_alone(store: ObjectStore) -> None:
    episodes = ObjectEpisodeStore(store)
    store.put("episodes/train/notes.txt", b"a person's own")
    episodes.append(EpisodeBatch(purpose=Purpose.TRAIN, step=1, stored=[]))
    assert list(episodes.steps(Purpose.TRAIN)) == [1]


@pytest.mark.parametrize(
    "content", [b"\xff\xff", common_pb2.GroupBatch(groups=[{"episodes": [{}]}]).SerializeToString()]
)
def test_a_damaged_batch_is_a_typed_error_that_names_the_object(store: ObjectStore, content: bytes) -> None:
    old, new = "episodes/train/000000.pb", "episodes/train/step=000001.parquet"
    for path in (old, new):
        store.put(path, content)
        with pytest.raises(StorageError, match=rf"{re.escape(path)} is damaged") as caught:
            list(ObjectEpisodeStore(store).select(EpisodeFilter()))
        assert caught.value.code == DAMAGED


def test_a_file_of_a_later_version_is_refused(store: ObjectStore) -> None:
    table = pyarrow.table({"step": [1]}).replace_schema_metadata({"kestrl.episodes": "9"})
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    store.put("episodes/train/step=000001.parquet", sink.getvalue().to_pybytes())
    with pytest.raises(UserInputError, match=r"later version of KestRL \(schema 9, known is 1\)"):
        ObjectEpisodeStore(store).read(Purpose.TRAIN, 1)


def test_a_file_without_our_columns_is_damaged(store: ObjectStore) -> None:
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"step": [1]}), sink)
    store.put("episodes/train/step=000001.parquet", sink.getvalue().to_pybytes())
    with pytest.raises(StorageError, match="is damaged") as caught:
        ObjectEpisodeStore(store).read(Purpose.TRAIN, 1)
    assert caught.value.code == DAMAGED


def test_what_an_older_version_stored_is_read_until_it_is_written_anew(store: ObjectStore) -> None:
    scenario = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "?"}])
    group = Group(id="g", scenario=scenario, episodes=[])
    old = common_pb2.GroupBatch(step=3, purpose="train", groups=[group_to_proto(group)]).SerializeToString()
    store.put("episodes/train/000003.pb", old)
    store.put("episodes/eval/000003.pb", old)
    episodes = ObjectEpisodeStore(store)
    assert (list(episodes.steps(Purpose.TRAIN)), list(episodes.steps(Purpose.EVALUATION))) == ([4], [3])
    (stored,) = episodes.read(Purpose.TRAIN, 4).stored
    assert (stored.group.id, stored.outcome) == ("g", GroupOutcome.TRAINED)
    assert [each.outcome for each in episodes.read(Purpose.EVALUATION, 3).stored] == [GroupOutcome.EVALUATED]
    episodes.append(EpisodeBatch(purpose=Purpose.TRAIN, step=4, stored=[]))
    assert (list(episodes.steps(Purpose.TRAIN)), list(episodes.read(Purpose.TRAIN, 4).stored)) == ([4], [])
    episodes.delete(Purpose.TRAIN, 4)
    assert not episodes.steps(Purpose.TRAIN)


def test_one_episode_is_read_without_the_rows_of_others(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The footer, the ids and one row group of many are transferred."""
    groups = [numbered(number) for number in range(3 * ROW_GROUP)]
    episodes = ObjectEpisodeStore(store)
    episodes.append(EpisodeBatch.evaluation(0, groups))
    whole, sizes = store.size("episodes/eval/step=000000.parquet"), list[int]()
    for name in ("get_range", "get_ranges"):
        read = getattr(store, name)

        def counted(*arguments: Any, read: Any = read) -> Any:
            content = read(*arguments)
            sizes.append(sum(map(len, content)) if isinstance(content, list) else len(content))
            return content

        monkeypatch.setattr(store, name, counted)
    (found,) = episodes.select(EpisodeFilter(id=f"g{ROW_GROUP}/0"))
    assert found.episode.rows == groups[ROW_GROUP].episodes[0].rows
    assert sum(sizes) < whole / 2


def test_pyarrow_reads_in_the_calling_thread_with_few_requests(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of pyarrow that lets go of a Python object while the interpreter ends aborts the process."""
    episodes = ObjectEpisodeStore(store)
    episodes.append(EpisodeBatch.evaluation(0, [numbered(number) for number in range(3 * ROW_GROUP)]))
    threads = list[int]()
    for name in ("get_range", "get_ranges"):
        read = getattr(store, name)
        monkeypatch.setattr(
            store, name, lambda *arguments, read=read: (threads.append(threading.get_ident()), read(*arguments))[1]
        )
    file = episodes.table(Purpose.EVALUATION, 0)
    assert file is not None
    opened = len(threads)
    assert file.read(["episode", "reward", "messages"]).num_rows == 3 * ROW_GROUP
    assert len(threads) - opened == 1, "the columns of all row groups"
    assert set(threads) == {threading.get_ident()}


def test_a_group_is_read_by_its_place(store: ObjectStore) -> None:
    episodes, groups = ObjectEpisodeStore(store), [numbered(number) for number in range(3)]
    episodes.append(EpisodeBatch.evaluation(0, groups))
    batch = episodes.read(Purpose.EVALUATION, 0)
    assert [episodes.group(Purpose.EVALUATION, 0, place) for place in range(4)] == [*batch.stored, None]


def numbered(number: int) -> Group:
    """A group of one episode with many tokens that do not compress."""
    chance = random.Random(number)
    ids = array("i", [chance.randrange(2**31) for _ in range(200)])
    row = Row(token_ids=ids, mask=bytes(200), logprobs=array("f", bytes(800)), policies=[])
    return Group(
        id=f"g{number}",
        scenario=Scenario(id=f"s{number}", ordinal=number, messages=[]),
        episodes=[replace(make_attempt("x").episode, id=f"g{number}/0", rows=[row])],
    )


def test_paths_are_read_as_they_are_written() -> None:
    policy = PolicyVersion(job="job", step=3, sha256="0123456789abcdef" * 4)
    assert layout.adapter_version(layout.adapter_folder(policy)) == (3, "0123456789ab")
    assert layout.episode_step(layout.episode_batch(Purpose.EVALUATION, 12)) == 12
    assert layout.checkpoint_step(layout.checkpoint_manifest(7)) == 7
    for path in (layout.checkpoint_state(7, "ab" * 32), "checkpoints/notes.txt", "adapters/notes.txt", layout.SUMMARY):
        assert layout.checkpoint_step(path) is layout.episode_step(path) is layout.adapter_version(path) is None
