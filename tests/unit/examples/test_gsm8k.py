"""GSM8K's tools and rewards, as the manifests in examples/gsm8k name them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kestrl._app.tasks.word_problems import Form, generated, problems
from kestrl._shared.plan.evaluation import evaluation_sampling
from kestrl._shared.spec import read_job
from kestrl._shared.spec.threshold import read_threshold
from kestrl.testing.attempts import make_attempt, make_call
from kestrl.tools import ToolError
from kestrl.tools.schema import describe

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "gsm8k"


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("gsm8k")


def test_imitation_alone_gives_the_twin_at_most_its_threshold() -> None:
    """Half of the demonstrations are right, so that a model that samples as they were sampled is right in half."""
    sft = yaml.safe_load((FOLDER / "sft.yaml").read_text())["spec"]["data"]
    spec = read_threshold(FOLDER / "threshold.yaml").spec
    size, seed = sft["train"]["size"], sft["seed"]
    assert sft["train"]["uri"] == "demo://word-problems/one-step/transcripts/50"
    rows = generated(Form.TRANSCRIPTS, split="train", seed=seed, size=size, one_step=True, mistakes=0.5)
    answers = [problem.answer for problem in problems("train", seed, size, one_step=True)]
    right = sum(row["messages"][-1]["content"] == f"#### {answer}" for row, answer in zip(rows, answers, strict=True))
    assert right / size == pytest.approx(spec.threshold, abs=0.01)
    assert evaluation_sampling(read_job(FOLDER / spec.job).spec).temperature == 1.0
    assert spec.min_rise == 0.1


NUMBERS = st.integers(0, 99).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_the_calculator_is_exact(expression: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        calculator = importlib.import_module("gsm8k").calculator
    wrapped = "".join(f"Fraction({part})" if part.isdigit() else part for part in _pieces(expression))
    try:
        exact = eval(wrapped, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculator(expression)
        return
    assert float(calculator(expression)) == pytest.approx(float(exact), rel=1e-5)


def _pieces(expression: str) -> list[str]:
    spaced = "".join(character if character.isdigit() else f" {character} " for character in expression)
    return spaced.split()


@pytest.mark.parametrize(
    ("expression", "result"),
    [("(48+24)/2", "36"), ("1,000*2", "2000"), ("-3 + 1", "-2"), ("1/3", "0.333333"), ("0.1+0.2", "0.3")],
)
def test_the_calculator_prints_numbers_as_people_do(example: Any, expression: str, result: str) -> None:
    assert example.calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2**99999999",
        "__import__('os')",
        "a+1",
        "1 if 2 else 3",
        "(" * 150,
        "True+1",
        "1e999999*2",
        "9" * 201,
    ],
)
def test_the_calculator_refuses_what_is_not_arithmetic(example: Any, expression: str) -> None:
    with pytest.raises(ToolError):
        example.calculator(expression)


def test_generated_transcripts_are_what_the_calculator_answers(example: Any) -> None:
    for row in generated(Form.TRANSCRIPTS, split="train", seed=1, size=200, mistakes=0.5):
        call, result = row["messages"][2:4]
        assert example.calculator(**call["tool_calls"][0]["function"]["arguments"]) == result["content"]
        assert row["tools"][0]["function"]["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize("answer", ["72", "72.0", "$72", "72%", " 72. ", "#### 72", "so 70+2 = 72", r"\boxed{72}"])
def test_an_attempt_is_compared_as_a_number(example: Any, answer: str) -> None:
    assert example.CalcGsm8kReward("72")(answer).data["reward"] == 1.0


def test_thousands_separators_do_not_matter(example: Any) -> None:
    assert example.CalcGsm8kReward("1000")("1,000").data["reward"] == 1.0
    assert example.CalcGsm8kReward("1000")("1").data["reward"] == 0.0


def test_attempts_are_scored_by_improvement_within_an_episode(example: Any) -> None:
    tool = example.CalcGsm8kReward("72")
    results = [tool(answer) for answer in ("70", "72", "72", "none")]
    assert [result.data["reward"] for result in results] == [0.0, 1.0, 1.0, 0.0]
    assert [result.data["step_reward"] for result in results] == [-0.05, 0.0, -0.05, -0.05]
    assert results[1].text == "Current parsed answer='72' reward=1.0"
    assert example.CalcGsm8kReward("72")("72").data["step_reward"] == 0.0  # another episode has its own memory


def test_without_the_oracle_the_model_reads_no_reward(example: Any) -> None:
    tool = example.CalcGsm8kReward("72", oracle=False)
    assert tool("72").text == "Current parsed answer='72'"
    assert tool("it is 71").text == "Current parsed answer='71'"
    assert tool("72").data["reward"] == 1.0


def test_the_schema_is_verls(example: Any) -> None:
    schema = describe(example.CalcGsm8kReward, "calc_gsm8k_reward")
    assert schema.description.startswith("A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct")
    assert list(schema.parameters["properties"]) == ["answer"]
    assert schema.parameters["required"] == ["answer"]


def test_step_rewards_are_given_to_the_turns_of_their_calls(example: Any) -> None:
    calls = [
        make_call("calc_gsm8k_reward", data={"reward": 0.0, "step_reward": -0.05}),
        replace(make_call("calc_gsm8k_reward", data={"reward": 1.0, "step_reward": 0.0}), turn=1),
    ]
    score = example.attempts(make_attempt("first", "second", "#### 72", calls=calls))
    assert list(score.turns) == [-0.05, 0.0, 0.0]
    assert score.metrics == {"attempts": 2.0}
    assert example.called(make_attempt("#### 72", calls=calls)) == 1.0
    assert example.called(make_attempt("#### 72")) == 0.0
