"""The calculator: right, exact, bounded, and never code."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.tools import ToolError
from kestrl_tools.calculator import MAX_LENGTH, calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 4", "2.5"),
        ("-7 // 2", "-4"),
        ("7 % 3", "1"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("9 ** 0.5", "3"),
        ("sqrt(2)", "1.41421356237"),
        ("max(1, 2, 3) - min(4) + abs(-1)", "0"),
        ("round(2.567, 2) + ceil(0.1) + floor(1.9)", "4.57"),
        ("1 / 3", "0.333333333333"),
        ("  (1e3) ", "1000"),
        ("(-1) ** 999999999", "-1"),
    ],
)
def test_it_calculates(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "Division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("2 ** -100000000", "too large"),
        ("1e308 * 1e308", "too large"),
        ("1e999", "too large"),
        ("(0 - 1) ** 0.5", "root of a negative"),
        ("2 ^ 3", r"Write \*\* for powers"),
        ("1,000 + 1", "without commas"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("().__class__", "not arithmetic"),
        ("x + 1", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("1j", "not arithmetic"),
        ("'a' * 9", "not arithmetic"),
        ("1 +", "is not an arithmetic expression"),
        ("\0", "is not an arithmetic expression"),
        ("sqrt(1, 2)", "There is no sqrt of 2 numbers"),
        ("max()", "There is no max of 0 numbers"),
        ("round(1.5, 0.5)", "whole number of digits"),
        ("1 & 2", "only the operators"),
        ("1" * (MAX_LENGTH + 1), "longer than"),
    ],
)
def test_what_it_refuses_is_reported_to_the_model(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculator(expression)


@pytest.mark.parametrize(
    "expression",
    ["-" * (MAX_LENGTH - 1) + "1", "(" * 149 + "1" + ")" * 149, "1" + "+1" * 149, "9" * 290, "9**9**" * 49 + "9"],
)
def test_the_worst_case_of_each_length_ends_quickly(expression: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(ToolError):
        calculator(expression)
    assert time.process_time() - begun < 0.5


numbers = st.integers(-1000, 1000).map(lambda value: f"({value})")
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda part: f"({''.join(part)})"),
    max_leaves=8,
)


@given(expressions)
def test_whole_numbers_agree_with_python(expression: str) -> None:
    if len(expression) <= MAX_LENGTH:
        assert calculator(expression) == str(eval(expression))


@given(st.text(alphabet="0123456789+-*/%.()e, _xab\n'", min_size=1, max_size=40))
def test_any_text_gives_a_result_or_a_message(text: str) -> None:
    try:
        answer = calculator(text)
    except ToolError as error:
        answer = str(error)
    assert answer
