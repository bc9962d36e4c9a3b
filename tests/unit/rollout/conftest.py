"""A whole stage for the rollout worker: a small model, a fake engine over HTTP, fake tools and judge over gRPC, the
worker itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Completion, FakeEngine, Fault, Prompt
from tests.fakes.ports import free_port
from tests.fakes.small_models import (  # noqa: F401 - fixtures
    chat_model,
    forgetful_template,
    load,
    model_folder,
    pytest_generate_tests,
    qwen,
    write_model,
)

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.rollout import RolloutSettings
from kestrl._shared.text.chat_model import ChatModel
from kestrl.api.common.v1 import common_pb2
from kestrl.api.judge.v1 import judge_pb2, judge_pb2_grpc
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.api.tools.v1 import tools_pb2, tools_pb2_grpc
from kestrl.episode import Episode, Group, Scenario
from kestrl.episode.codec import group_from_proto, policy_to_proto, scenario_to_proto
from kestrl_rollout.groups.group_runner import GroupRunner
from kestrl_rollout.service import group_runner
from kestrl_rollout.servicer import RolloutServicer


def tool(name: str, description: str = "", **properties: Any) -> tools_pb2.ToolSchema:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return tools_pb2.ToolSchema(name=name, description=description, parameters_json=json.dumps(schema))


Handler = Callable[[dict[str, Any]], "str | tools_pb2.CallResponse | Awaitable[str | tools_pb2.CallResponse]"]


class FakeTools(tools_pb2_grpc.ToolServiceServicer):
    """Answers calls with functions, and notes sessions."""

    def __init__(self) -> None:
        self.handlers: dict[str, Handler] = {
            "search": lambda arguments: f"found {arguments['word']}",
            "answer": lambda arguments: tools_pb2.CallResponse(
                outcome="ok", text="", final=True, data_json=json.dumps({"said": arguments["text"]})
            ),
        }
        self.schemas = [
            tool("search", "Searches.", word={"type": "string", "description": "What to look for."}),
            tool("answer", "Ends.", text={"type": "string"}),
        ]
        self.sandboxes: dict[str, common_pb2.SandboxInUse] = {}
        self.opened: dict[str, tools_pb2.Opening] = {}
        """By session, in order."""
        self.calls: list[tools_pb2.CallRequest] = []
        self.closed: list[str] = []
        self.open_error: Exception | None = None
        self.states: dict[str, Any] | Exception = {}
        """What GetState answers."""
        self.prompt: str | Exception = ""
        """What Open answers."""
        self.close_error: Exception | None = None
        self.close_gate: asyncio.Event | None = None
        self.all_closed = asyncio.Event()

    async def ListTools(self, request: Any, context: Any) -> tools_pb2.ListToolsResponse:
        return tools_pb2.ListToolsResponse(tools=self.schemas, sandboxes=self.sandboxes)

    async def Call(self, request: tools_pb2.CallRequest, context: Any) -> tools_pb2.CallResponse:
        if self.open_error is not None and request.HasField("opening"):
            raise self.open_error
        if request.session_id not in self.opened:
            assert request.HasField("opening")
            self.opened[request.session_id] = request.opening
        self.calls.append(request)
        answer = self.handlers[request.name](json.loads(request.arguments_json))
        if isinstance(answer, Awaitable):
            answer = await answer
        made = tools_pb2.CallResponse(outcome="ok", text=answer) if isinstance(answer, str) else answer
        for name, used in (self.sandboxes if request.HasField("opening") else {}).items():
            made.sandboxes[name].CopyFrom(used)
        return made

    async def Open(self, request: tools_pb2.OpenRequest, context: Any) -> tools_pb2.OpenResponse:
        self.opened[request.session_id] = request.opening
        if isinstance(self.prompt, Exception):
            raise self.prompt
        return tools_pb2.OpenResponse(prompt=self.prompt)

    async def GetState(self, request: tools_pb2.GetStateRequest, context: Any) -> tools_pb2.GetStateResponse:
        if request.session_id not in self.opened:
            assert request.HasField("opening")
            self.opened[request.session_id] = request.opening
        if isinstance(self.states, Exception):
            raise self.states
        return tools_pb2.GetStateResponse(state_json=json.dumps(self.states))

    async def Close(self, request: tools_pb2.CloseRequest, context: Any) -> tools_pb2.CloseResponse:
        if self.close_gate is not None:
            await self.close_gate.wait()
        if request.session_id in self.opened:
            self.closed.append(self.opened[request.session_id].episode_id)
        if len(self.closed) == len(self.opened):
            self.all_closed.set()
        if self.close_error is not None:
            raise self.close_error
        return tools_pb2.CloseResponse()


class FakeJudge(judge_pb2_grpc.JudgeServiceServicer):
    """Scores with a function; by default every episode earns its index."""

    def __init__(self) -> None:
        self.requests: list[judge_pb2.ScoreGroupRequest] = []
        self.details_json = ""
        self.score: Callable[[Any], Any] = lambda episode: judge_pb2.EpisodeScore(
            episode_id=episode.id,
            reward=float(episode.index),
            rewards={"rule": 1.0},
            reward_weights={"rule": 0.5},
            metrics={"correct": 1.0},
        )

    async def ScoreGroup(self, request: judge_pb2.ScoreGroupRequest, context: Any) -> judge_pb2.ScoreGroupResponse:
        self.requests.append(request)
        scores = [self.score(episode) for episode in request.group.episodes]
        for index, score in enumerate(scores):
            if isinstance(score, Awaitable):
                scores[index] = await score
        return judge_pb2.ScoreGroupResponse(
            scores=[score for score in scores if score is not None], details_json=self.details_json
        )


@asynccontextmanager
async def served(name: str, register: Callable[[Any], None], **options: Any) -> AsyncGenerator[str]:
    """A real gRPC server; ends with the context."""
    stop, address = asyncio.Event(), f"127.0.0.1:{free_port()}"
    server = asyncio.create_task(rpc.serve(name, address, register, until=stop.wait(), grace=0.1, **options))
    try:
        yield address
    finally:
        stop.set()
        await server


@dataclass
class Stage:
    """Everything around a worker, and ways to talk to it."""

    chat_model: ChatModel
    tools: FakeTools
    judge: FakeJudge
    engines: list[FakeEngine]
    groups: GroupRunner
    address: str
    channel: rpc.Channel

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def ids(self, text: str) -> list[int]:
        """What the model samples to write this, control tokens included."""
        return self.chat_model.vocabulary.whole(text)

    def says(self, *turns: str | Fault | Callable[[Prompt], Any]) -> None:
        """Scripts every engine: the n-th turn of any episode says `turns[n]`, and ends by itself."""

        def script(prompt: Prompt) -> Any:
            index = self.chat_model.vocabulary.decode(prompt.token_ids).count("<|im_start|>assistant") - 1
            said = turns[min(index, len(turns) - 1)]
            if callable(said):
                said = said(prompt)
            return Completion(token_ids=self.ids(said + "<|im_end|>")) if isinstance(said, str) else said

        for engine in self.engines:
            engine.script = script

    def request(self, **changes: Any) -> pb.RunGroupRequest:
        scenario = changes.pop("scenario", None) or Scenario(
            id="s-1",
            ordinal=0,
            messages=changes.pop("messages", [{"role": "user", "content": "Find the kestrel."}]),
            tools=changes.pop("tools", None),
            tools_kwargs={"search": {"create_kwargs": {"inbox": "a"}}},
            ground_truth="42",
        )
        sampling = {"temperature": 1.0, "max_tokens": 500, "max_turns": 6, **changes.pop("sampling", {})}
        deadlines = {"tool": 10, "turn": 20, "episode": 30, "group": 40, **changes.pop("deadlines", {})}
        policy = changes.pop("policy", None)
        fields: dict[str, Any] = {"group_id": "g-1", "size": 1, "seed": 7, "purpose": "train", **changes}
        return pb.RunGroupRequest(
            scenario=scenario_to_proto(scenario),
            engines=[pb.Engine(name=f"engine-{index}", url=engine.url) for index, engine in enumerate(self.engines)],
            sampling=pb.Sampling(**sampling),
            deadlines=pb.Deadlines(**deadlines),
            policy=policy_to_proto(policy),
            **fields,
        )

    async def stream(self, request: pb.RunGroupRequest) -> AsyncIterator[int | Group]:
        stub: Any = stubs.RolloutServiceStub(self.channel)
        async for answer in rpc.stream(
            stub.RunGroup,
            request,
            pb.RunGroupResponse,
            timeout=50,
            peer="rollout",
            token=Secret.LEARNER_TO_ROLLOUT.here(),
        ):
            kind = answer.WhichOneof("event")
            yield answer.ended if kind == "ended" else group_from_proto(answer.group)

    async def run(self, **changes: Any) -> Group:
        """Runs a group to its end; the last message is the group, the ones before tell of all its episodes."""
        events = [event async for event in self.stream(self.request(**changes))]
        group = events.pop()
        assert isinstance(group, Group)
        assert sum(event for event in events if isinstance(event, int)) == len(group.episodes)
        return group

    async def closed(self) -> list[str]:
        """The episodes whose tool sessions were closed; those that are being closed are waited for."""
        await self.groups._episodes.closed()
        return sorted(self.tools.closed)

    async def episode(self, **changes: Any) -> Episode:
        """Runs a group of one."""
        (episode,) = (await self.run(**changes)).episodes
        return episode

    async def capacity(self) -> pb.GetCapacityResponse:
        stub: Any = stubs.RolloutServiceStub(self.channel)
        return await rpc.call(
            stub.GetCapacity,
            pb.GetCapacityRequest(),
            pb.GetCapacityResponse,
            timeout=5,
            peer="rollout",
            token=Secret.LEARNER_TO_ROLLOUT.here(),
            wait=True,
        )


MakeStage = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def make_stage(
    model_folder: Path,  # noqa: F811
    load: Any,  # noqa: F811
    chat_model: ChatModel,  # noqa: F811
) -> AsyncIterator[MakeStage]:
    """Builds a stage; options are settings of the worker, and `engines`, `folder`."""
    async with AsyncExitStack() as stack:

        async def make(*, engines: int = 1, folder: Path | None = None, **settings: Any) -> Stage:
            fakes = [
                await stack.enter_async_context(
                    FakeEngine(eos_id=258, vocab_size=250, context_length=settings.get("context_length", 4096))
                )
                for _ in range(engines)
            ]
            tools, judge = FakeTools(), FakeJudge()
            tools_address = await stack.enter_async_context(
                served("tools", partial(tools_pb2_grpc.add_ToolServiceServicer_to_server, tools), bundles=True)
            )
            judge_address = await stack.enter_async_context(
                served("judge", partial(judge_pb2_grpc.add_JudgeServiceServicer_to_server, judge), bundles=True)
            )
            values = {
                "component": "rollout-0",
                "job": "job",
                "run": "run",
                "listen": "unused:1",
                "tokenizer": str(folder or model_folder),
                "agent": "tool_agent",
                "tools_address": tools_address,
                "judge_address": judge_address,
                "concurrency": 8,
                "context_length": 4096,
                "drain_seconds": 0.05,
                **settings,
            }
            settings_read = RolloutSettings.model_validate(values)
            groups = await stack.enter_async_context(group_runner(settings_read))
            servicer = RolloutServicer(groups, context_length=settings_read.context_length)
            address = await stack.enter_async_context(
                served(
                    "rollout-0",
                    lambda server: stubs.add_RolloutServiceServicer_to_server(servicer, server),
                    drain=groups.drain,
                )
            )
            channel = await stack.enter_async_context(rpc.channel(address))
            stage = Stage(
                chat_model=chat_model,
                tools=tools,
                judge=judge,
                engines=fakes,
                groups=groups,
                address=address,
                channel=channel,
            )
            await stage.capacity()
            return stage

        yield make


@pytest.fixture
async def stage(make_stage: MakeStage) -> Stage:
    return await make_stage()


@pytest.fixture
def call_text() -> Callable[..., str]:
    """A tool call as a model writes it."""

    def write(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return write


@pytest.fixture
def make_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterable[Callable[[str, str], str]]:
    """Writes a user's module and makes it importable for this test only."""
    import sys

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return name

    yield write
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if name.partition(".")[0] == "verl" or (file and Path(file).is_relative_to(tmp_path)):
            del sys.modules[name]
