"""How components become one score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from kestrl._shared.plan.settings.judge import RewardEntry
from kestrl.episode import Group
from kestrl.episode.codec import group_to_proto
from kestrl.errors import Boundary, Failure
from kestrl.rewards import Score
from kestrl_judge.encoded import EncodedGroup
from kestrl_judge.rules import rule_scorers
from kestrl_judge.scoring import Judgement, ScoredGroup, Scorer, ScoringGate, Verdict, judge

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
    gate: ScoringGate | None = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        self.seen.append(len(group.episodes))
        verdicts: dict[str, Verdict] = {
            each.id: FAILURE if each.id == self.failing else Score(value=float(rank), metrics=self.metrics)
            for rank, each in enumerate(group.episodes)
            if each.id != self.silent
        }
        return ScoredGroup(verdicts, episodes={name: {"rank": rank} for rank, name in enumerate(verdicts)}, details="d")


async def judged(scorers: Sequence[Scorer], group: Group) -> list[Judgement]:
    return list((await judge(scorers, EncodedGroup(group_to_proto(group).SerializeToString()), max_turns=5)).episodes)


async def test_the_reward_is_the_weighted_sum(group: Callable[..., Group]) -> None:
    first, second = Ranker("a", 2.0, {"m": 1.0}), Ranker("b", -0.5, {"m": 3.0, "n": 4.0})
    judgements = await judged([first, second], group("x", "y", "z"))
    assert [each.reward for each in judgements] == [0.0, 1.5, 3.0]
    assert judgements[2].rewards == {"a": 2.0, "b": 2.0}
    assert judgements[2].weights == {"a": 2.0, "b": -0.5}
    assert judgements[0].metrics == {"m": 1.0, "b.m": 3.0, "n": 4.0}


@dataclass
class TurnScorer:
    """Scores turns."""

    name: str
    weight: float
    turns: list[float]

    gate: ScoringGate | None = None

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def score(self, group: EncodedGroup, *, max_turns: int) -> ScoredGroup:
        return ScoredGroup({each.id: Score(value=1.0, turns=self.turns) for each in group.episodes})


async def test_turn_rewards_are_weighted_and_summed_by_turn(group: Callable[..., Group]) -> None:
    scorers = [Ranker("whole", 1.0), TurnScorer("a", 2.0, [0.5, 1.0]), TurnScorer("b", -1.0, [0.25, 0.0])]
    judgement = (await judged(scorers, group("x")))[0]
    assert judgement.rewards == {"whole": 0.0, "a": 2.5, "b": 1.25}
    assert judgement.turns == [0.75, 2.0]
    assert judgement.reward == 2 * 2.5 - 1.25
    broken = await judged([*scorers, Ranker("c", failing="group/0")], group("x"))
    assert (broken[0].reward, broken[0].turns) == (None, ())


async def test_one_failed_component_leaves_no_reward(group: Callable[..., Group]) -> None:
    judgements = await judged([Ranker("a"), Ranker("b", failing="group/1")], group("x", "y"))
    assert [each.reward for each in judgements] == [0.0, None]
    assert judgements[1].failure == FAILURE
    assert judgements[1].rewards == {"a": 1.0}


async def test_a_component_without_a_verdict_is_a_failure(group: Callable[..., Group]) -> None:
    judgements = await judged([Ranker(silent="group/0")], group("x"))
    assert (judgements[0].reward, judgements[0].failure and judgements[0].failure.code) == (None, "reward_missing")


async def test_a_sum_beyond_all_numbers_is_a_failure(group: Callable[..., Group]) -> None:
    judgements = await judged([Ranker("a", 1e308), Ranker("b", 1e308)], group("x", "y", "z"))
    assert [each.failure and each.failure.code for each in judgements] == [None, *["reward_not_finite"] * 2]
    assert [each.reward for each in judgements] == [0.0, None, None]


async def test_a_gated_component_scores_only_what_passes(group: Callable[..., Group]) -> None:
    rule, ranker = Ranker("rule", 1.0), Ranker("ranker", 2.0, gate=ScoringGate("rule", 1.0))
    judgements = await judged([ranker, rule], group("x", "y", "z"))
    assert ranker.seen == [2]
    assert [dict(each.rewards) for each in judgements] == [
        {"ranker": 0.0, "rule": 0.0},
        {"ranker": 0.0, "rule": 1.0},
        {"ranker": 1.0, "rule": 2.0},
    ]
    assert [each.reward for each in judgements] == [0.0, 1.0, 4.0]
    assert judgements[0].metrics == {"ranker_gated": 1.0}


async def test_a_gate_that_nobody_passes_asks_no_judge(group: Callable[..., Group]) -> None:
    ranker = Ranker("ranker", gate=ScoringGate("rule", 9.0))
    assert [each.reward for each in await judged([Ranker("rule"), ranker], group("x", "y"))] == [0.0, 1.0]
    assert ranker.seen == []


async def test_a_failed_gate_is_the_failure_of_its_episode(group: Callable[..., Group]) -> None:
    ranker = Ranker("ranker", gate=ScoringGate("rule", 0.0))
    judgements = await judged([Ranker("rule", failing="group/1"), ranker], group("x", "y"))
    assert [each.failure for each in judgements] == [None, FAILURE]
    assert ranker.seen == [1]


async def test_details_are_kept_by_component(group: Callable[..., Group]) -> None:
    scores = await judge(
        [Ranker("a"), Ranker("b")], EncodedGroup(group_to_proto(group("x", "y")).SerializeToString()), max_turns=5
    )
    assert scores.details == {"a": "d", "b": "d"}
    assert scores.episodes[1].details == {"a": {"rank": 1}, "b": {"rank": 1}}


async def test_failed_episodes_are_not_shown_to_anyone(group: Callable[..., Group]) -> None:
    whole = group("x", "y")
    broken = replace(whole, episodes=[replace(whole.episodes[0], failure=FAILURE), whole.episodes[1]])
    ranker = Ranker()
    assert [each.episode_id for each in await judged([ranker], broken)] == ["group/1"]
    none_left = replace(whole, episodes=[replace(each, failure=FAILURE) for each in whole.episodes])
    assert await judged([ranker], none_left) == []
    assert ranker.seen == [1]


def test_equal_short_names_become_long_and_a_rule_is_given_once(settings: Callable[..., object]) -> None:
    from kestrl._shared.plan.settings.judge import JudgeSettings
    from kestrl.errors import UserInputError

    def made(*rules: str) -> JudgeSettings:
        made = settings(*(RewardEntry(name=rule.rpartition(":")[2], rule=rule) for rule in rules))
        assert isinstance(made, JudgeSettings)
        return made

    names = [scorer.name for scorer in rule_scorers(made("mine:score", "yours:score", "format"))]
    assert names == ["mine:score", "yours:score", "format"]
    with pytest.raises(UserInputError, match=r"spec.rewards\[1\].rule: 'format' is listed twice"):
        rule_scorers(made("format", "format"))
