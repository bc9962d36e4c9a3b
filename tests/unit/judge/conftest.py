"""A real judge with real reward processes, over real gRPC; and episodes to judge."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.ports import free_port

from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.judge import JudgeSettings, RewardEntry
from kestrl._shared.rpc import call, channel
from kestrl.api.judge.v1 import judge_pb2 as pb
from kestrl.api.judge.v1 import judge_pb2_grpc as stubs
from kestrl.episode import CallOutcome, Episode, Group, Row, Scenario, StopReason, ToolCall, Turn
from kestrl.episode.codec import group_to_proto
from kestrl.errors import Failure
from kestrl_judge.service import run_judge

HERE = str(Path(__file__).parent)


def make_call(outcome: CallOutcome = CallOutcome.OK, name: str = "search", **arguments: Any) -> ToolCall:
    return ToolCall(turn=0, name=name, raw="", arguments=arguments, outcome=outcome, text="")


def make_episode(
    text: str = "",
    *calls: ToolCall,
    index: int = 0,
    stop: StopReason = StopReason.ANSWERED,
    failure: Failure | None = None,
) -> Episode:
    turn = Turn(
        index=0, row=0, start=1, end=2, text=text, finish_reason="stop", engine="engine-0", policy="base", seconds=0.1
    )
    row = Row(token_ids=array("i", [1, 2]), mask=b"\x00\x01", logprobs=array("f", [0.0, -1.0]), policies=["base"])
    return Episode(
        id=f"group/{index}",
        group_id="group",
        scenario_id="scenario",
        index=index,
        seed=1,
        rows=[row],
        turns=[turn],
        tool_calls=list(calls),
        messages=[],
        stop_reason=stop,
        failure=failure,
        policy=None,
        engine="engine-0",
        started_at=0.0,
        seconds=1.0,
    )


def make_group(*texts: str, ground_truth: Any = None) -> Group:
    scenario = Scenario(
        id="scenario", ordinal=0, messages=[{"role": "user", "content": "?"}], ground_truth=ground_truth
    )
    return Group(
        id="group", scenario=scenario, episodes=[make_episode(text, index=index) for index, text in enumerate(texts)]
    )


@pytest.fixture
def episode() -> Callable[..., Episode]:
    return make_episode


@pytest.fixture
def tool_call() -> Callable[..., ToolCall]:
    return make_call


@pytest.fixture
def group() -> Callable[..., Group]:
    return make_group


class Client:
    """What the rollout worker does."""

    def __init__(self, stub: stubs.JudgeServiceStub) -> None:
        self._stub = stub

    async def score(self, group: Group, *, timeout: float = 20) -> list[pb.EpisodeScore]:
        return list((await self.ask(group, timeout=timeout)).scores)

    async def ask(self, group: Group, *, timeout: float = 20) -> pb.ScoreGroupResponse:
        request = pb.ScoreGroupRequest(group=group_to_proto(group), max_turns=5)
        return await call(
            self._stub.ScoreGroup,
            request,
            pb.ScoreGroupResponse,
            timeout=timeout,
            peer="judge",
            token=Secret.ROLLOUT_TO_JUDGE.here(),
            wait=True,
        )

    async def scripted(self, *texts: str) -> list[pb.EpisodeScore]:
        return await self.score(make_group(*texts))


def make_settings(*rewards: RewardEntry, processes: int = 1) -> JudgeSettings:
    return JudgeSettings(
        component="judge-0",
        job="job",
        run="job-1",
        listen=f"127.0.0.1:{free_port()}",
        python_path=(HERE,),
        rewards=tuple(
            entry.model_copy(update={"field": f"spec.rewards[{index}].rule"}) for index, entry in enumerate(rewards)
        ),
        processes=processes,
    )


@asynccontextmanager
async def judged(*rewards: RewardEntry, processes: int = 1) -> AsyncIterator[Client]:
    wanted = make_settings(*rewards, processes=processes)
    stop = asyncio.Event()
    service = asyncio.create_task(run_judge(wanted, until=stop.wait()))
    async with connected(wanted.listen) as client:
        try:
            yield client
        finally:
            stop.set()
            await service


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    async with channel(address) as connection:
        yield Client(stubs.JudgeServiceStub(connection))


@pytest.fixture
def connect() -> Any:
    """`async with connect(address) as client`."""
    return connected


@pytest.fixture
def judge() -> Any:
    """`async with judge(RewardEntry(...), ...) as client`."""
    return judged


@pytest.fixture
def settings() -> Any:
    return make_settings
