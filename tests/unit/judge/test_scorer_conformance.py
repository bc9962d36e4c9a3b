"""Our scorers and the conformance suite of scorers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fakes.judge_model import ScriptedJudge, graded
from tests.unit.judge.rulers import group as compared
from tests.unit.judge.rulers import honest, ruler_entry

from kestrl._shared.plan.settings.judge import RewardEntry
from kestrl.episode import Group
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup
from kestrl_judge.ruler.scorer import RulerScorer
from kestrl_judge.rules import rule_scorers
from kestrl_judge.scoring import ScoredGroup, Scorer, ScoringGate, Verdict
from kestrl_judge.testing import check_scorer


@pytest.mark.parametrize("rule", ["format", "reward_samples:length"])
async def test_rules_conform(rule: str, settings: Any, group: Callable[..., Group]) -> None:
    def make() -> Scorer:
        (scorer,) = rule_scorers(settings(RewardEntry(name="component", rule=rule)))
        return scorer

    await check_scorer(make, group("x", "y", "z"))


async def test_a_judge_model_conforms() -> None:
    async with ScriptedJudge(lambda asked: graded(asked, honest)) as server:
        entry = ruler_entry(server.url)
        await check_scorer(lambda: RulerScorer(entry, salt="run-1"), compared("It is 4", "It is 5"))


@dataclass
class Lengths:
    """Scores an episode by its last text. Subclasses break one property each."""

    name: str = "lengths"
    weight: float = 1.0
    gate: ScoringGate | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        self.closed.clear()

    async def close(self) -> None:
        self.closed.set()

    def verdicts(self, group: Group) -> dict[str, Verdict]:
        return {each.id: Score(value=float(len(each.turns[-1].text))) for each in group.episodes}

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        return ScoredGroup(self.verdicts(group.decoded))


class Silent(Lengths):
    def verdicts(self, group: Group) -> dict[str, Verdict]:
        return dict(list(super().verdicts(group).items())[1:])


class Codeless(Lengths):
    def verdicts(self, group: Group) -> dict[str, Verdict]:
        return {each.id: Failure(boundary=Boundary.JUDGE, code="", message="no") for each in group.episodes}


class Endless(Lengths):
    def verdicts(self, group: Group) -> dict[str, Verdict]:
        return {each.id: Score(value=0.0, metrics={"length": float("inf")}) for each in group.episodes}


class Mixing(Lengths):
    """Keeps the last group in itself."""

    group: Group | None = None

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        self.group = group.decoded
        await asyncio.sleep(0)
        return ScoredGroup(self.verdicts(self.group))


class Stuck(Lengths):
    """Is not usable after a caller has gone away."""

    busy: bool = False

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        assert not self.busy, "still busy"
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        return ScoredGroup(self.verdicts(group.decoded))


class Unresponsive(Lengths):
    """Raises what it should return when it is closed."""

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if self.closed.is_set():
            raise RuntimeError("closed")
        return ScoredGroup(self.verdicts(group.decoded))


async def test_a_scorer_of_ones_own_conforms(group: Callable[..., Group]) -> None:
    await check_scorer(Lengths, group("x", "yy"))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (Silent, "every episode of the group has a verdict"),
        (Codeless, "a failure has a code"),
        (Endless, "a score is finite"),
        (Mixing, "every episode of the group has a verdict"),
        (Unresponsive, "closed"),
        (lambda: Lengths(name=""), "a component has a name"),
        (lambda: Lengths(weight=float("nan")), "the weight of a component is finite"),
        (lambda: Lengths(gate=ScoringGate("lengths", 1.0)), "not its own gate"),
    ],
)
async def test_a_broken_scorer_is_found(
    broken: Callable[[], Scorer], problem: str, group: Callable[..., Group]
) -> None:
    with pytest.raises((AssertionError, RuntimeError), match=problem):
        await check_scorer(broken, group("x", "yy"))


async def test_a_scorer_that_a_caller_left_behind_is_found(group: Callable[..., Group]) -> None:
    with pytest.raises((AssertionError, ExceptionGroup), match="still busy"):
        await check_scorer(Stuck, group("x", "yy"))
