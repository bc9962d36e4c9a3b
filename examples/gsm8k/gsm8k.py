"""GSM8K's tools and rewards: a calculator, and verl's `calc_gsm8k_reward`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

from kestrl.rewards import Attempt, Score
from kestrl.rewards.answers import matches, parsed_answer
from kestrl.tools import ToolError, ToolResult

LONGEST = 200
"""Characters of an expression."""
NOT_BETTER = -0.05
"""Step reward of an attempt that is not better than the best one before, as in verl."""
OPERATIONS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
}


def calculator(expression: str) -> str:
    """Calculates an expression.

    Args:
        expression: Numbers with + - * / and parentheses, such as "(48+24)/2".
    """
    if len(expression) > LONGEST:
        raise ToolError(f"the expression is longer than {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.replace(",", "").strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression!r} is not numbers with + - * / and parentheses") from error
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError


class CalcGsm8kReward:
    """Scores attempts at the answer of one problem; remembers the best one of the episode."""

    def __init__(self, ground_truth: str, oracle: bool = True) -> None:
        """Begins an episode.

        Args:
            ground_truth: The answer, from the row.
            oracle: Whether the model reads the reward of its attempt, as in verl. It may then guess until the reward
                is 1. Without it the model reads only how its answer was understood.
        """
        self._ground_truth, self._oracle = ground_truth, oracle
        self._best = 0.0

    def __call__(self, answer: str) -> ToolResult:
        """A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, 0.0 if parsed answer is
        incorrect or not correctly parsed)

        Args:
            answer: The model's answer to the GSM8K math problem, must be a digits
        """
        reward = float(matches(answer, self._ground_truth))
        step_reward = 0.0 if reward > self._best else NOT_BETTER
        self._best = max(self._best, reward)
        text = f"Current parsed answer={parsed_answer(answer)!r}"
        return ToolResult(
            text=f"{text} reward={reward}" if self._oracle else text,
            data={"reward": reward, "step_reward": step_reward},
        )


def attempts(attempt: Attempt) -> Score:
    """Step rewards of `calc_gsm8k_reward`, in the turns of their calls: -0.05 for each attempt that is not better."""
    turns = [0.0] * len(attempt.episode.turns)
    scored = [call for call in attempt.episode.tool_calls if "step_reward" in call.data]
    for call in scored:
        turns[call.turn] += call.data["step_reward"]
    return Score(turns=turns, metrics={"attempts": float(len(scored))})


def called(attempt: Attempt) -> float:
    """1 when a tool was called and answered."""
    return float(any(call.outcome == "ok" for call in attempt.episode.tool_calls))
