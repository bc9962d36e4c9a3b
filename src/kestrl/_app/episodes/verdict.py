"""Why an episode earned what it earned: its reward in parts, its failure in words, and the turn to look at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kestrl.episode import CallOutcome, Episode, StopReason
from kestrl.errors import Boundary

BOUNDARIES = {
    Boundary.POLICY: "the model's own output could not be used",
    Boundary.TOOL: "a tool failed",
    Boundary.SANDBOX: "the sandbox of a tool failed",
    Boundary.JUDGE: "it could not be scored",
    Boundary.ENGINE: "the inference engine failed",
    Boundary.INFRASTRUCTURE: "the platform failed",
    Boundary.USER_CODE: "the job's own code failed",
    Boundary.ENVIRONMENT: "the environment failed",
}
STOPS = {
    StopReason.ANSWERED: "the model answered without calling a tool",
    StopReason.FINAL_TOOL: "a tool ended the episode",
    StopReason.MAX_TURNS: "the limit of turns was reached",
    StopReason.MAX_TOKENS: "the context or the token budget was full",
    StopReason.AGENT_LIMIT: "a limit of the agent's own was reached",
    StopReason.MODEL_BEHAVIOR: "the agent gave up on what the model wrote",
    StopReason.FAILED: "something other than the model failed",
}
CALLS = {
    CallOutcome.INVALID_JSON: "a call's arguments are not JSON",
    CallOutcome.UNKNOWN_TOOL: "a call names a tool that does not exist",
    CallOutcome.SCHEMA_VIOLATION: "a call's arguments violate the tool's schema",
    CallOutcome.TRUNCATED: "the turn ended inside a call",
    CallOutcome.TOOL_ERROR: "a tool refused the request",
}


@dataclass(frozen=True, slots=True)
class RewardPart:
    """A component of a reward."""

    name: str
    score: float
    weight: float | None
    """None in episodes that were stored without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeVerdict:
    """Why an episode earned what it earned."""

    reward: float | None
    parts: Sequence[RewardPart]
    failure: str
    """The failure in words; empty if nothing but the model failed."""
    code: str
    """`boundary/code`; empty as above."""
    message: str
    stop: str
    turn: int | None
    """Index of the turn to look at; None if there is no turn."""
    cause: str
    """Why this turn."""


def verdict_of(episode: Episode, differs: int | None) -> EpisodeVerdict:
    """The verdict of an episode.

    Args:
        episode: The episode.
        differs: Index of the first turn that differs from the episode beside it; None if there is none.
    """
    failure = episode.failure
    turn, cause = _turn(episode, differs)
    return EpisodeVerdict(
        reward=episode.reward,
        parts=[RewardPart(name, episode.rewards[name], episode.reward_weights.get(name)) for name in episode.rewards],
        failure="" if failure is None else f"{BOUNDARIES[failure.boundary]}: {failure.code.replace('_', ' ')}",
        code="" if failure is None else f"{failure.boundary}/{failure.code}",
        message="" if failure is None else failure.message,
        stop=STOPS[episode.stop_reason],
        turn=turn,
        cause=cause,
    )


def _turn(episode: Episode, differs: int | None) -> tuple[int | None, str]:
    if not episode.turns:
        return None, ""
    last = episode.turns[-1].index
    if episode.failure is not None and episode.failure.boundary is not Boundary.JUDGE:
        return last, "the failure came after this turn"
    broken = next((call for call in episode.tool_calls if call.outcome in CALLS), None)
    if broken is not None:
        return broken.turn, CALLS[broken.outcome]
    cut = next((turn for turn in episode.turns if turn.finish_reason == "length"), None)
    if cut is not None:
        return cut.index, "the turn was cut at its limit of tokens"
    if differs is not None:
        return differs, "the first difference from the episode beside it"
    return last, "the last turn"
