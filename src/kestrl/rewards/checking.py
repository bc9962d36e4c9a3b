"""Converts the return value of a reward to a `Score` or a typed failure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from kestrl.episode import RESERVED_METRICS
from kestrl.errors import JudgeFailure
from kestrl.rewards import Score
from kestrl.tools.shapes import is_mapping

NOT_A_NUMBER = "reward_not_a_number"
NOT_FINITE = "reward_not_finite"
RESERVED = "reserved_metric"


def as_score(name: str, returned: object) -> Score:
    """Checks the return value of the reward `name`.

    Raises:
        JudgeFailure: The value is not a number (nor a bool, whose worth is undefined), or not finite.
    """
    if not isinstance(returned, Score):
        return Score(value=_number(name, "value", returned))
    metrics: Any = returned.metrics
    if not is_mapping(metrics):
        raise JudgeFailure(f"{name}: its metrics are a {type(metrics).__name__}, not a mapping", code=NOT_A_NUMBER)
    return Score(value=_number(name, "value", returned.value), metrics=_metrics(name, metrics))


def _metrics(name: str, metrics: Mapping[Any, Any]) -> dict[str, float]:
    taken = sorted(RESERVED_METRICS & {str(key) for key in metrics})
    if taken:
        raise JudgeFailure(
            f"{name}: the metric {taken[0]!r} is reserved by the learner; use another name", code=RESERVED
        )
    # Metrics may be True or False: they are averaged as 1 and 0, and nothing is trained on them.
    return {
        str(key): _number(name, f"metric {key!r}", float(value) if isinstance(value, bool) else value)
        for key, value in metrics.items()
    }


def _number(name: str, what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise JudgeFailure(
            f"{name}: its {what} is {value!r:.100} ({type(value).__name__}); return a float or a Score",
            code=NOT_A_NUMBER,
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise JudgeFailure(f"{name}: its {what} is {number}, which no gradient can use", code=NOT_FINITE)
    return number
