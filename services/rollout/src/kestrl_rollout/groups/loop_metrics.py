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
log = logging.getLogger(__name__)


class LoopMetrics:
    """Metrics of agent loops: those that can be used, and a warning for others, once for each loop."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def usable(self, loop: str, metrics: Mapping[Any, Any]) -> dict[str, float]:
        """The metrics of an episode that can be averaged; see `kestrl.rewards.checking.usable_metrics`."""
        usable, problems = usable_metrics(metrics)
        if problems and loop not in self._warned:
            self._warned.add(loop)
            log.warning("%s: %s; it is left out, and counted in %s", loop, problems[0].text, LEFT_OUT)
        return usable


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
