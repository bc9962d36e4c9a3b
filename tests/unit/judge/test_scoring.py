"""How components become one score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from kestrl.episode import Group
from kestrl.errors import Boundary, Failure
from kestrl.plan.settings import RewardEntry
from kestrl.rewards import Score
from kestrl_judge.rules import rule_scorers
from kestrl_judge.scoring import Verdict, judge

FAILURE = Failure(boundary=Boundary.JUDGE, code="reward_deadline", message="late")


@dataclass
class Ranker:
    """A judge of another kind: it looks at the whole group at once."""

    name: str = "ranker"
    weight: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    failing: str = ""
    silent: str = ""
    seen: list[int] = field(default_factory=list[int])

    async def score(self, group: Group, *, max_turns: int) -> Mapping[str, Verdict]:
        self.seen.append(len(group.episodes))
        return {
            each.id: FAILURE if each.id == self.failing else Score(value=float(rank), metrics=self.metrics)
            for rank, each in enumerate(group.episodes)
            if each.id != self.silent
        }


async def test_the_reward_is_the_weighted_sum(group: Callable[..., Group]) -> None:
    first, second = Ranker("a", 2.0, {"m": 1.0}), Ranker("b", -0.5, {"m": 3.0, "n": 4.0})
    judgements = await judge([first, second], group("x", "y", "z"), max_turns=5)
    assert [each.reward for each in judgements] == [0.0, 1.5, 3.0]
    assert judgements[2].rewards == {"a": 2.0, "b": 2.0}
    assert judgements[0].metrics == {"m": 1.0, "b.m": 3.0, "n": 4.0}


@dataclass
class TurnScorer:
    """Scores turns."""

    name: str
    weight: float
    turns: list[float]

    async def score(self, group: Group, *, max_turns: int) -> Mapping[str, Verdict]:
        return {each.id: Score(value=1.0, turns=self.turns) for each in group.episodes}


async def test_turn_rewards_are_weighted_and_summed_by_turn(group: Callable[..., Group]) -> None:
    scorers = [Ranker("whole", 1.0), TurnScorer("a", 2.0, [0.5, 1.0]), TurnScorer("b", -1.0, [0.25, 0.0])]
    judgement = (await judge(scorers, group("x"), max_turns=5))[0]
    assert judgement.rewards == {"whole": 0.0, "a": 2.5, "b": 1.25}
    assert judgement.turns == [0.75, 2.0]
    assert judgement.reward == 2 * 2.5 - 1.25
    broken = await judge([*scorers, Ranker("c", failing="group/0")], group("x"), max_turns=5)
    assert (broken[0].reward, broken[0].turns) == (None, ())


async def test_one_failed_component_leaves_no_reward(group: Callable[..., Group]) -> None:
    judgements = await judge([Ranker("a"), Ranker("b", failing="group/1")], group("x", "y"), max_turns=5)
    assert [each.reward for each in judgements] == [0.0, None]
    assert judgements[1].failure == FAILURE
    assert judgements[1].rewards == {"a": 1.0}


async def test_a_component_without_a_verdict_is_a_failure(group: Callable[..., Group]) -> None:
    judgements = await judge([Ranker(silent="group/0")], group("x"), max_turns=5)
    assert (judgements[0].reward, judgements[0].failure and judgements[0].failure.code) == (None, "reward_missing")


async def test_a_sum_beyond_all_numbers_is_a_failure(group: Callable[..., Group]) -> None:
    judgements = await judge([Ranker("a", 1e308), Ranker("b", 1e308)], group("x", "y", "z"), max_turns=5)
    assert [each.failure and each.failure.code for each in judgements] == [None, *["reward_not_finite"] * 2]
    assert [each.reward for each in judgements] == [0.0, None, None]


async def test_failed_episodes_are_not_shown_to_anyone(group: Callable[..., Group]) -> None:
    whole = group("x", "y")
    broken = replace(whole, episodes=[replace(whole.episodes[0], failure=FAILURE), whole.episodes[1]])
    ranker = Ranker()
    assert [each.episode_id for each in await judge([ranker], broken, max_turns=5)] == ["group/1"]
    none_left = replace(whole, episodes=[replace(each, failure=FAILURE) for each in whole.episodes])
    assert await judge([ranker], none_left, max_turns=5) == []
    assert ranker.seen == [1]


def test_equal_short_names_become_long_and_a_rule_is_given_once(settings: Callable[..., object]) -> None:
    from kestrl.errors import UserInputError
    from kestrl.plan.settings import JudgeSettings

    def made(*rules: str) -> JudgeSettings:
        made = settings(*(RewardEntry(name=rule.rpartition(":")[2], rule=rule) for rule in rules))
        assert isinstance(made, JudgeSettings)
        return made

    names = [scorer.name for scorer in rule_scorers(made("mine:score", "yours:score", "format"))]
    assert names == ["mine:score", "yours:score", "format"]
    with pytest.raises(UserInputError, match=r"spec.rewards\[1\].rule: 'format' is listed twice"):
        rule_scorers(made("format", "format"))
