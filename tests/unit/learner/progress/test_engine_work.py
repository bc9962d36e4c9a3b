"""What engines did: their servers' counts, and the turns of groups."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.episode import Episode, Group, Row, Scenario, StopReason, Turn
from kestrl.runstate.events import EnginesWorked
from kestrl.runstate.history import History
from kestrl.runstate.state import RunState
from kestrl.runstate.work import OTHERS, WORKING, EngineWork
from kestrl_learner.progress.engine_work import WorkCounts, common
from kestrl_learner.run import LearnerRun

TOKENS = st.lists(st.integers(0, 2), max_size=40)


def row(ids: Sequence[int]) -> Row:
    return Row(token_ids=array("i", ids), mask=bytes(len(ids)), logprobs=array("f", [0.0] * len(ids)), policies=())


def turn(row: int, start: int, end: int, engine: str = "engine-0") -> Turn:
    return Turn(
        index=0, row=row, start=start, end=end, text="", finish_reason="stop", engine=engine, policy="p", seconds=0.0
    )


def episode(rows: Sequence[Sequence[int]], *turns: Turn) -> Episode:
    return Episode(
        id="e", group_id="g", scenario_id="s", index=0, seed=0, rows=tuple(map(row, rows)), turns=turns, tool_calls=(),
        messages=(), stop_reason=StopReason.ANSWERED, failure=None, policy=None, engine="", started_at=0.0, seconds=0.0,
    )  # fmt: skip


def counted(*episodes: Episode) -> dict[str, EngineWork]:
    counts = WorkCounts()
    counts.add(Group(id="g", scenario=Scenario(id="s", ordinal=0, messages=()), episodes=episodes))
    return counts.lap()


def asked(turn_tokens: int, repeated_tokens: int) -> EngineWork:
    return EngineWork(turn_tokens=turn_tokens, repeated_tokens=repeated_tokens)


def test_a_turn_repeats_what_the_turn_before_it_ended_with() -> None:
    ids = range(20)
    assert counted(episode([ids], turn(0, 5, 8), turn(0, 12, 20))) == {"engine-0": asked(17, 8)}


def test_episodes_of_a_group_repeat_its_first_prompt() -> None:
    first, other = episode([range(9)], turn(0, 6, 9)), episode([[0, 1, 2, 3, 9, 9, 9]], turn(0, 6, 7))
    assert counted(first, first, other) == {"engine-0": asked(18, 10)}


def test_a_row_of_its_own_repeats_what_it_shares_with_others_of_its_episode() -> None:
    branched = episode([range(12), [*range(8), 50, 51]], turn(0, 4, 6), turn(0, 9, 12), turn(1, 9, 10))
    assert counted(branched) == {"engine-0": asked(22, 6 + 8)}


def test_turns_count_for_the_engine_that_served_them() -> None:
    moved = episode([range(12)], turn(0, 4, 6), turn(0, 9, 12, "engine-1"))
    assert counted(moved) == {"engine-0": asked(4, 0), "engine-1": asked(9, 6)}


@pytest.mark.parametrize("wrong", [turn(1, 1, 2), turn(-1, 1, 2), turn(0, 5, 30), turn(0, 6, 5)], ids=str)
def test_turns_outside_of_their_row_are_not_counted(wrong: Turn) -> None:
    assert counted(episode([range(9)], wrong)) == {}


@given(TOKENS, TOKENS)
def test_the_common_beginning_is_as_long_as_it_can_be(first: list[int], second: list[int]) -> None:
    length = common(array("i", first), array("i", second))
    assert first[:length] == second[:length]
    assert first[length : length + 1] != second[length : length + 1] or length == len(first) == len(second)


def test_counts_of_a_server_are_those_since_the_last_look_also_after_it_started_anew() -> None:
    counts = WorkCounts()
    for sampled, decode in ((100, 4.0), (130, 3.5), (130, 6.0), (20, 1.0)):  # what is left of a sum may fall
        counts.observe("engine-0", EngineWork(prompt_tokens=7, sampled_tokens=sampled, decode_seconds=decode))
    assert counts.lap() == {"engine-0": EngineWork(prompt_tokens=7, sampled_tokens=30 + 20, decode_seconds=2.0 + 1.0)}
    assert counts.lap() == {}, "a lap is counted once"
    counts.observe("engine-0", EngineWork(prompt_tokens=8, sampled_tokens=21, busy_seconds=9.0))
    counts.observe("engine-0", EngineWork(prompt_tokens=8, sampled_tokens=22, busy_seconds=8.9))
    assert counts.lap()["engine-0"].sampled_tokens == 1 + 1, "rounded seconds say nothing"
    counts.observe("engine-0", EngineWork(prompt_tokens=9, sampled_tokens=23, busy_seconds=2.0))
    assert counts.lap()["engine-0"].busy_seconds == 2.0, "a server that has been busy for a shorter time is a new one"
    counts.forget("engine-0")
    counts.observe("engine-0", EngineWork(sampled_tokens=900))
    assert counts.lap() == {}, "the engine under this name is another one"


def test_the_work_of_a_run_is_summed_by_engine_and_bounded() -> None:
    state = RunState()
    many = {f"engine-{number}": EngineWork(sampled_tokens=1) for number in range(WORKING + 5)}
    for _ in range(2):
        state = EnginesWorked(work=many).after(state)
    work = RunState.from_json(state.to_json(), "here").history.work
    assert len(work) == WORKING + 1
    assert (work["engine-0"].sampled_tokens, work[OTHERS].sampled_tokens) == (2, 10)


def test_shares_are_unknown_without_counts() -> None:
    nothing = EngineWork()
    shares = (nothing.tokens_per_second, nothing.prefill_share, nothing.cached_share, nothing.repeated_share)
    assert shares == (None, None, None, None)
    some = EngineWork(
        busy_seconds=2, sampled_tokens=30, prompt_tokens=8, cached_tokens=2, prefill_seconds=1, decode_seconds=3,
        turn_tokens=4, repeated_tokens=3,
    )  # fmt: skip
    shares = (some.tokens_per_second, some.prefill_share, some.cached_share, some.repeated_share)
    assert shares == (15, 0.25, 0.25, 0.75)


@pytest.mark.usefixtures("quick")
async def test_a_run_stores_what_its_engines_did(staged: Any) -> None:
    async with staged() as stage:
        answered = stage.agents[0].GetEngine
        looks = 0

        async def counting(request: Any, context: Any) -> ipb.GetEngineResponse:
            nonlocal looks
            answer = await answered(request, context)
            looks += 1
            answer.idle.CopyFrom(ipb.EngineIdle(idle=looks, observed=3 * looks))
            answer.work.CopyFrom(
                ipb.EngineWork(
                    prompt_tokens=10 * looks,
                    cached_tokens=4 * looks,
                    sampled_tokens=6 * looks,
                    prefill_seconds=looks,
                    decode_seconds=3 * looks,
                )
            )
            return answer

        stage.agents[0].GetEngine = counting
        run = LearnerRun(stage.settings)
        await run.main()
        work = run.progress.state.history.work["engine-0"]
        assert 0 < work.sampled_tokens < 6 * looks, "what came before the first look is no work of this run"
        assert (work.tokens_per_second, work.prefill_share, work.cached_share) == (3, 0.25, 0.4)
        assert work.turn_tokens > work.repeated_tokens > 0
        stored = History.model_validate(stage.summary["state"]["history"]).work
        assert stored == run.progress.state.history.work
