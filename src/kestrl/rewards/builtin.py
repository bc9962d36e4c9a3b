"""Built-in rewards, which a manifest names without an import path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from kestrl.episode import ENVIRONMENT_REWARD, ENVIRONMENT_WEIGHTS, CallOutcome
from kestrl.rewards import Attempt, Score, mathematics
from kestrl.rewards.answers import (
    MAX_READ,
    accepted_answers,
    answer_of,
    compared_part,
    marked,
    matches,
    normalised,
)
from kestrl.rewards.boxed import Comparison, Shaping, canonical, last_boxed, shaped
from kestrl.rewards.mathematics import Reading
from kestrl.tools.shapes import is_mapping

MALFORMED = frozenset(
    {CallOutcome.INVALID_JSON, CallOutcome.UNKNOWN_TOOL, CallOutcome.SCHEMA_VIOLATION, CallOutcome.TRUNCATED}
)

_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s'-]+[^\W\d_]+)*\.?")


def exact_answer(attempt: Attempt) -> Score:
    """1 if the answer equals the expected one, ignoring case, spacing and punctuation at the edges, else 0.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    answer = normalised(answer_of(attempt.episode))
    accepted = accepted_answers(attempt.scenario.ground_truth)
    return _right(any(answer == normalised(expected) for expected in accepted), answer=answer)


def flexible_answer(attempt: Attempt) -> Score:
    r"""1 if the answer contains the expected one, else 0.

    An expected number is compared as a number (72, 72.0, $72 and, for 1000, 1,000) with the marked answer (`#### 72`,
    `\boxed{72}`, `Answer: 72`), or else with the last number of the text. Any other expected answer is compared as text
    with the whole answer or the marked one. The ground truth may be a worked solution that ends in `#### 72`.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    answer = answer_of(attempt.episode)
    accepted = accepted_answers(attempt.scenario.ground_truth)
    return _right(any(matches(answer, expected) for expected in accepted), answer=compared_part(answer, accepted[0]))


def math_answer(attempt: Attempt) -> Score:
    r"""1 if the answer is mathematically equal to the expected one (`\boxed{\frac{1}{2}}` and 0.5), else 0.

    The answer is read and compared by math-verify: what stands in `\boxed{...}`, behind `####` or `Answer:`, or in the
    last formula of the text. The answer that is recorded, shown and voted with is the one that was compared. Words are
    compared as text.

    Raises:
        ValueError: The scenario has no ground truth.
    """
    answer = answer_of(attempt.episode)
    accepted = [marked(expected) or expected for expected in accepted_answers(attempt.scenario.ground_truth)]
    reading = _read(marked(answer) or answer[-MAX_READ:], accepted)
    return _right(reading.correct, answer=reading.answer)


def boxed_answer(
    attempt: Attempt, *, compare: Comparison = "exact", shaping: Shaping = "none", window: int = 300
) -> Score:
    r"""1 if the answer in the last `\boxed{...}` is the expected one, else -1, shaped by the calls of tools.

    Only the end of the answer is searched, and only what the model wrote there: reasoning in `<think>` and the results
    of tools are not its answer. Source: verl's `math_dapo.compute_score(strict_box_verify=True)` and its recipe for
    ReTool, which search the decoded response with the results of tools in it.

    Args:
        attempt: The finished episode.
        compare: `exact` compares numbers and simple fractions as numbers and anything else as LaTeX without spacing;
            `text` compares character for character, as verl does; `math` compares by math-verify.
        shaping: `none`, `tool_bonus` (a wrong answer is `min(-0.6, -1 + 0.1 t)` after t turns that called a tool), or
            `tool_penalty` (0.4 less without a call, right or wrong). A call that could not be dispatched is none.
        window: Characters from the end that are searched; the whole of `\boxed{...}` must lie in them. verl searches
            300 and compares in the last 100 of these.

    Raises:
        ValueError: The scenario has no ground truth, or an argument is not one of these.
    """
    if window < 1:
        raise ValueError(f"window must be at least 1, is {window}")
    accepted = accepted_answers(attempt.scenario.ground_truth)
    boxed = last_boxed(answer_of(attempt.episode)[-window:])
    reading = Reading(correct=False, answer="") if boxed is None else _boxed_reading(boxed, accepted, compare)
    calls = {call.turn for call in attempt.episode.tool_calls if call.outcome not in MALFORMED}
    return Score(
        value=shaped(reading.correct, len(calls), shaping),
        metrics={"answer_correct": float(reading.correct), "boxed": float(boxed is not None)},
        answer=reading.answer,
    )


def _boxed_reading(boxed: str, accepted: Sequence[str], compare: Comparison) -> Reading:
    if compare == "text":
        return Reading(boxed in accepted, boxed)
    if compare == "exact":
        answer = canonical(boxed)
        return Reading(answer in map(canonical, accepted), answer)
    if compare == "math":
        return _read(boxed, accepted)
    raise ValueError(f"compare must be exact, text or math, is {compare!r}")


def _read(candidate: str, accepted: Sequence[str]) -> Reading:
    """The answer of a text, by math-verify unless words are expected: as mathematics, the letters of a word would be
    factors.
    """
    words = [normalised(expected) for expected in accepted if _WORDS.fullmatch(expected.strip())]
    formulas = [expected for expected in accepted if not _WORDS.fullmatch(expected.strip())]
    answer = normalised(candidate)
    if answer in words or not formulas:
        return Reading(answer in words, answer)
    reading = mathematics.read(candidate, formulas)
    return reading if reading.answer else Reading(reading.correct, answer)


def _right(correct: bool, *, answer: str) -> Score:
    return Score(value=float(correct), metrics={"answer_correct": float(correct)}, answer=answer)


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


def environment_reward(attempt: Attempt, *, weights: Mapping[str, float] | None = None) -> Score:
    """Sum of what `get_reward()` of the episode's environments returned; parts are metrics, `reward.NAME`.

    Args:
        attempt: The finished episode.
        weights: Weight of each part of a reward with several; for those that are not here, the environment's own, or 1.

    Raises:
        ValueError: None of them has a reward, or there is no such part.
    """
    states = attempt.episode.environments.values()
    rewarded = [state for state in states if is_mapping(state) and ENVIRONMENT_REWARD in state]
    if not rewarded:
        raise ValueError(
            "no environment of this episode has a reward; give one of the row's environments a method "
            f"{ENVIRONMENT_REWARD}() that returns a number"
        )
    parts: dict[str, float] = {}
    weighed: dict[str, float] = {}
    for state in rewarded:
        reward, own_weights = state[ENVIRONMENT_REWARD], state.get(ENVIRONMENT_WEIGHTS)
        weighed |= {str(name): float(weight) for name, weight in own_weights.items()} if is_mapping(own_weights) else {}
        for name, value in reward.items() if is_mapping(reward) else (("", reward),):
            parts[name] = parts.get(name, 0.0) + float(value)
    unknown = sorted(set(weights or {}) - set(parts))
    if unknown:
        part_names = ", ".join(filter(None, parts)) or "none"
        raise ValueError(f"weights: the environment's reward has no part {', '.join(unknown)} (it has: {part_names})")
    weighed |= weights or {}
    total = math.fsum(weighed.get(name, 1.0) * value for name, value in parts.items())
    return Score(value=total, metrics={f"reward.{name}": value for name, value in parts.items() if name})


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
