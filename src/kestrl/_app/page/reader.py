"""Episodes as pages need them. A server makes a reader for each request, an export one for each run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple, TypeVar

from kestrl._app.episodes.labels import Label, read_labels
from kestrl._app.episodes.reading import Batch, batch_table, stored_group
from kestrl._app.page.addresses import digest
from kestrl.episode import Purpose
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import EpisodeFilter, ObjectEpisodeStore, StoredEpisode, StoredGroup, select_in
from kestrl.storage.stored_groups import EpisodeBatch

LOOKED_BACK = 100
"""Earlier steps that are searched for a scenario."""
MOST_STEPS = LOOKED_BACK + 1
"""Steps of which the names are kept."""
MOST_NAMES = 100_000
"""Episodes of which the names are kept, beyond those of one step."""
MOST_GROUPS = 4
"""Groups that are kept with their episodes."""
Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept")


class EpisodeName(NamedTuple):
    """Where an episode is within its step."""

    group: int
    episode: str
    scenario: str


class EpisodeReader:
    """Reads of one run's episodes, which keep what the next page is likely to need: the groups and names read last.

    Args:
        store: The run's storage. What is written there later may not be seen.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._steps: dict[Purpose, Sequence[int]] = {}
        self._names: OrderedDict[Batch, Sequence[EpisodeName]] = OrderedDict()
        self._groups: OrderedDict[tuple[Batch, int], StoredGroup | None] = OrderedDict()

    @cached_property
    def labels(self) -> Mapping[str, Label]:
        """All labels, by id of the episode."""
        return read_labels(self._store)

    def read(self, batch: Batch, episode: str) -> StoredEpisode | None:
        """The episode with the beginning of the digest of its id, with its group; None if there is none."""
        names = [name for name in self._names_of(batch) if digest(name.episode) == episode]
        return self._best(batch, names)

    def earlier(self, stored: StoredEpisode) -> StoredEpisode | None:
        """The best attempt at an episode's scenario in the nearest earlier step that has one."""
        steps = [step for step in self._steps_of(stored.purpose) if step < stored.step]
        for step in islice(reversed(steps), LOOKED_BACK):
            batch = Batch(stored.purpose, step)
            names = [name for name in self._names_of(batch) if name.scenario == stored.episode.scenario_id]
            if (attempt := self._best(batch, names)) is not None:
                return attempt
        return None

    def _best(self, batch: Batch, names: Sequence[EpisodeName]) -> StoredEpisode | None:
        """The episode with the largest reward among those of a batch."""
        ids = {attempt.episode for attempt in names}
        groups = [self._group(batch, place) for place in dict.fromkeys(attempt.group for attempt in names)]
        every = EpisodeBatch(purpose=batch.purpose, step=batch.step, stored=[attempt for attempt in groups if attempt])
        attempts = (attempt for attempt in select_in(every, EpisodeFilter()) if attempt.episode.id in ids)
        return max(attempts, key=_earned, default=None)

    def _steps_of(self, purpose: Purpose) -> Sequence[int]:
        if purpose not in self._steps:
            self._steps[purpose] = ObjectEpisodeStore(self._store).steps(purpose)
        return self._steps[purpose]

    def _names_of(self, batch: Batch) -> Sequence[EpisodeName]:
        """The episodes of a step; none if it is not stored."""
        if batch.step not in self._steps_of(batch.purpose):
            return ()
        names = _kept(self._names, batch, lambda: _names(self._store, batch), MOST_STEPS)
        while sum(map(len, self._names.values())) > MOST_NAMES and len(self._names) > 1:
            self._names.popitem(last=False)
        return names

    def _group(self, batch: Batch, place: int) -> StoredGroup | None:
        """A group by its place; None if its step was written anew meanwhile."""
        return _kept(self._groups, (batch, place), lambda: stored_group(self._store, batch, place), MOST_GROUPS)


def _names(store: ObjectStore, batch: Batch) -> Sequence[EpisodeName]:
    columns = batch_table(store, batch, ["group_index", "episode", "scenario"]).to_pydict()
    rows = zip(columns["group_index"], columns["episode"], columns["scenario"], strict=True)
    return [EpisodeName(group, episode, scenario) for group, episode, scenario in rows if episode is not None]


def _earned(stored: StoredEpisode) -> float:
    return float("-inf") if stored.episode.reward is None else stored.episode.reward


def _kept(cache: OrderedDict[Key, Kept], key: Key, load: Callable[[], Kept], most: int) -> Kept:
    """What is kept under a key, read if it is missing; the least recently used goes."""
    if key not in cache:
        cache[key] = load()
    cache.move_to_end(key)
    while len(cache) > most:
        cache.popitem(last=False)
    return cache[key]
