"""Mathematical answers: what math-verify reads is what is compared, recorded and voted with."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from kestrl.rewards import mathematics
from kestrl.rewards.builtin import math_answer
from kestrl.rewards.mathematics import Reading, read
from kestrl.testing.attempts import make_attempt


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        (r"So \[ x = \frac{1}{2} \]", "0.5", "1/2"),
        (r"\frac{3}{4}", "0.75", "3/4"),
        ("**42**", "42", "42"),
        (r"\boxed{5\text{ cm}}", "5", "5"),
        ("12 dollars", "12", "12"),
        (r"The set is $\{3,2,1\}$", r"\{1,2,3\}", "{1, 2, 3}"),
        ("$(1,2]$", "(1,2]", "Interval.Lopen(1, 2)"),
        ("$x^2+2x+1$", "(x+1)^2", "x**2 + 2*x + 1"),
        ("I tried 3, and it is 4.", "4", "4"),
        ("Answer: 1,000", "1000", "1000"),
    ],
)
def test_the_answer_that_is_compared_is_the_one_that_is_recorded(text: str, expected: str, answer: str) -> None:
    score = math_answer(make_attempt(text, ground_truth=expected))
    assert (score.value, score.answer) == (1.0, answer)


@pytest.mark.parametrize(("one", "other"), [("0.5", r"\frac12"), ("$(x+1)^2$", "$x^2+2x+1$"), ("**7**", r"\boxed{7}")])
def test_equal_answers_vote_together(one: str, other: str) -> None:
    first, second = (math_answer(make_attempt(text, ground_truth="3")) for text in (one, other))
    assert first.answer == second.answer


def test_an_answer_that_takes_too_long_is_wrong() -> None:
    reading = read("$" + "(" * 30 + "9" + "^{9})" * 30 + "!$", ["3"])
    assert not reading.correct


def test_an_answer_that_takes_all_the_time_of_a_comparison_is_given_up_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def endless(*_: object) -> Reading:
        while True:
            pass

    monkeypatch.setattr(mathematics, "_form", endless)
    monkeypatch.setattr(mathematics, "CPU_SECONDS", 1)
    assert read("$3$", ["3"]) == Reading(correct=False, answer="", costly=True)
    assert "SIGXCPU ended its comparison: '$3$'" in caplog.text


def test_a_comparison_that_a_signal_ends_once_is_done_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def killed_once(_: object) -> str:
        mark = tmp_path / "killed"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return "3"

    monkeypatch.setattr(mathematics, "_form", killed_once)
    assert read("$3$", ["3"]) == Reading(correct=True, answer="3")


def test_a_comparison_that_waits_for_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def waiting(*_: object) -> None:
        time.sleep(60)

    monkeypatch.setattr(mathematics, "_reading", waiting)
    monkeypatch.setattr(mathematics, "WALL_SECONDS", 0.2)
    with pytest.raises(TimeoutError, match="did not end within"):
        read("$3$", ["3"])
