"""Counters of a worker, updated when an episode ends."""

from __future__ import annotations

from collections import Counter

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.episode import Episode


class Counts:
    """Sums over ended episodes."""

    def __init__(self) -> None:
        self.episodes: Counter[tuple[str, str]] = Counter()
        self.tool_calls: Counter[str] = Counter()
        self.tokens = self.turns = 0
        self.turn_seconds = 0.0
        observe(Metric.EPISODES, lambda: self.episodes)
        observe(Metric.TOOL_CALLS, lambda: self.tool_calls)
        observe(Metric.TOKENS, lambda: self.tokens)
        observe(Metric.TURNS, lambda: self.turns)
        observe(Metric.TURN_SECONDS, lambda: self.turn_seconds)

    def add(self, episode: Episode) -> None:
        """Counts an ended episode."""
        failure = "" if episode.failure is None else f"{episode.failure.boundary}/{episode.failure.code}"
        self.episodes[episode.stop_reason, failure] += 1
        self.tool_calls.update(call.outcome for call in episode.tool_calls)
        self.tokens += int(episode.metrics.get("sampled_tokens", 0))
        self.turns += len(episode.turns)
        self.turn_seconds += sum(turn.seconds for turn in episode.turns)
