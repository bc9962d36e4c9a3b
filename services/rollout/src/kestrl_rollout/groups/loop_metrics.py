"""Metrics and reward that an agent loop reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from kestrl.episode import LARGEST_REWARD, RESERVED_METRICS
from kestrl.errors import JudgeFailure, UserCodeError, described, shown
from kestrl.rewards import Score
from kestrl.rewards.checking import MAX_METRICS, METRIC_INVALID, as_score, name_problem

REWARD = "loop_reward"
"""Name of the metric of a returned reward."""


def usable_metrics(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """The valid metrics. Invalid ones are left out: the episode fails because of them."""
    usable = ((name, float(value)) for name, value in metrics.items() if _problem(name, value) is None)
    return dict(islice(usable, MAX_METRICS))


def check_metrics(metrics: Mapping[Any, Any]) -> None:
    """Checks a loop's metrics.

    Raises:
        UserCodeError: A metric is not a finite number, its name is reserved or none, or there are too many (code
            `metric_invalid`).
    """
    if len(metrics) > MAX_METRICS:
        raise UserCodeError(f"agent loop: {len(metrics)} metrics; at most {MAX_METRICS} are taken", code=METRIC_INVALID)
    for name, value in metrics.items():
        problem = _problem(name, value)
        if problem is not None:
            raise UserCodeError(f"agent loop: the metric {shown(name)} {problem}", code=METRIC_INVALID)


def returned_reward(loop: str, returned: object) -> Score | None:
    """The reward that a loop returned, or None if it returned nothing.

    Raises:
        UserCodeError: It is not a number, not finite or too large (code `loop_reward_invalid`).
    """
    if returned is None:
        return None
    try:
        score = as_score(f"agent.loop {loop}", returned)
    except JudgeFailure as error:
        raise UserCodeError(
            f"{error}; a loop returns its reward as a number or a Score, or nothing", code="loop_reward_invalid"
        ) from error
    except UserCodeError:
        raise
    except BaseException as error:  # a number or mapping of a user's class
        raise UserCodeError(f"agent.loop {loop}: {described(error)}", code="loop_reward_invalid") from error
    if abs(score.value) > LARGEST_REWARD:
        raise UserCodeError(
            f"agent.loop {loop}: returned the reward {score.value:g}; at most {LARGEST_REWARD:g} is taken",
            code="loop_reward_invalid",
        )
    return score


def _problem(name: Any, value: Any) -> str | None:
    if problem := name_problem(name):
        return problem
    if name in RESERVED_METRICS:
        return "is reserved by the learner; use another name"
    if not isinstance(value, int | float):
        return f"is a {type(value).__name__}; report a number"
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    return None if finite else "is not finite; omit it if there is nothing to report"
