"""Health of a job's tools: how often episodes call them, how the calls end, and when to warn. Pure.

A run whose model never calls a tool may still have rising rewards, so that nothing else shows it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from kestrl.episode import CallOutcome, Episode, Group

WINDOW_EPISODES = 64
"""Maximum number of episodes that the shares and the warning cover; a job with smaller steps has those of one step."""
CALL_MARKERS = (
    "<tool_call>",
    "<tool_calls>",
    "<function=",
    "<function_call",
    "<invoke name=",
    "<|python_tag|>",
    "<|channel|>commentary to=",
    "[TOOL_CALLS]",
    "tool▁calls▁begin",
    "```tool_code",
    '{"name":',
    '{"name" :',
)
"""Texts with which models begin a tool call, in formats that a job may not have chosen."""


class Warn(StrEnum):
    """Why the tools of a job do not work."""

    NO_TOOL_CALL = "no_tool_call"
    CALLS_FAILING = "calls_failing"


class ToolWarning(NamedTuple):
    """A warning about the tools of a job."""

    reason: Warn
    message: str
    """What was observed and what to check or change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCounts:
    """Counts over episodes that were offered tools; checkpoints hold those of the run."""

    episodes: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Attempted calls by `CallOutcome`."""
    unread: Mapping[str, int] = field(default_factory=dict[str, int])
    """Episodes without a call whose text has a marker of one, by marker."""

    @property
    def calls(self) -> int:
        """Attempted calls, those that could not be parsed included."""
        return sum(self.outcomes.values())

    @property
    def calls_per_episode(self) -> float:
        return self.calls / self.episodes if self.episodes else 0.0

    def shares(self) -> dict[str, float]:
        """Share of each outcome in all calls, 0 for one that did not occur; empty without calls."""
        return {outcome: self.outcomes.get(outcome, 0) / self.calls for outcome in CallOutcome} if self.calls else {}

    def plus(self, other: ToolCounts) -> ToolCounts:
        """The sums of both."""
        return ToolCounts(
            episodes=self.episodes + other.episodes,
            outcomes=dict(Counter(self.outcomes) + Counter(other.outcomes)),
            unread=dict(Counter(self.unread) + Counter(other.unread)),
        )

    def facts(self) -> dict[str, Any]:
        """The content as JSON, for the summary."""
        return {
            "episodes": self.episodes,
            "calls": self.calls,
            "calls_per_episode": self.calls_per_episode,
            "outcomes": dict(sorted(self.outcomes.items())),
        }

    def warning(self) -> ToolWarning | None:
        """What is wrong when episodes were offered tools and no call worked; None if one did."""
        if not self.episodes or self.outcomes.get(CallOutcome.OK):
            return None
        if self.calls:
            failed = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
            return ToolWarning(
                Warn.CALLS_FAILING,
                f"none of the {self.calls} tool calls of the last {self.episodes} episodes succeeded ({failed}); see "
                "`kestrl episodes show` for the calls and what the model was answered",
            )
        none = f"none of the last {self.episodes} episodes called a tool, although tools were offered"
        if self.unread:
            marker, count = max(self.unread.items(), key=lambda item: item[1])
            return ToolWarning(
                Warn.NO_TOOL_CALL,
                f"{none}; {sum(self.unread.values())} of them contain what looks like a call in a format that is not "
                f"the job's ({marker} in {count}): check agent.toolCallFormat and the chat template",
            )
        return ToolWarning(
            Warn.NO_TOOL_CALL,
            f"{none}; see `kestrl episodes show` for what the model answers, and ask for the tools in the prompt",
        )


def counts_of(episode: Episode) -> ToolCounts:
    """The counts of one episode that was offered tools."""
    outcomes = Counter(str(call.outcome) for call in episode.tool_calls)
    marker = None if outcomes else _marker(episode)
    return ToolCounts(episodes=1, outcomes=dict(outcomes), unread={} if marker is None else {marker: 1})


def _marker(episode: Episode) -> str | None:
    """The first marker of a call in what the model wrote."""
    return next((marker for marker in CALL_MARKERS if any(marker in turn.text for turn in episode.turns)), None)


class ToolHealth:
    """Counts of a run and of its last episodes."""

    def __init__(self, *, offered: bool, window: int) -> None:
        """Empty counts.

        Args:
            offered: Whether the job offers tools.
            window: Episodes of a step.
        """
        self._offered = offered
        self._window: deque[ToolCounts] = deque(maxlen=max(1, min(WINDOW_EPISODES, window)))
        self.total = ToolCounts()
        """Over the whole run."""

    def add(self, group: Group) -> None:
        """Counts the scored episodes of a group; a row may offer no tools."""
        if not self._offered or (group.scenario.tools is not None and not group.scenario.tools):
            return
        for episode in group.episodes:
            if episode.reward is not None:
                counts = counts_of(episode)
                self._window.append(counts)
                self.total = self.total.plus(counts)

    def recent(self) -> ToolCounts:
        """Counts of the last episodes. Callable from any thread."""
        counts = ToolCounts()
        for each in list(self._window):
            counts = counts.plus(each)
        return counts

    def warning(self) -> ToolWarning | None:
        """The warning about the last episodes, once there are as many as the window holds."""
        return self.recent().warning() if len(self._window) == self._window.maxlen else None
