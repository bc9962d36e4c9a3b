"""What becomes of a group: one table."""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest

from kestrl._shared.plan.algorithm import AlgorithmSettings
from kestrl.episode import UNSCORED, Episode, Group, PolicyVersion, Row, Scenario, StopReason, Turn
from kestrl.errors import Boundary, Failure
from kestrl_learner.dispatch.acceptance import MAX_ATTEMPTS, GroupAction, GroupDecision, decide

POLICY = PolicyVersion(job="job", step=3, sha256="ab" * 32)
SCENARIO = Scenario(id="s", ordinal=7, messages=[{"role": "user", "content": "?"}])
LASTING = Failure(boundary=Boundary.TOOL, code="tool_raised", message="a bug")
PASSING = Failure(boundary=Boundary.ENGINE, code="engine_failed", message="gone", retryable=True)


def episode(index: int, **changes: Any) -> Episode:
    given = Episode(
        id=f"g/{index}",
        group_id="g",
        scenario_id="s",
        index=index,
        seed=index,
        rows=[
            Row(
                token_ids=array("i", [1, 2, 3]),
                mask=b"\x00\x01\x01",
                logprobs=array("f", [0.0, -1.0, -2.0]),
                policies=[POLICY.name],
            )
        ],
        turns=[
            Turn(
                index=0,
                row=0,
                start=1,
                end=3,
                text="",
                finish_reason="stop",
                engine="engine-0",
                policy=POLICY.name,
                seconds=0.1,
            )
        ],
        tool_calls=[],
        messages=[],
        stop_reason=StopReason.ANSWERED,
        failure=None,
        policy=POLICY,
        engine="engine-0",
        started_at=0.0,
        seconds=0.1,
        reward=float(index),
    )
    return replace(given, **changes)


def judged(
    *episodes: Episode,
    on_failed: Literal["drop", "shrink"] = "drop",
    failures_before: int = 0,
    scenario: Scenario = SCENARIO,
    proved: Mapping[PolicyVersion, Collection[str]] | None = None,
) -> GroupDecision:
    algorithm = AlgorithmSettings(
        name="grpo",
        group_size=3,
        groups_per_step=1,
        learning_rate=1.0,
        clip_low=0.2,
        clip_high=0.2,
        max_staleness=0,
        on_failed_episode=on_failed,
        min_group_size=2,
        max_grad_norm=1.0,
        weight_decay=0.0,
        warmup_steps=0,
        advantage="grpo",
        loss="ppo_clip",
    )
    return decide(
        Group(id="g", scenario=scenario, episodes=episodes),
        scenario=SCENARIO,
        policy=POLICY,
        proved={POLICY: ["engine-0"]} if proved is None else proved,
        algorithm=algorithm,
        vocabulary=10,
        failures_before=failures_before,
    )


def failed(index: int, failure: Failure) -> Episode:
    return episode(index, failure=failure, reward=None, stop_reason=StopReason.FAILED)


def test_a_whole_group_is_trained_on_as_it_is() -> None:
    decision = judged(episode(0), episode(1), episode(2))
    assert decision.action is GroupAction.TRAIN
    assert len(decision.group.episodes) == 3
    assert decision.failures == ()


@pytest.mark.parametrize(
    ("broken", "on_failed", "before", "action", "kept"),
    [
        ([LASTING], "drop", 0, GroupAction.DROP, 3),
        ([PASSING], "drop", 0, GroupAction.RETRY, 3),
        ([PASSING], "drop", MAX_ATTEMPTS - 1, GroupAction.DROP, 3),
        ([PASSING, LASTING], "drop", 0, GroupAction.DROP, 3),
        ([LASTING], "shrink", 0, GroupAction.TRAIN, 2),
        ([LASTING, LASTING], "shrink", 0, GroupAction.DROP, 3),
        ([PASSING, PASSING], "shrink", 0, GroupAction.RETRY, 3),
    ],
    ids=[
        "a lasting failure drops the group",
        "a passing one is worth another attempt",
        "but not without end",
        "nor when a lasting one would come again",
        "shrink goes on with the rest",
        "shrink needs a minimum",
        "below the minimum a passing failure is tried again",
    ],
)
def test_failed_episodes(
    broken: list[Failure], on_failed: Literal["drop", "shrink"], before: int, action: GroupAction, kept: int
) -> None:
    episodes = [failed(index, failure) for index, failure in enumerate(broken)]
    decision = judged(
        *episodes,
        *(episode(index) for index in range(len(broken), 3)),
        on_failed=on_failed,
        failures_before=before,
    )
    assert decision.action is action
    assert len(decision.group.episodes) == kept
    assert list(decision.failures) == broken


NEWER = PolicyVersion(job="job", step=4, sha256="cd" * 32)


def of_two_versions(index: int, *, engine: str = "engine-1", policy: str = NEWER.name) -> Episode:
    """An episode whose second token is of another version than its first."""
    episode_of_one = episode(index)
    (turn,) = episode_of_one.turns
    turns = [replace(turn, end=2), replace(turn, index=1, start=2, engine=engine, policy=policy)]
    return replace(episode_of_one, turns=turns, rows=[replace(episode_of_one.rows[0], policies=[POLICY.name, policy])])


def test_an_episode_of_several_versions_is_trained_on_if_each_was_proved_by_its_engine() -> None:
    proved = {POLICY: ["engine-0"], NEWER: ["engine-1"]}
    group = [episode(0), of_two_versions(1), episode(2)]
    assert judged(*group, proved=proved).action is GroupAction.TRAIN
    (failure,) = judged(*group).failures
    assert (failure.code, failure.message.endswith(f"requested was {POLICY.name}")) == ("wrong_policy", True)
    (failure,) = judged(episode(0), of_two_versions(1, engine="engine-0"), episode(2), proved=proved).failures
    assert (failure.code, NEWER.name in failure.message) == ("unproved_engine", True)
    (failure,) = judged(episode(0), of_two_versions(1, policy="job.2.00"), episode(2), proved=proved).failures
    assert (failure.code, "or a newer one" in failure.message) == ("wrong_policy", True)


def with_row(index: int, **changes: Any) -> Episode:
    made = episode(index)
    return replace(made, rows=[replace(made.rows[0], **changes)])


def with_turn(index: int, **changes: Any) -> Episode:
    made = episode(index)
    return replace(made, turns=[replace(made.turns[0], **changes)])


@pytest.mark.parametrize(
    ("odd", "code"),
    [
        (with_turn(1, policy="job.2.000000000000"), "wrong_policy"),
        (with_turn(1, policy="base"), "wrong_policy"),
        (with_turn(1, engine="engine-9"), "unproved_engine"),
        (episode(0), "malformed_group"),
        (with_row(1, logprobs=array("f", [0.0, float("nan"), -1.0])), "malformed_group"),
        (with_row(1, logprobs=array("f", [0.0, 0.5, -1.0])), "malformed_group"),
        (with_row(1, token_ids=array("i", [1, 2, 10])), "malformed_group"),
        (with_row(1, token_ids=array("i", [1, -2, 3])), "malformed_group"),
        (with_row(1, mask=b"\x01\x01\x01"), "malformed_group"),
        (episode(1, reward=float("nan")), "malformed_group"),
        (episode(1, reward=None), "no_reward"),
        (episode(1, rows=[]), "no_tokens"),
    ],
    ids=[
        "tokens of another version",
        "tokens of the base model",
        "an engine that has not proved the version",
        "an episode twice",
        "a log-prob that is no number",
        "a log-prob above 0",
        "a token the model does not know",
        "a negative token",
        "a row that begins with a sampled token",
        "a reward that is no number",
        "neither reward nor failure",
        "no token at all",
    ],
)
def test_what_cannot_be_is_refused_with_a_typed_reason(odd: Episode, code: str) -> None:
    decision = judged(episode(0), odd, episode(2))
    assert decision.action in {GroupAction.RETRY, GroupAction.DROP}
    assert [failure.code for failure in decision.failures] == [code]
    assert code in decision.reason


def test_a_group_of_another_scenario_is_refused() -> None:
    decision = judged(episode(0), episode(1), episode(2), scenario=replace(SCENARIO, id="other"))
    assert decision.failures[0].code == "malformed_group"


def test_a_group_with_a_missing_episode_is_refused() -> None:
    assert judged(episode(0), episode(1)).failures[0].code == "malformed_group"


def row(**changes: Any) -> Row:
    return replace(episode(0).rows[0], **changes)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (episode(0, rows=[row(mask=b"\0\2\1")]), "mask byte of 2"),
        (episode(0, turns=[]), "2 sampled tokens that belong to no turn"),
        (episode(0, turns=[replace(episode(0).turns[0], start=2)]), "1 sampled tokens that belong to no turn"),
        (episode(0, turns=[replace(episode(0).turns[0], end=9)]), "a turn at 1-9 of a row of 3 tokens"),
        (episode(0, reward=1e200), "reward 1e\\+200"),
    ],
    ids=["mask", "no turns", "half a turn", "long turn", "reward"],
)
def test_a_group_that_cannot_be_attributed_is_malformed(odd: Episode, why: str) -> None:
    decision = judged(odd, episode(1), episode(2))
    (failure,) = decision.failures
    assert (decision.action, failure.code) == (GroupAction.RETRY, "malformed_group")
    assert re.search(why, failure.message)


@pytest.mark.parametrize("on_failed", ["drop", "shrink"])
def test_a_group_that_no_judge_scored_is_masked(on_failed: Literal["drop", "shrink"]) -> None:
    unscored = Failure(boundary=Boundary.JUDGE, code=UNSCORED, message="ruler: not scored (timeout)")
    decision = judged(episode(0), episode(1), failed(2, unscored), on_failed=on_failed)
    assert (decision.action, decision.reason) == (GroupAction.MASK, "ruler: not scored (timeout)")
    assert decision.failures == [unscored]
    assert judged(failed(0, PASSING), episode(1), failed(2, unscored)).action is GroupAction.MASK


TURN = episode(0).turns[0]


def rows_of(*rows: tuple[list[int], list[int]]) -> list[Row]:
    return [
        Row(token_ids=array("i", ids), mask=bytes(mask), logprobs=array("f", [-0.5] * len(ids)), policies=[POLICY.name])
        for ids, mask in rows
    ]


def turns_of(*places: tuple[int, int, int, int]) -> list[Turn]:
    return [
        replace(TURN, index=index, row=row, start=start, end=end, seed=seed)
        for index, (row, start, end, seed) in enumerate(places)
    ]


FIRST, LONGER = ([1, 2, 3, 4], [0, 0, 1, 1]), ([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])
REPEATED: dict[str, tuple[list[Row], list[Turn], str]] = {
    "turns overlap": (rows_of(FIRST), turns_of((0, 2, 4, 7), (0, 3, 4, 8)), "turns that overlap in row 0: 2-4 and 3-4"),
    "a turn twice": (rows_of(FIRST), turns_of((0, 2, 4, 7), (0, 2, 4, 8)), "turns that overlap in row 0"),
    "one call in two rows": (
        rows_of(FIRST, LONGER),
        turns_of((0, 2, 4, 7), (1, 2, 4, 7), (1, 5, 6, 8)),
        "two turns of one seed",
    ),
    "a copy without a seed": (
        rows_of(FIRST, LONGER),
        turns_of((0, 2, 4, 7), (1, 2, 4, 0), (1, 5, 6, 8)),
        "token 2 of row 0 again in row 1",
    ),
    "a part of a copy": (
        rows_of(FIRST, ([1, 2, 3, 9], [0, 0, 1, 1])),
        turns_of((0, 2, 4, 0), (1, 2, 4, 0)),
        "token 2 of row 0 again in row 1",
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_no_sampled_token_is_trained_twice(name: str) -> None:
    rows, turns, reason = REPEATED[name]
    decision = judged(episode(0, rows=rows, turns=turns), episode(1), episode(2))
    assert decision.action is GroupAction.RETRY
    assert reason in decision.reason


@pytest.mark.parametrize(
    ("rows", "turns"),
    [
        # Two samples of one prompt that came out alike, and one of them went on.
        (rows_of(FIRST, LONGER), turns_of((0, 2, 4, 7), (1, 2, 4, 9), (1, 5, 6, 8))),
        # The copy is context.
        (rows_of(FIRST, ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 1])), turns_of((0, 2, 4, 7), (1, 5, 6, 8))),
        # A worker that names no seeds, and rows that only begin alike.
        (rows_of(FIRST, ([1, 2, 9], [0, 0, 1])), turns_of((0, 2, 4, 0), (1, 2, 3, 0))),
        # A masked copy: the loop keeps one of the rows.
        (rows_of(FIRST, ([1, 2, 3, 4], [0, 0, 0, 0])), turns_of((0, 2, 4, 0), (1, 2, 4, 0))),
    ],
)
def test_samples_that_came_out_alike_are_trained(rows: list[Row], turns: list[Turn]) -> None:
    assert judged(episode(0, rows=rows, turns=turns), episode(1), episode(2)).action is GroupAction.TRAIN


def test_a_main_row_that_is_not_there_is_malformed() -> None:
    decision = judged(episode(0, main_row=1), episode(1), episode(2))
    assert "the main row 1 of 1" in decision.reason
