"""Metrics, info and reward that an agent loop reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from kestrl.agents.runs import invalid
from kestrl.data.values import Unusable, as_json
from kestrl.episode import LARGEST_REWARD, Json
from kestrl.errors import JudgeFailure, UserCodeError, described
from kestrl.rewards import Score
from kestrl.rewards.checking import LEFT_OUT, as_score, usable_metrics

REWARD = "loop_reward"
"""Name of the metric of a returned reward."""
MAX_INFO = 256 * 1024
"""Maximum characters of an episode's info as JSON."""
REWRITES = "rewrites_history"
"""Metric: 1 for an episode whose agent wrote its history anew with most calls."""
REWRITING = (
    "edited_assistant",
    "system_changed",
    "tools_changed",
    "compacted",
    "unproven",
    "template_rewrites_history",
)
"""Reasons of forks by which a conversation goes on in another row."""
FEWEST_FORKS = 2
log = logging.getLogger(__name__)


class LoopMetrics:
    """Metrics of agent loops: those that can be used, and a warning for others, once for each loop."""

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self._warned_of_rewriting: set[str] = set()

    def usable(self, loop: str, metrics: Mapping[Any, Any]) -> dict[str, float]:
        """The metrics of an episode that can be averaged; see `kestrl.rewards.checking.usable_metrics`."""
        usable, problems = usable_metrics(metrics)
        if problems and loop not in self._warned:
            self._warned.add(loop)
            log.warning("%s: %s; it is left out, and counted in %s", loop, problems[0].text, LEFT_OUT)
        if (rewriting := rewriting_of(usable)) is not None:
            usable[REWRITES] = 1.0
            if loop not in self._warned_of_rewriting:
                self._warned_of_rewriting.add(loop)
                log.warning("%s: %s", loop, rewriting)
        return usable


def rewriting_of(metrics: Mapping[str, float]) -> str | None:
    """What an agent that writes its history anew with most calls costs, by its metrics; None for another."""
    forks = {reason: metrics.get(f"forks.{reason}", 0.0) for reason in REWRITING}
    count, later_turns = sum(forks.values()), metrics.get("num_turns", 0.0) - 1
    if count < FEWEST_FORKS or 2 * count < later_turns:
        return None
    tokens = sum(metrics.get(f"fork_tokens.{reason}", 0.0) for reason in REWRITING)
    reasons = ", ".join(f"{reason} {number:g}" for reason, number in forks.items() if number)
    return (
        f"{count:g} of {later_turns:g} later calls of an episode did not continue what was sampled ({reasons}): "
        f"{tokens:g} tokens of prompts were computed once more, and are rows of their own in training; have the agent "
        "send its history back as it was, or expect a cost that grows with the square of its turns"
    )


def returned_reward(loop: str, returned: object) -> Score | None:
    """The reward that a loop returned, or None if it returned nothing.

    Raises:
        UserCodeError: It is not a number, not finite or too large (code `loop_reward_invalid`).
    """
    if returned is None:
        return None
    try:
        score = as_score(loop, returned)
    except JudgeFailure as error:
        raise UserCodeError(
            f"{error}; a loop returns its reward as a number or a Score, or nothing", code="loop_reward_invalid"
        ) from error
    except UserCodeError:
        raise
    except BaseException as error:  # a number or mapping of a user's class
        raise UserCodeError(f"{loop}: {described(error)}", code="loop_reward_invalid") from error
    if abs(score.value) > LARGEST_REWARD:
        raise UserCodeError(
            f"{loop}: returned the reward {score.value:g}; at most {LARGEST_REWARD:g} is taken",
            code="loop_reward_invalid",
        )
    return score


def checked_info(agent: str, info: Mapping[Any, Any]) -> Mapping[str, Json]:
    """The info of an episode as JSON.

    Raises:
        UserCodeError: It has none, or is too long (code `agent_result_invalid`).
    """
    try:
        checked: Any = as_json(info, "info")
    except Unusable as error:
        raise invalid(agent, str(error)) from error
    length = len(json.dumps(checked))
    if length > MAX_INFO:
        raise invalid(agent, f"info has {length} characters as JSON; at most {MAX_INFO} are kept")
    return checked
