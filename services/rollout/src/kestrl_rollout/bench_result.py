"""Result of a bench: episodes and summary, as those of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kestrl._shared.at_k import at_k
from kestrl._shared.plan.settings.bench import BenchSettings
from kestrl.episode import Group
from kestrl.errors import EngineFailure
from kestrl.runstate.states import RunPhase
from kestrl.storage import open_store
from kestrl.storage.episodes import EpisodeBatch, ObjectEpisodeStore
from kestrl.storage.summary import RunSummary, write_summary


def write_result(settings: BenchSettings, groups: Sequence[Group], seconds: float) -> None:
    """Writes the episodes, then the summary.

    Raises:
        EngineFailure: No episode was scored; the episodes are written.
        StorageError: The storage refuses one of them.
    """
    store = open_store(settings.storage)
    ObjectEpisodeStore(store).append(EpisodeBatch.evaluation(0, groups))
    after = summarise(groups, settings.sampling.samples)
    failures = Counter(
        f"{episode.failure.boundary}/{episode.failure.code}"
        for group in groups
        for episode in group.episodes
        if episode.failure is not None
    )
    summary = RunSummary(
        status=RunPhase.SUCCEEDED,
        after=after,
        sampling=settings.sampling,
        failures=dict(failures),
        seconds=seconds,
    )
    write_summary(store, summary)


def summarise(groups: Sequence[Group], samples: int) -> dict[str, float]:
    """Means over the scored episodes, estimates over several samples, and failures by boundary.

    Raises:
        EngineFailure: No episode was scored.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    failures = [episode.failure for episode in episodes if episode.failure is not None]
    sums: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for episode in episodes:
        if episode.failure is None and episode.reward is not None:
            facts = {"reward": episode.reward, "num_turns": episode.num_turns, "duration": episode.seconds}
            for name, value in {**episode.metrics, **facts}.items():
                sums[name] = sums.get(name, 0.0) + value
                counts[name] += 1
    if not counts:
        raise EngineFailure(f"none of {len(episodes)} episodes was scored; the first failure: {failures[0]}")
    boundaries = Counter(str(failure.boundary) for failure in failures)
    return {
        **{name: sums[name] / counts[name] for name in counts},
        "episodes": float(len(episodes)),
        "exceptions": float(len(failures)),
        **{f"exceptions_{boundary}": float(count) for boundary, count in boundaries.items()},
        **at_k(groups, samples),
    }
