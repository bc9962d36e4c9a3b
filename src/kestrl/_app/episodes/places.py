"""Where the episodes of a run are stored: its folder, that of an evaluation, or an address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kestrl._app.episodes.reading import stored_episodes
from kestrl._app.local.observation import run_store
from kestrl._app.local.rundir import RunDir, find_run
from kestrl.errors import UserInputError
from kestrl.storage import ObjectStore, open_store
from kestrl.storage.episodes import EpisodeFilter, StoredEpisode


@dataclass(frozen=True, slots=True)
class EpisodePlace:
    """Where the episodes of a run are stored."""

    store: ObjectStore
    run: RunDir | None
    """None for an address."""

    @property
    def live(self) -> bool:
        """Whether more episodes may come; unknown, and so true, at an address."""
        return self.run is None or self.run.runner_pid() is not None


def find_place(runs: Path, name: str | None) -> EpisodePlace:
    """The place that a command names.

    Raises:
        UserInputError: There is no such run, folder or bucket.
    """
    if name is not None and "://" in name:
        return EpisodePlace(open_store(name, create=False), None)
    folder = Path(name) if name is not None and not (runs / name / "job.json").is_file() else None
    if folder is not None and (folder / "job.json").is_file():
        run = RunDir(folder.resolve())
    elif folder is not None and (folder / "episodes").is_dir():
        return EpisodePlace(open_store(str(folder), create=False), None)
    else:
        run = find_run(runs, name)
    return EpisodePlace(run_store(run), run)


def find_episode(place: EpisodePlace, episode_id: str) -> StoredEpisode:
    """A stored episode by its id.

    Raises:
        UserInputError: There is no episode with this id.
    """
    stored = next(stored_episodes(place.store, EpisodeFilter(id=episode_id)), None)
    if stored is None:
        raise UserInputError(f"no stored episode has the id {episode_id!r}; see `kestrl episodes list`")
    return stored
