"""Health of a job's tools: how often episodes call them, how the calls end, and when to warn. Pure.

A run whose model never calls a tool may still have rising rewards, so that nothing else shows it.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import StrEnum
from typing import NamedTuple

from kestrl.episode import CallOutcome, Episode, Group
from kestrl.runstate.history import ToolCounts

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


def tool_warning(counts: ToolCounts) -> ToolWarning | None:
    """What is wrong when episodes were offered tools and no call worked; None if one did."""
    if not counts.episodes or counts.outcomes.get(CallOutcome.OK):
        return None
    if counts.calls:
        failed = ", ".join(f"{name} {count}" for name, count in sorted(counts.outcomes.items()))
        return ToolWarning(
            Warn.CALLS_FAILING,
            f"none of the {counts.calls} tool calls of the last {counts.episodes} episodes succeeded ({failed}); see "
            "`kestrl episodes show` for the calls and what the model was answered",
        )
    none = f"none of the last {counts.episodes} episodes called a tool, although tools were offered"
    if counts.unread:
        marker, count = max(counts.unread.items(), key=lambda item: item[1])
        return ToolWarning(
            Warn.NO_TOOL_CALL,
            f"{none}; {sum(counts.unread.values())} of them contain what looks like a call in a format that is not "
            f"the job's ({marker} in {count}): check agent.toolCallFormat and the chat template",
        )
    return ToolWarning(
        Warn.NO_TOOL_CALL,
        f"{none}; see `kestrl episodes show` for what the model answers, and ask for the tools in the prompt",
    )


def outcome_shares(counts: ToolCounts) -> dict[str, float]:
    """Share of each outcome in all calls, 0 for one that did not occur; empty without calls."""
    calls = counts.calls
    return {outcome: counts.outcomes.get(outcome, 0) / calls for outcome in CallOutcome} if calls else {}


def counts_of(episode: Episode) -> ToolCounts:
    """The counts of one episode that was offered tools."""
    outcomes = Counter(str(call.outcome) for call in episode.tool_calls)
    marker = None if outcomes else _marker(episode)
    return ToolCounts(episodes=1, outcomes=dict(outcomes), unread={} if marker is None else {marker: 1})


def _marker(episode: Episode) -> str | None:
    """The first marker of a call in what the model wrote."""
    return next((marker for marker in CALL_MARKERS if any(marker in turn.text for turn in episode.turns)), None)


class ToolHealth:
    """Tool calls of the last episodes."""

    def __init__(self, *, offered: bool, window: int) -> None:
        """Empty counts.

        Args:
            offered: Whether the job offers tools.
            window: Episodes of a step.
        """
        self._offered = offered
        self._window: deque[ToolCounts] = deque(maxlen=max(1, min(WINDOW_EPISODES, window)))

    def add(self, group: Group) -> ToolCounts:
        """Counts the scored episodes of a group and returns their counts; a row may offer no tools."""
        counts = ToolCounts()
        if not self._offered or (group.scenario.tools is not None and not group.scenario.tools):
            return counts
        for episode in group.episodes:
            if episode.reward is not None:
                self._window.append(counts_of(episode))
                counts = counts.plus(self._window[-1])
        return counts

    def recent(self) -> ToolCounts:
        """Counts of the last episodes. Callable from any thread."""
        counts = ToolCounts()
        for step_counts in list(self._window):
            counts = counts.plus(step_counts)
        return counts

    def warning(self) -> ToolWarning | None:
        """The warning about the last episodes, once there are as many as the window holds."""
        return tool_warning(self.recent()) if len(self._window) == self._window.maxlen else None
