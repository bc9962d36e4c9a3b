"""The built-in rewards, and what counts as a score."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kestrl.episode import CallOutcome, Episode, Scenario, StopReason, ToolCall
from kestrl.errors import Boundary, JudgeFailure, UserInputError
from kestrl.rewards import Attempt, Score, mathematics
from kestrl.rewards.answers import last_number, marked, normalised, number
from kestrl.rewards.builtin import (
    environment_reward,
    exact_answer,
    flexible_answer,
    math_answer,
    overlong,
    tool_format,
)
from kestrl.rewards.checking import UnusableMetric, as_score
from kestrl.rewards.registry import BUILT_IN
from kestrl.rewards.resolving import resolve
from kestrl.testing.attempts import make_attempt

Make = Callable[..., Episode]
MakeCall = Callable[..., ToolCall]


def attempt(episode: Episode, expected: Any = None) -> Attempt:
    scenario = Scenario(id="s", ordinal=0, messages=[{"role": "user", "content": "?"}], ground_truth=expected)
    return Attempt(scenario=scenario, episode=episode, max_turns=5)


def test_the_config_of_each_is_what_its_function_takes() -> None:
    for name, entry in BUILT_IN.items():
        arguments = list(signature(entry.function).parameters.values())[1:]
        fields = {} if entry.config is None else entry.config.model_fields
        assert [argument.name for argument in arguments] == list(fields), name
        for argument in arguments:
            field = fields[argument.name]
            assert field.is_required() == (argument.default is argument.empty), (name, argument.name)
            assert field.is_required() or (argument.default or {}) == field.default, (name, argument.name)


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("Paris", "paris", 1),
        ("  'Paris'.\n", "Paris", 1),
        ("\uff30aris", "Paris", 1),
        ("<think>London?</think>\nParis", "Paris", 1),
        ("<think>Paris", "Paris", 0),
        ("It is Paris", "Paris", 0),
        ("72", 72, 1),
        ("true", True, 1),
        ("Lyon", ["Paris", "Lyon"], 1),
        ("Lyon", {"answer": "Lyon"}, 1),
        ("", "Paris", 0),
    ],
)
def test_exact_answer(episode: Make, text: str, expected: Any, value: float) -> None:
    score = exact_answer(attempt(episode(text), expected))
    assert (score.value, score.metrics) == (value, {"answer_correct": value})


def test_the_final_tools_answer_is_the_answer(episode: Make, tool_call: MakeCall) -> None:
    calls = (
        tool_call(name="finish", answer="Rome"),
        tool_call(name="finish", answer="Paris"),
        tool_call(CallOutcome.SCHEMA_VIOLATION, answer="Oslo"),
        tool_call(name="search"),
    )
    ended = episode("<tool_call>{}</tool_call>", *calls, stop=StopReason.FINAL_TOOL)
    assert exact_answer(attempt(ended, "Paris")).value == 1
    # The same calls do not count when no tool ended the episode.
    assert exact_answer(attempt(episode("Rome", *calls), "Paris")).value == 0


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        ("So it is 72.", "72", 1),
        ("So it is 72.0", "72", 1),
        ("$1,000", 1000, 1),
        ("1000", "1,000", 1),
        ("x = 7.20e1", 72, 1),
        ("first 5, then 72 apples", 72, 1),
        ("72 at first, then 5", 72, 0),
        ("#### 72\nchecked 5 times", 72, 1),
        (r"so \boxed{72} for 3 reasons", 72, 1),
        ("Answer: 72\n", 72, 1),
        ("The answer is: -3", "-3", 1),
        ("\u22123", "-3", 1),
        ("9-3", "3", 1),
        ("no number", 72, 0),
        ("it is 5 * 9 = 45\n#### 45", "work\n#### 45", 1),
        ("Answer: Paris", "paris", 1),
        ("It is Paris", "Paris", 0),
        ("Paris Lyon Rome", "Lyon", 0),
        ("50%", "50%", 1),
    ],
)
def test_flexible_answer(episode: Make, text: str, expected: Any, value: float) -> None:
    assert flexible_answer(attempt(episode(text), expected)).value == value


@pytest.mark.parametrize(
    ("text", "expected", "value"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"so $x = \frac{5}{72}$", "72", 0),
        (r"so \boxed{\frac{5}{72}}", "72", 0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{x^2+2x-1}", "(x+1)^2", 0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
        (r"\boxed{(0, 1)}", "(0, 1]", 0),
        (r"\boxed{2\sqrt{3}}", r"2\sqrt{3}", 1),
        ("work\n#### 1,000\nchecked 5 times", "#### 1000", 1),
        ("So there are 72 apples.", 72, 1),
        ("Answer: listen", "silent", 0),
        ("Answer: Paris", "paris", 1),
        ("no number", 72, 0),
        (r"\boxed{\text{no", 72, 0),
    ],
)
def test_math_answer(episode: Make, text: str, expected: Any, value: float) -> None:
    score = math_answer(attempt(episode(text), expected))
    assert (score.value, score.metrics) == (value, {"answer_correct": value})


def test_an_answer_that_cannot_be_evaluated_is_not_equal(monkeypatch: pytest.MonkeyPatch, episode: Make) -> None:
    monkeypatch.setattr(mathematics, "CPU_SECONDS", 1)
    assert math_answer(attempt(episode(r"\boxed{9^{9^{9^{9}}}}"), 3)).value == 0


def test_a_comparison_that_fails_is_no_score(monkeypatch: pytest.MonkeyPatch, episode: Make) -> None:
    monkeypatch.setattr(mathematics, "MEMORY_BYTES", "many")
    with pytest.raises(RuntimeError, match="failed to compare"):
        math_answer(attempt(episode(r"\boxed{4}"), 3))


def test_math_answer_without_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kestrl.rewards.resolving.find_spec", lambda name: None)
    with pytest.raises(UserInputError, match=r"spec.rewards\[0\].rule: math_answer needs .*kestrl\[math\]"):
        resolve("math_answer", field="spec.rewards[0].rule")


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00", "about {} or so", "${:,}."]))
def test_a_number_is_found_however_it_is_written(value: int, form: str) -> None:
    text = form.format(value)
    assert last_number(text) == value
    assert number(text) == (value if "about" not in form else None)


@pytest.mark.parametrize(("text", "value"), [("It is _42_.", 42), ("__7__", 7), ("x_42 is the name", None)])
def test_a_number_may_be_emphasised_and_part_of_a_name_is_none(text: str, value: int | None) -> None:
    assert last_number(text) == value


@given(st.text(max_size=60) | st.text("_0.9-+e, a\u2212", max_size=12))
@example("_0")
def test_any_text_can_be_read(text: str) -> None:
    whole, last = number(text), last_number(text)
    assert whole is None or whole == last
    assert marked(text) != ""
    assert "  " not in normalised(text)


@pytest.mark.parametrize("reward", [exact_answer, flexible_answer, math_answer])
@pytest.mark.parametrize("expected", [None, "", " ", [], {}, {"answer": None}])
def test_without_a_ground_truth_there_is_no_score(
    episode: Make, reward: Callable[[Attempt], Score], expected: Any
) -> None:
    with pytest.raises(ValueError, match="no ground_truth"):
        reward(attempt(episode("x"), expected))


def test_format_is_the_share_of_calls_that_could_be_dispatched(episode: Make, tool_call: MakeCall) -> None:
    outcomes = [CallOutcome.OK, CallOutcome.TOOL_ERROR, CallOutcome.INVALID_JSON, CallOutcome.TRUNCATED]
    score = tool_format(attempt(episode("x", *(tool_call(outcome) for outcome in outcomes))))
    assert (score.value, score.metrics) == (0.5, {"malformed_calls": 2.0})
    assert tool_format(attempt(episode("x"))).value == 1.0


def test_turns_are_scored_by_a_list_or_beside_the_episode() -> None:
    listed, both = as_score("r", [1, -0.5], turns=2), as_score("r", Score(value=2, turns=[0.25, 0.5]), turns=2)
    assert (listed.value, listed.turns, listed.total) == (0.0, (1.0, -0.5), 0.5)
    assert (both.turns, both.total) == ((0.25, 0.5), 2.75)
    with pytest.raises(JudgeFailure, match="return a float"):
        as_score("agent.loop", [1.0])


def test_the_overlong_penalty_counts_sampled_tokens_only() -> None:
    """DAPO's eq. 13 with a maximum of 10 and a band of 4; a turn of `make_attempt` samples one token."""
    lengths = [*range(12)]
    expected = [0, 0, 0, 0, 0, 0, 0, -0.25, -0.5, -0.75, -1.0, -1.0]
    for length, penalty in zip(lengths, expected, strict=True):
        made = make_attempt(*["x"] * length, prompt="a long prompt " * 50)
        assert made.episode.sampled_tokens == length
        assert overlong(made, max_tokens=10, buffer=4).value == penalty
    with pytest.raises(ValueError, match="buffer must be between 1 and max_tokens"):
        overlong(make_attempt("x"), max_tokens=10, buffer=11)


def test_numbers_of_any_kind_are_scores() -> None:
    assert as_score("r", 1) == Score(value=1.0)
    assert as_score("r", Score(value=2, metrics={"a": True, "b": 3})) == Score(value=2.0, metrics={"a": 1.0, "b": 3.0})


@pytest.mark.parametrize(
    ("returned", "code"),
    [
        (True, "reward_not_a_number"),
        (None, "reward_not_a_number"),
        ("1", "reward_not_a_number"),
        (1j, "reward_not_a_number"),
        (Score(value=None), "reward_not_a_number"),  # type: ignore[arg-type]
        (Score(value=1, metrics=[1]), "reward_not_a_number"),  # type: ignore[arg-type]
        (float("nan"), "reward_not_finite"),
        (10**400, "reward_not_finite"),
        ([0.5], "reward_turns"),
        ([], "reward_turns"),
        (Score(turns=[1.0, 2.0, 3.0]), "reward_turns"),
        ([0.5, True], "reward_not_a_number"),
        ([0.5, float("nan")], "reward_not_finite"),
    ],
)
def test_a_value_that_is_not_a_number_is_a_judge_failure(returned: Any, code: str) -> None:
    with pytest.raises(JudgeFailure) as caught:
        as_score("r", returned, turns=2)
    assert (caught.value.boundary, caught.value.code) == (Boundary.JUDGE, code)


@pytest.mark.parametrize(
    "unusable",
    [
        *({name: 1.0} for name in ("reward", "step", "a\ud800", "a\0b", "a\nb", "m" * 201)),
        *({"a": value} for value in (float("inf"), float("nan"), 10**400, "b", None, [1], 1j)),
        {5: 1.0},
    ],
    ids=repr,
)
def test_a_metric_that_cannot_be_averaged_is_left_out_and_reported(unusable: dict[Any, Any]) -> None:
    reported: list[UnusableMetric] = []
    score = as_score("r", Score(value=0.5, metrics={"good": 1, **unusable}), report=reported.append)
    assert score.value == 0.5
    assert score.metrics == {"good": 1.0, "metrics_left_out": 1.0}
    (problem,) = reported
    assert "the metric " in problem.text
    assert len(problem.text) < 300


def test_names_and_import_paths_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("format", field="f") is tool_format
    assert resolve("kestrl.rewards.builtin:exact_answer", field="f") is exact_answer
    with pytest.raises(
        UserInputError,
        match="f: 'exact' is not one of exact_answer, flexible_answer, "
        "math_answer, boxed_answer, format, loop_reward, environment_reward, overlong, nor",
    ):
        resolve("exact", field="f")
    with pytest.raises(UserInputError, match="is a frozenset; a reward is a function"):
        resolve("kestrl.rewards.builtin:MALFORMED", field="f")


def test_the_reward_of_environments_is_their_sum() -> None:
    environments = {"A": {"get_reward": 0.5, "basket": {}}, "B": {"get_reward": 1.0}, "C": [1], "D": {}}
    assert environment_reward(make_attempt("", environments=environments)).value == 1.5
    with pytest.raises(ValueError, match="no environment of this episode has a reward"):
        environment_reward(make_attempt("", environments={"D": {}}))


def test_the_parts_of_an_environments_reward_keep_their_names_and_weights() -> None:
    attempt = make_attempt("done", environments={"environment": {"get_reward": {"done": 1.0, "said": 2.0}}})
    whole = environment_reward(attempt)
    assert (whole.value, whole.metrics) == (3.0, {"reward.done": 1.0, "reward.said": 2.0})
    assert environment_reward(attempt, weights={"said": 0.25}).value == 1.5
    with pytest.raises(ValueError, match=r"has no part sayd \(it has: done, said\)"):
        environment_reward(attempt, weights={"sayd": 1.0})
