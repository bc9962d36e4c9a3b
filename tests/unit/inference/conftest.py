"""A whole stage for the engine agent: a fake engine over HTTP, adapters in real storage, the agent over real gRPC.

Nothing polls: a test says `await stage.look()` when the agent is to look at its engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.fakes.engine import Completion, FakeEngine, Prompt, score
from tests.fakes.ports import free_port

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.engines.vllm import Vllm
from kestrl.episode import BASE_MODEL_NAME, PolicyVersion
from kestrl.episode.codec import policy_to_proto
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS
from kestrl.storage.files import digest
from kestrl_inference.engine import CONTROL_KEY, Engine
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.servicer import EngineAgentServicer
from kestrl_inference.sleeper import Sleeper
from kestrl_inference.watch import Watch

PROBE_IDS = (5, 6, 7, 8, 9)
BASE_MODEL = "/models/base"


@dataclass(kw_only=True)
class Fake(FakeEngine):
    """The fake engine with the ways of going wrong that an agent must see."""

    unapplied: set[str] = field(default_factory=set[str])
    """Adapters that it lists but answers as the base model for."""
    swapped: dict[str, str] = field(default_factory=dict[str, str])
    """Adapters that it computes with other weights for."""
    clings: bool = False
    """Whether unloading says that it worked and does nothing."""
    calls: list[str] = field(default_factory=list[str])
    """Loads and unloads received, in order."""
    hold: asyncio.Event | None = None
    """Loads are answered only when this is set."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """A load has come in."""

    def weights(self, model: str) -> str | None:
        if model in self.unapplied:
            return ""
        return self.swapped.get(model) or super().weights(model)

    async def _load(self, request: web.Request) -> web.Response:
        self.calls.append(f"load {(await request.json())['lora_name']}")
        self.arrived.set()
        if self.hold is not None:
            await self.hold.wait()
        return await super()._load(request)

    async def _unload(self, request: web.Request) -> web.Response:
        self.calls.append(f"unload {(await request.json())['lora_name']}")
        return web.Response(text="Success") if self.clings else await super()._unload(request)

    @property
    def scored(self) -> list[str]:
        """Models of the probes received, in order."""
        return [prompt.model for prompt in self.prompts if "prompt_logprobs" in prompt.sampling]


def make_manifest(files: dict[str, bytes], **changes: Any) -> AdapterManifest:
    sha256 = digest(files[WEIGHTS])
    probe = Probe(
        token_ids=PROBE_IDS,
        logprobs=tuple(score(sha256, PROBE_IDS)[1:]),
        base_logprobs=tuple(score("", PROBE_IDS)[1:]),
    )
    values: dict[str, Any] = {
        "job": "job",
        "step": 1,
        "sha256": sha256,
        "files": {name: digest(content) for name, content in files.items()},
        "base_model": BASE_MODEL,
        "rank": 8,
        "alpha": 16,
        "targets": ("q_proj",),
        "parent": None,
        "probe": probe,
    }
    return AdapterManifest(**(values | changes))


@dataclass(kw_only=True)
class Sampling(Fake):
    """A fake engine whose log-probs are those of a distribution, from which it samples."""

    sharpened: float = 1.0
    """Inverse temperature that it samples with, whatever is asked for."""
    honest: bool = True
    """Whether its log-probs are those of what it samples from."""

    def scores(self, weights: str, token_ids: Sequence[int]) -> list[float]:
        return [
            math.log(probabilities(weights, token_ids[:index]).get(token, TINY))
            for index, token in enumerate(token_ids)
        ]

    def sample(self, prompt: Prompt) -> Completion:
        weights, token_ids, logprobs = self.weights(prompt.model) or "", list(prompt.token_ids), list[float]()
        source = random.Random(prompt.sampling.get("seed"))
        for _ in range(prompt.sampling["max_tokens"]):
            unchanged = probabilities(weights, token_ids)
            sharp = {token: share**self.sharpened for token, share in unchanged.items()}
            (token,) = source.choices(list(sharp), list(sharp.values()))
            reported = sharp[token] / sum(sharp.values()) if self.honest else unchanged[token]
            token_ids.append(token)
            logprobs.append(math.log(reported))
        return Completion(token_ids=token_ids[len(prompt.token_ids) :], finish_reason="length", logprobs=logprobs)


TINY = 1e-6
"""Probability of a token that is never drawn."""


def probabilities(weights: str, prefix: Sequence[int]) -> dict[int, float]:
    """A distribution of 24 tokens, of which a few have most of the mass; which they are depends on the prefix."""
    state = hashlib.blake2b(f"{weights}|{list(prefix)}".encode(), digest_size=8).digest()
    raw = {20 + (index + state[0]) % 24: 0.75**index for index in range(24)}
    whole = sum(raw.values())
    return {token: share / whole for token, share in raw.items()}


@dataclass(frozen=True)
class Published:
    policy: PolicyVersion
    uri: str
    folder: Path

    @property
    def name(self) -> str:
        return self.policy.name


@dataclass
class Stage:
    engine: Fake
    settings: AgentSettings
    loaded: LoadedAdapters
    watch: Watch
    storage: Path
    stub: Any

    @property
    def adapters(self) -> Path:
        return Path(self.settings.adapters_dir)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.adapters.iterdir())

    def publish(self, step: int, **changes: Any) -> Published:
        """Puts version `step` in storage; the changes go into its manifest."""
        files = {WEIGHTS: f"weights of step {step}".encode(), "adapter_config.json": b'{"r": 8}'}
        manifest = make_manifest(files, step=step, **changes)
        uri = publish_adapter(open_store(str(self.storage)), files, manifest)
        return Published(manifest.policy, uri, Path(uri.removeprefix("file://")))

    async def look(self) -> None:
        await self.watch.look()

    async def load(self, version: Published, *, timeout: float = 10) -> pb.LoadPolicyResponse:
        request = pb.LoadPolicyRequest(policy=policy_to_proto(version.policy), uri=version.uri)
        return await rpc.call(
            self.stub.LoadPolicy,
            request,
            pb.LoadPolicyResponse,
            timeout=timeout,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
        )

    async def retire(self, version: Published) -> None:
        request = pb.RetirePolicyRequest(policy=policy_to_proto(version.policy))
        await rpc.call(
            self.stub.RetirePolicy,
            request,
            pb.RetirePolicyResponse,
            timeout=30,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
        )

    async def sleep(self, *, lease: float = 30, timeout: float = 10) -> None:
        request = pb.SleepEngineRequest(lease_seconds=lease)
        token = Secret.LEARNER_TO_INFERENCE.here()
        await rpc.call(
            self.stub.SleepEngine, request, pb.SleepEngineResponse, timeout=timeout, peer="agent", token=token
        )

    async def wake(self) -> None:
        request, token = pb.WakeEngineRequest(), Secret.LEARNER_TO_INFERENCE.here()
        await rpc.call(self.stub.WakeEngine, request, pb.WakeEngineResponse, timeout=10, peer="agent", token=token)

    async def seen(self, *, look: bool = False) -> pb.GetEngineResponse:
        return await rpc.call(
            self.stub.GetEngine,
            pb.GetEngineRequest(look=look),
            pb.GetEngineResponse,
            timeout=30,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
            wait=True,
        )

    async def state(self) -> str:
        return pb.EngineState.Name((await self.seen()).state).removeprefix("ENGINE_STATE_")

    async def proved(self) -> dict[int, bool]:
        """Step to whether it is proved."""
        return {item.policy.step: item.proved for item in (await self.seen()).policies}


@asynccontextmanager
async def served(agent: EngineAgentServicer) -> AsyncIterator[str]:
    stop, address = asyncio.Event(), f"127.0.0.1:{free_port()}"
    register = lambda server: stubs.add_EngineAgentServiceServicer_to_server(agent, server)  # noqa: E731
    server = asyncio.create_task(rpc.serve("inference-0", address, register, until=stop.wait(), grace=0.1))
    try:
        yield address
    finally:
        stop.set()
        await server


def agent_settings(engine: Fake, folder: Path, **changes: Any) -> AgentSettings:
    values: dict[str, Any] = {
        "component": "inference-0",
        "job": "job",
        "run": "run",
        "listen": f"127.0.0.1:{free_port()}",
        "engine_name": "engine-0",
        "engine_url": engine.url,
        "base_model": BASE_MODEL,
        "adapters_dir": str(folder / "adapters"),
        "slots": 3,
        "probe_bound": 1e-3,
        "draws": 0,
        "draw_seconds": 600.0,
        "load_seconds": 5.0,
        "poll_seconds": 0.05,
    }
    return AgentSettings.model_validate(values | changes)


MakeStage = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fake]:
    monkeypatch.setenv(CONTROL_KEY, "the control key")
    async with Fake(control_key="the control key") as fake:
        yield fake


@pytest.fixture
async def make_stage(engine: Fake, tmp_path: Path) -> AsyncIterator[MakeStage]:
    """Builds a stage whose agent has not looked at its engine yet; options are settings of the agent."""
    async with AsyncExitStack() as stack:

        async def make(**changes: Any) -> Stage:
            settings = agent_settings(engine, tmp_path, **changes)
            client = Engine(
                settings.engine_url,
                BASE_MODEL_NAME,
                Vllm(),
                timeout=settings.load_seconds,
                move_seconds=settings.move_seconds,
            )
            stack.push_async_callback(client.close)
            adapters = LoadedAdapters(settings, client)
            adapters.prepare()
            sleeper = Sleeper(client, adapters, turns=settings.turns)
            stack.push_async_callback(sleeper.close)
            watch = Watch(client, adapters, sleeper, settings.poll_seconds, settings.component)
            address = await stack.enter_async_context(served(EngineAgentServicer(settings, adapters, watch)))
            channel = await stack.enter_async_context(rpc.channel(address))
            stub: Any = stubs.EngineAgentServiceStub(channel)
            stage = Stage(engine, settings, adapters, watch, tmp_path / "storage", stub)
            await stage.seen()
            return stage

        yield make


@pytest.fixture
async def stage(make_stage: MakeStage) -> Stage:
    """A stage whose engine was seen healthy."""
    stage = await make_stage()
    await stage.look()
    return stage
