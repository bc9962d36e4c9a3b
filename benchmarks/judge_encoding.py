"""CPU of the judge for a group whose rules do nothing, against writing the same bytes to the same reward processes.

The judge is the real servicer with real reward processes. It receives an encoded group of 8 episodes of 8,000 tokens
each, and passes every episode to every rule. The reference writes requests that were encoded before and reads the
answers: what is beyond it is decoding, encoding and combining. Only this process's CPU counts.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack

from benchmarks.report import Row, main

from kestrl._shared.plan.settings.judge import JudgeSettings, RewardEntry
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.episode import (
    ENVIRONMENT_REWARD,
    CallOutcome,
    Episode,
    Group,
    PolicyVersion,
    Scenario,
    StopReason,
    ToolCall,
    Turn,
)
from kestrl.episode import Row as TokenRow
from kestrl.episode.codec import group_to_proto
from kestrl_judge.encoded import ReceivedRequest
from kestrl_judge.process import ProcessParameters, RewardProcess
from kestrl_judge.rules import rule_scorers
from kestrl_judge.servicer import JudgeServicer

EPISODES, TOKENS, TURNS = 8, 8_000, 10
GROUPS, ROUNDS = 20, 5
RULES = ("loop_reward", "format", "environment_reward")
SECONDS = 60.0
ScoreGroup = Callable[[], Awaitable[object]]


def episode(index: int) -> Episode:
    turns = [
        Turn(
            index=turn, row=0, start=turn, end=turn + 1, text="x" * 2_000, finish_reason="stop", engine="e", policy="p",
            seconds=1.0,
        )
        for turn in range(TURNS)
    ]  # fmt: skip
    calls = [
        ToolCall(turn=turn, name="search", raw="{}", arguments={"query": "a"}, outcome=CallOutcome.OK, text="y" * 2_000)
        for turn in range(TURNS)
    ]
    row = TokenRow(
        token_ids=array("i", range(TOKENS)),
        mask=b"\1" * TOKENS,
        logprobs=array("f", [-0.1] * TOKENS),
        policies=["p"] * TURNS,
    )
    roles = ("tool", "assistant")
    return Episode(
        id=f"group/{index}",
        group_id="group",
        scenario_id="scenario",
        index=index,
        seed=index,
        rows=[row],
        turns=turns,
        tool_calls=calls,
        messages=[{"role": roles[number % 2], "content": "x" * 2_000} for number in range(2 * TURNS)],
        stop_reason=StopReason.ANSWERED,
        failure=None,
        policy=PolicyVersion(job="job", step=1, sha256="0" * 64),
        engine="e",
        started_at=0.0,
        seconds=1.0,
        loop_reward=1.0,
        environments={"environment": {ENVIRONMENT_REWARD: 1.0}},
    )


def encoded_group() -> bytes:
    scenario = Scenario(
        id="scenario",
        ordinal=0,
        messages=[{"role": "user", "content": "question"}],
        ground_truth={"answer": "a", "ids": list(range(50))},
    )
    group = Group(id="group", scenario=scenario, episodes=[episode(index) for index in range(EPISODES)])
    return pb.ScoreGroupRequest(group=group_to_proto(group), max_turns=TURNS).SerializeToString()


def single_requests(group: bytes) -> list[bytes]:
    """The requests of a reward process, one for each episode."""
    message = pb.ScoreGroupRequest.FromString(group)
    requests: list[bytes] = []
    for encoded_episode in message.group.episodes:
        request = pb.ScoreGroupRequest(max_turns=TURNS)
        request.group.id = message.group.id
        request.group.scenario.CopyFrom(message.group.scenario)
        request.group.episodes.append(encoded_episode)
        requests.append(request.SerializeToString())
    return requests


async def cpu_milliseconds(score_group: ScoreGroup, groups: int) -> float:
    """CPU of this process for a group."""
    began = time.process_time()
    for _ in range(groups):
        await score_group()
    return (time.process_time() - began) / groups * 1000


async def passing_on(rules: Sequence[str], group: bytes, stack: AsyncExitStack) -> ScoreGroup:
    """Writes requests that were encoded before to reward processes, and reads the answers."""
    requests = single_requests(group)
    processes: list[RewardProcess] = []
    for rule in rules:
        parameters = ProcessParameters(name=rule, rule=rule, field="rewards", python_path=(), config={})
        process = await RewardProcess.start(parameters)
        stack.push_async_callback(process.kill)
        processes.append(process)

    async def ask(process: RewardProcess) -> None:
        for request in requests:
            await process.ask([request], seconds=SECONDS)

    async def ask_all() -> None:
        await asyncio.gather(*map(ask, processes))

    return ask_all


async def judging(rules: Sequence[str], group: bytes, stack: AsyncExitStack) -> ScoreGroup:
    """Scores the group as the judge does, from the received bytes to its answer."""
    settings = JudgeSettings(
        component="judge-0",
        job="job",
        run="run",
        listen="127.0.0.1:0",
        rewards=tuple(RewardEntry(name=rule, rule=rule, seconds=SECONDS, field="rewards") for rule in rules),
        processes=1,
    )
    scorers = rule_scorers(settings)
    for scorer in scorers:
        await scorer.open()
        stack.push_async_callback(scorer.close)
    servicer = JudgeServicer("judge-0", scorers)

    async def score() -> None:
        response = await servicer.ScoreGroup(ReceivedRequest.read(group), None)
        assert all(scored.HasField("reward") for scored in response.scores), response.scores[0].failure

    return score


async def compared(rules: Sequence[str], group: bytes, groups: int, rounds: int) -> tuple[float, float]:
    """CPU of a group in the judge and of passing its bytes on: the least of rounds that alternate."""
    async with AsyncExitStack() as stack:
        stages = [await judging(rules, group, stack), await passing_on(rules, group, stack)]
        for stage in stages:
            await stage()
        measured = [[await cpu_milliseconds(stage, groups) for stage in stages] for _ in range(rounds)]
    judge, reference = map(min, zip(*measured, strict=True))
    return judge, reference


def measure(groups: int = GROUPS, rounds: int = ROUNDS) -> Iterator[Row]:
    group = encoded_group()
    for count in (1, len(RULES)):
        judge, reference = asyncio.run(compared(RULES[:count], group, groups, rounds))
        yield Row(
            name=f"judge, group of {EPISODES} x {TOKENS} tokens, {count} rule{'s' if count > 1 else ''}",
            value=judge,
            unit="ms CPU",
            reference=reference,
            against="passing the bytes on",
        )


if __name__ == "__main__":
    main(__doc__, measure, lambda: measure(groups=2, rounds=1))
