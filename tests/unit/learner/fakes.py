"""Fakes of a learner's peers over real gRPC: engine agents that verify versions against an oracle, and rollout
workers."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from tests.fakes.ports import free_port

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.algorithm import CorrectionSettings
from kestrl.api.common.v1 import common_pb2 as cpb
from kestrl.api.inference.v1 import inference_pb2 as ipb
from kestrl.api.inference.v1 import inference_pb2_grpc as istubs
from kestrl.api.learner.v1 import learner_pb2 as lpb
from kestrl.api.learner.v1 import learner_pb2_grpc as lstubs
from kestrl.api.rollout.v1 import rollout_pb2 as rpb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as rstubs
from kestrl.episode import Episode, Group, PolicyVersion, Row, StopReason, Turn
from kestrl.episode.codec import (
    failure_to_proto,
    group_to_proto,
    policy_from_proto,
    policy_to_proto,
    scenario_from_proto,
)
from kestrl.errors import EngineFailure, Failure, KestrlError
from kestrl.storage import fetch_adapter, open_store
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_learner.run import LearnerRun

VOCABULARY = 64
DECOUPLED = CorrectionSettings(decoupled=True, weights="token")
ANSWER = 5
"""Sampled tokens of an episode's first turn; its second is one token longer."""


def make_policy(
    folder: Path, *, seed: int = 1, rank: int = 4, disturb: float = 0.0, dtype: str = "float32", **options: Any
) -> PolicyModel:
    """A policy model; with `disturb`, B is random instead of zero, so that the adapter matters."""
    policy = PolicyModel(str(folder), dtype=dtype, rank=rank, alpha=8.0, targets="all-linear", seed=seed, **options)
    if disturb:
        with torch.no_grad():
            for name, weight in policy.peft.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(weight, std=disturb)
    return policy


def wide_model(folder: Path, **shape: Any) -> Path:
    """A random model with heads of the least width that FlexAttention computes on a GPU, 16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    Qwen3ForCausalLM(Qwen3Config(**given | shape)).save_pretrained(folder)
    return folder


def model_with_a_window(folder: Path) -> Path:
    """A random model of which every second layer sees the last tokens only, so that its rows are padded."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@asynccontextmanager
async def served(name: str, register: Callable[[Any], None], address: str | None = None) -> AsyncGenerator[str]:
    """A real gRPC server; ends with the context."""
    stop = asyncio.Event()
    address = address or f"127.0.0.1:{free_port()}"
    server = asyncio.create_task(rpc.serve(name, address, register, until=stop.wait(), grace=0.1))
    try:
        yield address
    finally:
        stop.set()
        await server


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what a fake saw has no event
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(settings: Any) -> AsyncGenerator[tuple[LearnerRun, asyncio.Task[None]]]:
    """A run, waited for at the end."""
    run = LearnerRun(settings)
    task = asyncio.create_task(run.main())
    try:
        yield run, task
        async with asyncio.timeout(20):
            await task
    finally:
        task.cancel()
        await asyncio.wait([task])


@dataclass
class Watcher:
    """Progress reports of a learner."""

    stub: Any
    reports: list[lpb.WatchProgressResponse] = field(default_factory=list)
    ended: bool = False
    """Whether the learner ended the stream."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last(self) -> lpb.WatchProgressResponse:
        return self.reports[-1]

    async def reported(self, what: Callable[[lpb.WatchProgressResponse], Any]) -> lpb.WatchProgressResponse:
        """Waits until the newest report satisfies a predicate."""
        async with asyncio.timeout(20):
            while not (self.reports and what(self.last)):
                self.changed.clear()
                await self.changed.wait()
        return self.last

    async def follow(self, request: lpb.WatchProgressRequest) -> None:
        answers = rpc.stream(
            self.stub.WatchProgress,
            request,
            lpb.WatchProgressResponse,
            timeout=None,
            peer="learner",
            token=Secret.CONTROLLER_TO_LEARNER.here(),
        )
        async for report in answers:
            self.reports.append(report)
            self.changed.set()
        self.ended = True

    async def drain(self) -> None:
        await rpc.call(
            self.stub.Drain,
            lpb.DrainRequest(),
            lpb.DrainResponse,
            timeout=5,
            peer="learner",
            token=Secret.CONTROLLER_TO_LEARNER.here(),
        )


@asynccontextmanager
async def watched(address: str, *, min_interval: float = 0.0, seconds: float = 20) -> AsyncGenerator[Watcher]:
    """Follows a learner, as the operator does."""
    async with rpc.channel(address) as connection:
        assert await rpc.connected(connection, seconds=seconds)
        watcher = Watcher(lstubs.LearnerServiceStub(connection))
        following = asyncio.create_task(watcher.follow(lpb.WatchProgressRequest(min_interval_seconds=min_interval)))
        try:
            yield watcher
        finally:
            following.cancel()
            await asyncio.wait([following])
        if not following.cancelled():
            following.result()


class Oracle:
    """Log-probs of any published version, as an engine would give them."""

    def __init__(self, folder: Path) -> None:
        self._policy = make_policy(folder)
        self._weights: dict[str, dict[str, torch.Tensor]] = {}
        self._memory: dict[tuple[str, tuple[int, ...]], list[float]] = {}

    def learn(self, name: str, folder: Path) -> None:
        """Takes a version in from its folder."""
        self._weights[name] = load((folder / "adapter_model.safetensors").read_bytes())

    def score(self, name: str, token_ids: Iterable[int]) -> list[float]:
        """Log-prob of each token after the first."""
        ids = tuple(token_ids)
        if (name, ids) not in self._memory:
            if name in self._weights:
                self._policy.load_adapter_state(self._weights[name])
            self._memory[name, ids] = self._policy.score(ids, adapter=name in self._weights)
        return self._memory[name, ids]


class FakeAgent(istubs.EngineAgentServiceServicer):
    """An engine agent: fetches and verifies versions against the oracle, or fails as configured."""

    def __init__(self, name: str, oracle: Oracle, folder: Path, *, slots: int = 3) -> None:
        self.name, self._oracle, self._folder, self.slots = name, oracle, folder, slots
        self.held: dict[str, tuple[PolicyVersion, bool]] = {}
        self.retired: list[str] = []
        self.most_held = 0
        self.fail: Callable[[PolicyVersion], KestrlError | None] = lambda _: None
        self.state = ipb.ENGINE_STATE_READY
        self.failure: Failure | None = None
        """The failure that it reports."""
        self.load = ipb.EngineLoad()
        self.build: ipb.EngineBuild | None = None
        self.looks = 0
        self.loads = 0
        self.gate: asyncio.Event | None = None
        """A load waits for it."""
        self.found: Callable[[], None] = lambda: None
        """Called when it is asked to look at its engine now."""

    async def LoadPolicy(self, request: Any, context: Any) -> ipb.LoadPolicyResponse:
        policy = policy_from_proto(request.policy)
        assert policy is not None
        self.loads += 1
        if self.gate is not None:
            await self.gate.wait()
        if (error := self.fail(policy)) is not None:
            raise error
        if policy.name not in self.held and len(self.held) >= self.slots:
            raise EngineFailure(f"{self.name} has no slot", code="no_free_slot", retryable=False)
        target = self._folder / self.name / policy.name
        manifest = fetch_adapter(open_store(request.uri), target)
        self._oracle.learn(policy.name, target)
        scores = self._oracle.score(policy.name, manifest.probe.token_ids)
        gap = max(abs(one - other) for one, other in zip(scores, manifest.probe.logprobs, strict=True))
        if gap > 1e-4:
            raise EngineFailure(f"the probe differs by {gap}", code="probe_mismatch", retryable=False)
        self.held[policy.name] = (policy, True)
        self.most_held = max(self.most_held, len(self.held))
        return ipb.LoadPolicyResponse(probe_gap=gap)

    async def RetirePolicy(self, request: Any, context: Any) -> ipb.RetirePolicyResponse:
        policy = policy_from_proto(request.policy)
        assert policy is not None
        if self.held.pop(policy.name, None) is not None:
            self.retired.append(policy.name)
        return ipb.RetirePolicyResponse()

    async def GetEngine(self, request: Any, context: Any) -> ipb.GetEngineResponse:
        self.looks += 1
        if request.look:
            self.found()
        return ipb.GetEngineResponse(
            name=self.name,
            url=f"http://{self.name}",
            state=self.state,
            load=self.load,
            build=self.build,
            failure=None if self.failure is None else failure_to_proto(self.failure),
            policies=[
                ipb.LoadedPolicy(policy=policy_to_proto(policy), proved=proved) for policy, proved in self.held.values()
            ],
        )


Script = Callable[[rpb.RunGroupRequest, Group], Group | KestrlError | None]
"""What becomes of a group: another one, an error, or None for a stream that ends without it."""


class FakeWorker(rstubs.RolloutServiceServicer):
    """A rollout worker: episodes are pure functions of the request, log-probs come from the oracle."""

    def __init__(self, oracle: Oracle, *, concurrency: int = 16) -> None:
        self._oracle = oracle
        self.concurrency = concurrency
        self.requests: list[rpb.RunGroupRequest] = []
        self.updates: list[rpb.UpdateEnginesRequest] = []
        self.script: Script = lambda _, group: group
        self.running = self.most_running = 0
        self.gate: asyncio.Event | None = None
        """A training group waits for it before it ends."""
        self.hangs: Callable[[rpb.RunGroupRequest], bool] = lambda _: False
        """Groups that never end."""
        self.judging: asyncio.Event | None = None
        """Groups whose episodes ended wait for it."""
        self.stragglers = 0
        """Episodes of each group that end only with it."""
        self.draining = False
        self.sandboxes: dict[str, cpb.SandboxInUse] = {}
        self.tool_digests: dict[str, str] = {}
        self.newest: tuple[int, PolicyVersion, list[str]] | None = None
        """Revision, version and engines of the newest version, for the later turns of groups that continue."""

    async def GetCapacity(self, request: Any, context: Any) -> rpb.GetCapacityResponse:
        return rpb.GetCapacityResponse(
            concurrency=self.concurrency, running=self.running, draining=self.draining, sandboxes=self.sandboxes
        )

    async def UpdateEngines(self, request: rpb.UpdateEnginesRequest, context: Any) -> rpb.UpdateEnginesResponse:
        self.updates.append(request)
        if request.newest:
            self._renew(request.engines_revision, request.policy, request.engines)
        return rpb.UpdateEnginesResponse()

    async def RunGroup(self, request: rpb.RunGroupRequest, context: Any) -> AsyncGenerator[rpb.RunGroupResponse]:
        self.requests.append(request)
        if request.HasField("continuation"):
            self._renew(request.engines_revision, request.continuation.newest, request.continuation.engines)
        self.running += request.size
        self.most_running = max(self.most_running, self.running)
        try:
            if self.gate is not None and request.purpose == "train":
                await self.gate.wait()
            if self.hangs(request):
                await asyncio.Event().wait()
            # Later groups often end first, as in life.
            await asyncio.sleep(random.random() * 0.01)
            made = self.script(request, self._group(request))
            if isinstance(made, KestrlError):
                raise made
            if made is not None:
                yield rpb.RunGroupResponse(ended=max(0, len(made.episodes) - self.stragglers))
                if self.judging is not None:
                    await self.judging.wait()
                yield rpb.RunGroupResponse(group=group_to_proto(made), tool_digests=self.tool_digests)
        finally:
            self.running -= request.size

    def _renew(self, revision: int, policy: Any, engines: Iterable[rpb.Engine]) -> None:
        newest = policy_from_proto(policy)
        assert newest is not None
        if self.newest is None or revision >= self.newest[0]:
            self.newest = revision, newest, [engine.name for engine in engines]

    def _group(self, request: rpb.RunGroupRequest) -> Group:
        scenario = scenario_from_proto(request.scenario)
        return Group(
            id=request.group_id,
            scenario=scenario,
            episodes=[self._episode(request, scenario.ordinal, index) for index in range(request.size)],
        )

    def _episode(self, request: rpb.RunGroupRequest, ordinal: int, index: int) -> Episode:
        policy = policy_from_proto(request.policy)
        name = "base" if policy is None else policy.name
        chance = random.Random(f"{request.seed + index}/{request.sampling.temperature}")
        prompt = [1 + (ordinal * 7 + place) % (VOCABULARY - 2) for place in range(4 + ordinal % 3)]
        first = [chance.randrange(1, VOCABULARY) for _ in range(ANSWER)]
        observation = [2, 3, 2]
        second = [chance.randrange(1, VOCABULARY) for _ in range(ANSWER + 1)]
        tokens = [*prompt, *first, *observation, *second]
        mask = bytes([0] * len(prompt) + [1] * len(first) + [0] * len(observation) + [1] * len(second))
        engine = request.engines[index % len(request.engines)].name
        later_name, later_engine = name, engine
        if request.HasField("continuation"):
            assert self.newest is not None
            _, newest, engines = self.newest
            later_name, later_engine = newest.name, engines[index % len(engines)]
        before = len(tokens) - len(second)
        scores = [0.0, *self._oracle.score(name, tokens)[: before - 1]]
        scores += self._oracle.score(later_name, tokens)[before - 1 :]
        ends = [(len(prompt), len(prompt) + ANSWER), (len(tokens) - ANSWER - 1, len(tokens))]
        return Episode(
            id=f"{request.group_id}/{index}",
            group_id=request.group_id,
            scenario_id=request.scenario.id,
            index=index,
            seed=request.seed + index,
            rows=[
                Row(
                    token_ids=array("i", tokens),
                    mask=mask,
                    logprobs=array("f", [score if on else 0.0 for score, on in zip(scores, mask, strict=True)]),
                    policies=[name, later_name],
                )
            ],
            turns=[
                Turn(
                    index=turn,
                    row=0,
                    start=start,
                    end=end,
                    text="text",
                    finish_reason="stop",
                    engine=turn_engine,
                    policy=turn_name,
                    seconds=0.01,
                )
                for turn, ((start, end), turn_engine, turn_name) in enumerate(
                    zip(ends, (engine, later_engine), (name, later_name), strict=True)
                )
            ],
            tool_calls=[],
            messages=[{"role": "user", "content": "question"}],
            stop_reason=StopReason.ANSWERED,
            failure=None,
            policy=policy,
            engine=engine,
            started_at=0.0,
            seconds=0.5,
            reward=sum(token % 2 for token in (*first, *second)) / 11,
            rewards={"parity": 1.0},
            metrics={"answer_correct": float(first[0] % 2)},
        )
