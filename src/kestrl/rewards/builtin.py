"""The rewards that come with KestRL. The manifest names them without an import path."""

from __future__ import annotations

from collections.abc import Callable

from kestrl.episode import CallOutcome
from kestrl.rewards import Attempt, Score
from kestrl.rewards.answers import accepted_answers, answer_of, last_number, marked, normalised, number

MALFORMED = frozenset(
    {CallOutcome.INVALID_JSON, CallOutcome.UNKNOWN_TOOL, CallOutcome.SCHEMA_VIOLATION, CallOutcome.TRUNCATED}
)


def exact_answer(attempt: Attempt) -> Score:
    """1 when the answer is the truth but for case, spacing and punctuation at the edges, else 0.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    given = normalised(answer_of(attempt.episode))
    return _right(any(given == normalised(truth) for truth in accepted_answers(attempt.scenario.ground_truth)))


def flexible_answer(attempt: Attempt) -> Score:
    r"""1 when the answer says the truth, else 0.

    A truth that is a number is compared as one (72, 72.0, $72 and, for 1000, 1,000) with the marked answer (`#### 72`,
    `\boxed{72}`, `Answer: 72`), or else with the last number of the text. Any other truth is compared as text with the whole
    answer or with the marked one. A worked solution that ends in `#### 72` may serve as the truth.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    answer = answer_of(attempt.episode)
    return _right(any(_says(answer, truth) for truth in accepted_answers(attempt.scenario.ground_truth)))


def _says(answer: str, truth: str) -> bool:
    if "####" in truth:
        truth = marked(truth) or truth
    wanted = number(truth)
    candidate = marked(answer)
    if wanted is not None:
        return wanted == last_number(answer if candidate is None else candidate)
    return normalised(truth) in (normalised(answer), normalised(candidate or ""))


def _right(correct: bool) -> Score:
    return Score(value=float(correct), metrics={"answer_correct": float(correct)})


def tool_format(attempt: Attempt) -> Score:
    """The share of tool calls that could be dispatched; 1 when there were none, since none was malformed."""
    calls = attempt.episode.tool_calls
    malformed = sum(call.outcome in MALFORMED for call in calls)
    share = 1.0 - malformed / len(calls) if calls else 1.0
    return Score(value=share, metrics={"malformed_calls": float(malformed)})


def loop_reward(attempt: Attempt) -> Score:
    """The reward that the agent loop returned.

    Raises:
        ValueError: It returned none.
    """
    if attempt.episode.loop_reward is None:
        raise ValueError(
            f"the agent loop returned no reward (the episode ended as {attempt.episode.stop_reason}); return a number on "
            "every path, also where LimitReached is raised"
        )
    return Score(value=attempt.episode.loop_reward)


BUILT_IN: dict[str, Callable[[Attempt], Score]] = {
    "exact_answer": exact_answer,
    "flexible_answer": flexible_answer,
    "format": tool_format,
    "loop_reward": loop_reward,
}
"""By the name a manifest uses."""
