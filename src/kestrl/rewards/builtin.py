"""Built-in rewards, which a manifest names without an import path."""

from __future__ import annotations

import re
from collections.abc import Callable

from kestrl.episode import CallOutcome
from kestrl.rewards import Attempt, Score, mathematics
from kestrl.rewards.answers import MAX_READ, accepted_answers, answer_of, marked, matches, normalised

MALFORMED = frozenset(
    {CallOutcome.INVALID_JSON, CallOutcome.UNKNOWN_TOOL, CallOutcome.SCHEMA_VIOLATION, CallOutcome.TRUNCATED}
)

_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*\.?")


def exact_answer(attempt: Attempt) -> Score:
    """1 if the answer equals the expected one, ignoring case, spacing and punctuation at the edges, else 0.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    given = normalised(answer_of(attempt.episode))
    return _right(any(given == normalised(expected) for expected in accepted_answers(attempt.scenario.ground_truth)))


def flexible_answer(attempt: Attempt) -> Score:
    r"""1 if the answer contains the expected one, else 0.

    An expected number is compared as a number (72, 72.0, $72 and, for 1000, 1,000) with the marked answer (`#### 72`,
    `\boxed{72}`, `Answer: 72`), or else with the last number of the text. Any other expected answer is compared as text
    with the whole answer or the marked one. The ground truth may be a worked solution that ends in `#### 72`.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    answer = answer_of(attempt.episode)
    return _right(any(matches(answer, expected) for expected in accepted_answers(attempt.scenario.ground_truth)))


def math_answer(attempt: Attempt) -> Score:
    r"""1 if the answer is mathematically equal to the expected one (`\boxed{\frac{1}{2}}` and 0.5), else 0.

    The marked answer (`\boxed{...}`, `#### ...`, `Answer: ...`) is compared, or else the last expression of the text,
    by math-verify, which reads LaTeX and plain expressions. Words are compared as text.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    answer = answer_of(attempt.episode)
    return _right(any(_equal(answer, expected) for expected in accepted_answers(attempt.scenario.ground_truth)))


def _equal(answer: str, expected: str) -> bool:
    expected = marked(expected) or expected
    candidate = marked(answer) or answer[-MAX_READ:]
    if _WORDS.fullmatch(expected.strip()):  # as mathematics, the letters of a word would be factors
        return normalised(expected) == normalised(candidate)
    return mathematics.equal(expected, candidate)


def _right(correct: bool) -> Score:
    return Score(value=float(correct), metrics={"answer_correct": float(correct)})


def tool_format(attempt: Attempt) -> Score:
    """Share of tool calls that could be dispatched; 1 if there were no calls."""
    calls = attempt.episode.tool_calls
    malformed = sum(call.outcome in MALFORMED for call in calls)
    share = 1.0 - malformed / len(calls) if calls else 1.0
    return Score(value=share, metrics={"malformed_calls": float(malformed)})


def loop_reward(attempt: Attempt) -> Score:
    """Reward returned by the agent loop.

    Raises:
        ValueError: The agent loop returned no reward.
    """
    if attempt.episode.loop_reward is None:
        raise ValueError(
            f"the agent loop returned no reward (the episode ended as {attempt.episode.stop_reason}); return a "
            "number on "
            "every path, also where LimitReached is raised"
        )
    return Score(value=attempt.episode.loop_reward)


def overlong(attempt: Attempt, *, max_tokens: int, buffer: int) -> Score:
    """0 for an episode of at most `max_tokens - buffer` sampled tokens, then falling linearly to -1 at `max_tokens`.

    Tokens of prompts and tools do not count. Source: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    Args:
        attempt: The finished episode.
        max_tokens: Sampled tokens from which on the penalty is -1; `agent.maxTokens` as a rule.
        buffer: Length of the band below it, in tokens.

    Raises:
        ValueError: `buffer` is not between 1 and `max_tokens`.
    """
    if not 1 <= buffer <= max_tokens:
        raise ValueError(f"buffer must be between 1 and max_tokens ({max_tokens}), is {buffer}")
    excess = attempt.episode.sampled_tokens - (max_tokens - buffer)
    return Score(value=0.0 - min(max(excess / buffer, 0.0), 1.0), metrics={"overlong": float(excess > 0)})


BUILT_IN: dict[str, Callable[..., Score]] = {
    "exact_answer": exact_answer,
    "flexible_answer": flexible_answer,
    "math_answer": math_answer,
    "format": tool_format,
    "loop_reward": loop_reward,
    "overlong": overlong,
}
"""Built-in rewards by name."""
