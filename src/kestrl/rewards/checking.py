"""Converts the return value of a reward to a `Score` or a typed failure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TypeGuard

from kestrl.episode import RESERVED_METRICS
from kestrl.errors import JudgeFailure, UserCodeError, encodable, shown
from kestrl.rewards import Score
from kestrl.tools.shapes import is_mapping

NOT_A_NUMBER = "reward_not_a_number"
NOT_TEXT = "reward_answer_not_text"
NOT_FINITE = "reward_not_finite"
RESERVED = "reserved_metric"
WRONG_TURNS = "reward_turns"
METRIC_INVALID = "metric_invalid"
MAX_METRICS = 1_000
"""Maximum number of metrics of an episode."""
LONGEST_NAME = 200
"""Maximum characters of the name of a metric."""
LONGEST_ANSWER = 10_000
"""Characters of an answer that are kept."""


def as_score(name: str, returned: object, *, turns: int | None = None) -> Score:
    """Checks the return value of the reward `name`.

    Args:
        name: Of the reward, for messages.
        returned: The value.
        turns: Turns of the episode; None where single turns cannot be scored.

    Raises:
        JudgeFailure: A value is not a number (nor a bool, whose worth is undefined), or not finite, or there is another
            number of turn rewards than turns.
        UserCodeError: The metrics are too many, or have a name that cannot be one (code `metric_invalid`).
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
        return None if answer is None else _kept(encodable(answer))
    raise JudgeFailure(f"{name}: its answer is a {type(answer).__name__}, not text", code=NOT_TEXT)


def _kept(answer: str) -> str:
    """An answer, of a long one the beginning and a digest, so that different answers stay different."""
    if len(answer) <= LONGEST_ANSWER:
        return answer
    digest = hashlib.sha256(answer.encode()).hexdigest()
    return f"{answer[: LONGEST_ANSWER - 100]} [cut: {len(answer)} characters, sha256 {digest[:16]}]"


def name_problem(name: object) -> str | None:
    """Why a metric cannot have this name; None if it can."""
    if not isinstance(name, str) or not name.isprintable():
        return "has a name that is not a printable string"
    if len(name) > LONGEST_NAME:
        return f"has a name of {len(name)} characters; at most {LONGEST_NAME} are taken"
    return None


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
    if len(metrics) > MAX_METRICS:
        raise UserCodeError(f"{name}: {len(metrics)} metrics; at most {MAX_METRICS} are taken", code=METRIC_INVALID)
    for key in metrics:
        if problem := name_problem(key):
            raise UserCodeError(f"{name}: the metric {shown(key)} {problem}", code=METRIC_INVALID)
    taken = sorted(RESERVED_METRICS & set(metrics))
    if taken:
        raise JudgeFailure(
            f"{name}: the metric {taken[0]!r} is reserved by the learner; use another name", code=RESERVED
        )
    # Metrics may be True or False: they are averaged as 1 and 0, and nothing is trained on them.
    return {
        key: _number(name, f"metric {key!r}", float(value) if isinstance(value, bool) else value)
        for key, value in metrics.items()
    }


def _number(name: str, what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise JudgeFailure(
            f"{name}: its {what} is {shown(value)} ({type(value).__name__}); return a float or a Score",
            code=NOT_A_NUMBER,
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise JudgeFailure(f"{name}: its {what} is {number}, which no gradient can use", code=NOT_FINITE)
    return number
