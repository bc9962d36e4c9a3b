"""Converts the return value of a reward to a `Score` or a typed failure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeGuard

from kestrl.episode import RESERVED_METRICS
from kestrl.errors import JudgeFailure, described, encodable, shown
from kestrl.rewards import Score
from kestrl.tools.shapes import is_mapping

NOT_A_NUMBER = "reward_not_a_number"
NOT_TEXT = "reward_answer_not_text"
NOT_FINITE = "reward_not_finite"
WRONG_TURNS = "reward_turns"
LEFT_OUT = "metrics_left_out"
"""Metric with the number of an episode's metrics that cannot be used."""
MAX_PROBLEMS = 5
"""Maximum number of an episode's unusable metrics that are described."""
MAX_METRICS = 1_000
"""Maximum number of metrics of an episode."""
LONGEST_NAME = 200
"""Maximum characters of the name of a metric."""
LONGEST_ANSWER = 10_000
"""Characters of an answer that are kept."""


def as_score(
    name: str, returned: object, *, turns: int | None = None, report: Callable[[UnusableMetric], None] | None = None
) -> Score:
    """Checks the return value of the reward `name`.

    Args:
        name: Of the reward, for messages.
        returned: The value.
        turns: Turns of the episode; None where single turns cannot be scored.
        report: Called for metrics that are left out, as in `usable_metrics`.

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
    usable, problems = usable_metrics(metrics)
    if report is not None:
        for problem in problems:
            report(problem)
    return Score(
        value=_number(name, "value", returned.value),
        turns=_turns(name, returned.turns, turns or 0) if len(returned.turns) else (),
        metrics=usable,
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


@dataclass(frozen=True, slots=True)
class UnusableMetric:
    """Why a metric is left out."""

    text: str
    by_value: bool = False
    """Whether another value of it can be used, so that the program may be right."""


def usable_metrics(metrics: Mapping[Any, Any]) -> tuple[dict[str, float], list[UnusableMetric]]:
    """The metrics that can be averaged, and why others cannot, of which `LEFT_OUT` has the number.

    Names and values of metrics may be made of the model's text, which must not decide whether its episode counts: so
    nothing fails by them.
    """
    usable: dict[str, float] = {}
    problems: list[UnusableMetric] = []
    left_out = 0
    for name, value in metrics.items():
        problem = _metric_problem(name, value)
        if problem is None and len(usable) == MAX_METRICS:
            problem = UnusableMetric(f"there are {len(metrics)} metrics; at most {MAX_METRICS} are taken")
        if problem is None:
            usable[name] = _as_float(value)
            continue
        left_out += 1
        if len(problems) < MAX_PROBLEMS:
            problems.append(problem)
    return (usable | {LEFT_OUT: float(left_out)} if left_out else usable), problems


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


def _metric_problem(name: object, value: object) -> UnusableMetric | None:
    if not isinstance(name, str) or not name.isprintable():
        return UnusableMetric(f"the metric {shown(name)} has a name that is not a printable string")
    if len(name) > LONGEST_NAME:
        return UnusableMetric(f"the metric {shown(name)} has a name of {len(name)} characters; at most {LONGEST_NAME}")
    if name in RESERVED_METRICS:
        return UnusableMetric(f"the metric {name!r} is reserved by the learner; use another name")
    if not isinstance(value, Real):  # True and False are averaged as 1 and 0, and nothing is trained on them
        return UnusableMetric(f"the metric {name!r} is a {type(value).__name__}; report a number")
    try:
        finite = math.isfinite(_as_float(value))
    except Exception as error:  # noqa: BLE001 - reported: a number of a user's class
        return UnusableMetric(f"the metric {name!r} is no number: {described(error)}")
    if not finite:
        return UnusableMetric(
            f"the metric {name!r} is not finite; omit it if there is nothing to report", by_value=True
        )
    return None


def _number(name: str, label: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise JudgeFailure(
            f"{name}: its {label} is {shown(value)} ({type(value).__name__}); return a float or a Score",
            code=NOT_A_NUMBER,
        )
    number = _as_float(value)
    if not math.isfinite(number):
        raise JudgeFailure(f"{name}: its {label} is {number}, which no gradient can use", code=NOT_FINITE)
    return number


def _as_float(value: Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
