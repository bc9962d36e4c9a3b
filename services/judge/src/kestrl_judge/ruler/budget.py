"""What a judge has used in a run, and the bounds on it."""

from __future__ import annotations

from dataclasses import dataclass

from kestrl._shared.plan.settings.judge import JudgeEntry, JudgeModel
from kestrl_judge.ruler.client import NoScores, Reason

MILLION = 1_000_000


@dataclass(slots=True)
class Usage:
    """Use of judge models."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """US dollars."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def add(self, other: Usage, sign: int = 1) -> None:
        self.calls += sign * other.calls
        self.input_tokens += sign * other.input_tokens
        self.output_tokens += sign * other.output_tokens
        self.cost += sign * other.cost


def usage_of(judge: JudgeModel, input_tokens: int, output_tokens: int) -> Usage:
    """Use of one answered request."""
    cost = (judge.input_price * input_tokens + judge.output_price * output_tokens) / MILLION
    return Usage(1, input_tokens, output_tokens, cost)


class Budget:
    """Bounds on the use of a run. A request reserves the most it can use, so that concurrent ones stay within it."""

    def __init__(self, ruler: JudgeEntry) -> None:
        self._ruler = ruler
        self.spent = Usage()
        self._reserved = Usage()

    def reserve(self, usage: Usage) -> None:
        """Reserves before a request.

        Raises:
            NoScores: It could exceed a bound.
        """
        ruler, held = self._ruler, self._reserved
        for name, limit, used in (
            ("calls", ruler.budget_calls, self.spent.calls + held.calls + usage.calls),
            ("tokens", ruler.budget_tokens, self.spent.tokens + held.tokens + usage.tokens),
            ("cost", ruler.budget_cost, self.spent.cost + held.cost + usage.cost),
        ):
            if limit is not None and used > limit:
                raise NoScores(
                    Reason.BUDGET,
                    f"the run's budget of {limit:g} {name} does not allow another request; raise "
                    f"{ruler.field}.budget.{name} in a new job",
                )
        held.add(usage)

    def release(self, usage: Usage) -> None:
        """Returns what a request reserved."""
        self._reserved.add(usage, -1)
