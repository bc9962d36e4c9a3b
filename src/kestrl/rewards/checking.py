"""Converts the return value of a reward to a `Score` or a typed failure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

from kestrl.episode import RESERVED_METRICS
from kestrl.errors import JudgeFailure, encodable
from kestrl.rewards import Score
from kestrl.tools.shapes import is_mapping

NOT_A_NUMBER = "reward_not_a_number"
NOT_TEXT = "reward_answer_not_text"
NOT_FINITE = "reward_not_finite"
RESERVED = "reserved_metric"
WRONG_TURNS = "reward_turns"


def as_score(name: str, returned: object, *, turns: int | None = None) -> Score:
    """Checks the return value of the reward `name`.

    Args:
        name: Of the reward, for messages.
        returned: The value.
        turns: Turns of the episode; None where single turns cannot be scored.

    Raises:
        JudgeFailure: A value is not a number (nor a bool, whose worth is undefined), or not finite, or there is another
            number of turn rewards than turns.
    """
    if turns is not None and _is_sequence(returned):
        return Score(turns=_turns(name, returned, turns))
    if not isinstance(returned, Score):
        return Score(value=_number(name, "value", returned))
    metrics: Any = returned.metrics
    if not is_mapping(metrics):
        raise JudgeFailure(f"{name}: its metrics are a {type(metrics).__name__}, not a mapping", code=NOT_A_NUMBER)
    return Score(
        value=_number(name, "value", returned.value),
        turns=_turns(name, returned.turns, turns or 0) if len(returned.turns) else (),
        metrics=_metrics(name, metrics),
        answer=_answer(name, returned.answer),
    )


def _answer(name: str, answer: object) -> str | None:
    if answer is None or isinstance(answer, str):
        return None if answer is None else encodable(answer)
    raise JudgeFailure(f"{name}: its answer is a {type(answer).__name__}, not text", code=NOT_TEXT)


def _is_sequence(returned: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(returned, list | tuple)


def _turns(name: str, values: Sequence[Any], turns: int) -> tuple[float, ...]:
    if len(values) != turns:
        raise JudgeFailure(
            f"{name}: it returned {len(values)} turn rewards for an episode of "
            f"{turns} turns; return one number for each of attempt.episode.turns, or one for the episode",
            code=WRONG_TURNS,
        )
    return tuple(_number(name, f"reward of turn {turn}", value) for turn, value in enumerate(values))


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
