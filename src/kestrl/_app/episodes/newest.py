"""The newest stored episode in one line, for those who watch a run."""

from __future__ import annotations

from kestrl._app.episodes.verdict import verdict_of
from kestrl.episode import Episode, Purpose
from kestrl.errors import KestrlError
from kestrl.storage import ObjectStore
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl.storage.table.decoding import groups_of


def newest_verdict(store: ObjectStore) -> str:
    """What became of the last episode of the newest training step; empty if none is stored."""
    episodes = ObjectEpisodeStore(store)
    try:
        steps = episodes.steps(Purpose.TRAIN)
        file = episodes.table(Purpose.TRAIN, steps[-1]) if steps else None
        if file is None:
            return ""
        names = file.read(["episode"]).column("episode").to_pylist()
        place = max((place for place, name in enumerate(names) if name is not None), default=None)
        if place is None:
            return ""
        (stored,) = groups_of(file.rows([place]))
    except (KestrlError, ValueError, KeyError, TypeError) as error:
        return f"cannot be read: {error}"
    return verdict_line(stored.group.episodes[0])


def verdict_line(episode: Episode) -> str:
    """The verdict of an episode in one line."""
    verdict = verdict_of(episode, None)
    reward = "no reward" if verdict.reward is None else f"reward {verdict.reward:.3f}"
    reason = f"{verdict.code}, {verdict.message}" if verdict.code else verdict.stop
    turn = "" if verdict.turn is None else f" (turn {verdict.turn + 1}: {verdict.cause})"
    return f"{episode.id}: {reward}, {reason}{turn}"
