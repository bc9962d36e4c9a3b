"""What a judge has used in a run, and the bounds on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kestrl._shared.plan.settings.judge import JudgeEntry, JudgeModel
from kestrl_judge.ruler.client import NoScores, NoScoresReason
from kestrl_judge.ruler.completion import JudgeReply
from kestrl_judge.ruler.escaping import estimated_tokens

MILLION = 1_000_000
LARGEST_TOKEN = 4
"""How many times fewer tokens than estimated a text may have: an estimated token is three letters."""


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


class RunBudget:
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
        ruler, reserved = self._ruler, self._reserved
        for name, limit, total in (
            ("calls", ruler.budget_calls, self.spent.calls + reserved.calls + usage.calls),
            ("tokens", ruler.budget_tokens, self.spent.tokens + reserved.tokens + usage.tokens),
            ("cost", ruler.budget_cost, self.spent.cost + reserved.cost + usage.cost),
        ):
            if limit is not None and total > limit:
                raise NoScores(
                    NoScoresReason.BUDGET,
                    f"the run's budget of {limit:g} {name} does not allow another request; raise "
                    f"{ruler.field}.budget.{name} in a new job",
                )
        reserved.add(usage)

    def release(self, usage: Usage) -> None:
        """Returns what a request reserved."""
        self._reserved.add(usage, -1)


class MeteredRequest:
    """One request within the budget, as a context: it reserves the most that it can use, and then spends what it used.

    Unless the client says otherwise it was answered and nobody saw the answer, which is paid for in full.
    """

    def __init__(
        self,
        budget: RunBudget,
        judge: JudgeModel,
        *,
        prompt: int,
        longest: int,
        reply: int,
        spend: Callable[[Usage], None],
    ) -> None:
        """A request to be sent.

        Args:
            budget: Of the run.
            judge: The asked model.
            prompt: Estimated tokens of the prompt.
            longest: The most that they can be.
            reply: Maximum tokens of a reply.
            spend: Called with what was used, once.
        """
        self._budget, self._judge, self._spend = budget, judge, spend
        self._prompt, self._longest, self._reply = prompt, longest, reply
        self._most = usage_of(judge, prompt, reply)
        self._used = self._most

    def __enter__(self) -> Self:
        self._budget.reserve(self._most)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget.release(self._most)
        self._spend(self._used)

    def answered(self, reply: JudgeReply) -> None:
        """Counts what the server reports; where that is nothing, or more or less than can be, the estimate."""
        fewest_tokens = max(1, self._prompt // LARGEST_TOKEN)
        tokens = reply.input_tokens if fewest_tokens <= reply.input_tokens <= self._longest else self._prompt
        content = min(self._reply, estimated_tokens(reply.content))
        sampled = reply.output_tokens
        if not max(1, content // LARGEST_TOKEN) <= sampled <= self._reply:
            sampled = content
        self._used = usage_of(self._judge, tokens, sampled)

    def refused(self) -> None:
        """Counts a request that was answered with an error: no tokens."""
        self._used = Usage(calls=1)

    def unsent(self) -> None:
        """Counts nothing: the server was not reached."""
        self._used = Usage()
