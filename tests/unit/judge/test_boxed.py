r"""`boxed_answer`, against verl's function and the shaping of the recipes for ReTool, both written out here."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.shared.spec.test_job import MANIFEST, refused

from kestrl._shared.spec import parse_job
from kestrl.episode import CallOutcome
from kestrl.errors import JudgeFailure, UserInputError
from kestrl.rewards import Score
from kestrl.rewards.boxed import canonical, last_boxed
from kestrl.rewards.builtin import boxed_answer, exact_answer, flexible_answer, math_answer, overlong
from kestrl.rewards.checking import as_score
from kestrl.rewards.resolving import resolve
from kestrl.testing.attempts import make_attempt, make_call


def published(response: str, expected: str) -> tuple[float, str | None]:
    """`math_dapo.compute_score(strict_box_verify=True)` of verl (commit 5756533), step by step."""
    tail = response[-300:][-100:]
    start = tail.rfind("\\boxed{")
    if start < 0:
        return -1.0, None
    depth = 0
    for position in range(start, len(tail)):
        depth += {"{": 1, "}": -1}.get(tail[position], 0)
        if tail[position] == "}" and depth == 0:
            answer = tail[start + len("\\boxed{") : position]
            return (1.0 if answer == expected else -1.0), answer
    return -1.0, None


PIECES = st.lists(
    st.sampled_from(["\\boxed{", "{", "}", "4", "42", "\\frac", "x", " ", "so it is ", "y" * 60, "z" * 110]),
    max_size=14,
)


@given(PIECES, st.sampled_from(["4", "42", "{4}", "x", ""]))
def test_text_in_a_window_of_100_is_verls_score(pieces: list[str], expected: str) -> None:
    text = "".join(pieces)
    attempt = make_attempt("w" + text, ground_truth=expected or "4")
    score = boxed_answer(attempt, compare="text", window=100)
    value, answer = published(attempt.episode.final_text.strip(), expected or "4")
    assert (score.value, score.answer) == (value, answer or "")
    assert score.metrics == {"answer_correct": (value + 1) / 2, "boxed": float(answer is not None)}


@pytest.mark.parametrize(("calls", "right"), [*product(range(8), [True, False])])
def test_shaping_by_tools_is_that_of_the_recipes(calls: int, right: bool) -> None:
    """Each call is a turn with a result, so that verl's `num_turns` (messages) is 2 + 2 * calls."""
    num_turns = 2 + 2 * calls
    base = 1.0 if right else -1.0
    retool = base if base > 0 else min(-0.6, base + (num_turns - 2) / 2 * 0.1)
    cann = base - 0.4 if (num_turns - 2) // 2 == 0 else base
    attempt = make_attempt(
        *["<tool_call>"] * calls,
        r"\boxed{7}" if right else r"\boxed{8}",
        ground_truth=7,
        calls=[make_call("code_interpreter", turn=turn) for turn in range(calls)],
    )
    assert boxed_answer(attempt).value == base
    assert boxed_answer(attempt, shaping="tool_bonus").value == pytest.approx(retool, abs=1e-12)
    assert boxed_answer(attempt, shaping="tool_penalty").value == pytest.approx(cann, abs=1e-12)


def test_a_malformed_call_and_a_second_one_in_a_turn_earn_nothing() -> None:
    malformed = [make_call("x", outcome=CallOutcome.INVALID_JSON), make_call("", outcome=CallOutcome.UNKNOWN_TOOL)]
    twice = [make_call("x"), make_call("x", outcome=CallOutcome.TOOL_ERROR)]
    for calls, bonus, penalty in ((malformed, -1.0, -1.4), (twice, -0.9, -1.0)):
        attempt = make_attempt("a", "b", ground_truth=1, calls=calls)
        assert boxed_answer(attempt, shaping="tool_bonus").value == bonus
        assert boxed_answer(attempt, shaping="tool_penalty").value == penalty


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed{1\\}", r"1\\"),
        (r"\boxed{1} and \boxed{2", None),
        (r"\boxed{2\}", None),
        (r"\boxed 3", None),
        (r"\boxed{}", ""),
        ("", None),
    ],
)
def test_the_last_box_is_read_with_its_braces(text: str, answer: str | None) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("72", "72.0", True),
        ("72.", " 72 ", True),
        ("1,000", "1000", True),
        ("1{,}000", "1\\,000", True),
        ("\u22123", "-3.00", True),
        (".5", "1/2", True),
        (r"\dfrac{2}{4}", "0.5", True),
        (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
        (r"\frac{1}{0}", r"\frac{2}{0}", False),
        ("0.1", "0.10000000000000000001", False),
        ("1,00", "100", False),
        ("{5}", "5", False),
        ("50\\%", "50", False),
        (r"$\left( 1, 2 \right)$", "(1,2)", True),
        (r"x \leftarrow 1", r"x\leftarrow1", True),
        (r"2\sqrt{3}", r"2 \sqrt{3}", True),
        (r"2\sqrt{3}", r"3\sqrt{2}", False),
        ("9" * 5000, "9" * 5000 + ".0", False),
    ],
)
def test_answers_are_compared_as_numbers_or_as_latex(left: str, right: str, equal: bool) -> None:
    assert (canonical(left) == canonical(right)) is equal
    assert boxed_answer(make_attempt(rf"\boxed{{{left}}}", ground_truth=right), window=10_000).value == (
        1.0 if equal else -1.0
    )


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**4))
def test_the_canonical_form_of_a_number_is_one_text(above: int, below: int) -> None:
    forms = {
        canonical(form) for form in (f"{above}/{below}", rf"\frac{{{above}}}{{{below}}}", f"{3 * above}/{3 * below}")
    }
    assert len(forms) == 1
    assert canonical(forms.copy().pop()) in forms
    assert canonical(f"{above:,}") == canonical(f"{above}.0") == str(above)


def test_only_the_models_own_last_words_are_searched() -> None:
    result = make_call("code_interpreter", text=r"\boxed{7}")
    assert boxed_answer(make_attempt("<tool_call>", "done", ground_truth=7, calls=[result])).value == -1
    assert boxed_answer(make_attempt(r"<think>\boxed{7}</think> unsure", ground_truth=7)).value == -1
    long = make_attempt(r"\boxed{7}" + "." * 292, ground_truth=7)
    assert boxed_answer(long).value == -1, "the box begins 301 characters from the end"
    assert boxed_answer(long, window=301).value == 1
    assert boxed_answer(make_attempt(r"\boxed{9}", ground_truth=[7, 9])).value == 1


def test_math_verify_compares_if_asked() -> None:
    attempt = make_attempt(r"\boxed{x^2+2x+1}", ground_truth="(x+1)^2")
    assert [boxed_answer(attempt, compare=how).value for how in ("exact", "math")] == [-1, 1]


def test_overlong_is_added_beside_it() -> None:
    cut = make_attempt(*["x"] * 10, ground_truth=1)
    assert boxed_answer(cut).value + overlong(cut, max_tokens=10, buffer=4).value == -2


def test_arguments_that_do_not_exist_are_refused() -> None:
    attempt = make_attempt(r"\boxed{1}", ground_truth=1)
    for config, message in (
        ({"compare": "x"}, "compare must be exact, text or math"),
        ({"shaping": "x"}, "shaping must be none, tool_bonus or tool_penalty"),
        ({"window": 0}, "window must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            boxed_answer(attempt, **config)
    with pytest.raises(ValueError, match="no ground_truth"):
        boxed_answer(make_attempt(r"\boxed{1}"))


def test_math_verify_is_needed_only_where_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None: ...

    monkeypatch.setattr("kestrl.rewards.resolving.find_spec", missing)
    resolve("boxed_answer", field="spec.rewards[0].rule", config={"compare": "exact"})
    with pytest.raises(UserInputError, match=r"rewards\[0\].rule: boxed_answer needs math-verify"):
        resolve("boxed_answer", field="spec.rewards[0].rule", config={"compare": "math"})


@pytest.mark.parametrize(
    ("rule", "config", "problems"),
    [
        ("overlong", {"max_tokens": 64, "buffer": 64}, []),
        ("overlong", {"max_tokens": 64, "buffer": 65}, ["buffer: 65 is above max_tokens (64); lower it"]),
        ("overlong", {"buffer": 4}, ["max_tokens: is required; add it"]),
        ("overlong", {"max_tokens": True, "buffer": 1}, ["max_tokens: must be a whole number from 1, is True"]),
        ("boxed_answer", {}, []),
        ("boxed_answer", {"compare": "math", "shaping": "tool_penalty", "window": 1}, []),
        (
            "boxed_answer",
            {"compare": ["exact"], "shaping": "bonus", "window": 0.5, "tail": 1},
            [
                "tail: boxed_answer takes no tail; it takes compare, shaping, window",
                "compare: ['exact'] is not one of exact, text, math",
                "shaping: 'bonus' is not one of none, tool_bonus, tool_penalty",
                "window: must be a whole number from 1, is 0.5",
            ],
        ),
    ],
)  # fmt: skip
def test_the_config_of_a_built_in_reward_is_checked_by_field(
    rule: str, config: dict[str, object], problems: list[str]
) -> None:
    document = {**MANIFEST, "spec": {**MANIFEST["spec"], "rewards": [{"rule": rule, "config": config}]}}
    if problems:
        assert refused(document=document) == [f"spec.rewards[0].config.{problem}" for problem in problems]
    else:
        assert parse_job(document).spec.rewards[0].config == config


def test_rewards_report_the_answer_that_they_read() -> None:
    def read(text: str, expected: object) -> list[str | None]:
        attempt = make_attempt(text, ground_truth=expected)
        return [reward(attempt).answer for reward in (exact_answer, flexible_answer, math_answer, boxed_answer)]

    assert read("72.0", 72) == ["72.0", "72", "72", ""]
    assert read(r"so \boxed{1,000.0}", "#### 1000") == [r"so \boxed{1,000.0", "1000", "1000", "1000"]
    assert read("Answer: Paris.", "paris") == ["answer: paris", "paris", "paris", ""]
    assert read("", 1) == ["", "", "", ""]
    assert as_score("r", Score(answer="a\ud800")).answer == "a?"
    assert as_score("r", 1.0).answer is None
    with pytest.raises(JudgeFailure, match="r: its answer is a int, not text"):
        as_score("r", Score(answer=3))  # type: ignore[arg-type]
