"""Latency from an adapter's weights in storage to its first token after verification, against loading the same files
manually.

Real engines with their agents, as in the plan of each demo, with the demo's number of replicas; and beside them plain
vLLM with the same arguments, for loading adapters manually. Each version is new; figures are medians over `VERSIONS`.
The token is requested with the prompt of the demo's first episode, and with one of 40 tokens, which costs no more than
the verification.

KestRL's plugin makes requests faster, so manual loading is also measured on KestRL's engine, which isolates the cost of
publication: `on_our_engine` is manual loading there, and `proof_by_hand` the minimum with a verification: manual
loading, the verification's request by the same client, then the token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import torch
from benchmarks.report import Row, main
from tests.fakes.ports import free_port

from kestrl._app.engines.interpreter import ENGINE_FOLDER, installed_engine, write_engine_folder
from kestrl._app.local.processes import Launcher
from kestrl._app.local.rundir import RunDir
from kestrl._app.local.site import reserved_ports, site_of
from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.components import Component, Role
from kestrl._shared.plan.planning import plan
from kestrl._shared.plan.settings.tools import ToolEntry
from kestrl._shared.plan.site import Site
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.inference import Inference
from kestrl._shared.spec.load import read_job
from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import load_model
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.data import load_scenarios
from kestrl.engines.vllm import SCORING
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import policy_to_proto
from kestrl.storage import AdapterManifest, open_store
from kestrl_inference.inside.launcher import read_options, server_arguments
from kestrl_learner.model import adapters
from kestrl_learner.model.policy_model import PolicyModel
from kestrl_tools.catalogue import load_tools
from kestrl_tools.tool_threads import ToolThreads

EXAMPLES = Path(__file__).parents[1] / "examples" / "email-search"
JOBS = {"tiny": EXAMPLES / "quickstart.yaml", "smollm2": EXAMPLES / "smollm2.yaml"}
"""Manifests by the name of their model."""
VERSIONS, LOAD_SECONDS = 16, 120.0
SHORT = list(range(300, 340))
KEPT_SECONDS = 2.0
"""Keep-alive seconds, below the 5 s after which vLLM closes idle connections."""


async def first_prompt(job: AgentRLJob, site: Site) -> list[int]:
    """Prompt of the job's first episode."""
    chat_model = load_model(site.model, site.template, tools=True, started=datetime.now().astimezone())
    entries = [ToolEntry(name=tool.name, use=tool.use, config=tool.config) for tool in job.spec.tools]
    offered = await load_tools(entries, ToolThreads())
    tools = chat_model.chat.toolset([tool.schema.to_openai() for tool in offered.values()])
    (scenario,) = load_scenarios(Path(site.train), size=1)
    return chat_model.chat.prompt(
        [Message(role=said["role"], text=said["content"]) for said in scenario.messages], tools
    )


def alone(engine: Component) -> Component:
    """vLLM's server with an engine's arguments, without KestRL's plugin, guard and launcher."""
    build = installed_engine(Inference(), Path.cwd())
    port, args = free_port(), server_arguments(read_options(engine.args), build.version)
    guard = args.index("--middleware")
    del args[guard : guard + 2]
    args[args.index("--port") + 1] = str(port)
    return replace(
        engine,
        name="vllm-alone",
        module="vllm.entrypoints.openai.api_server",
        args=tuple(args),
        env={**engine.env, "VLLM_PLUGINS": ""},
        ports={"http": port},
    )


class Server:
    """Client of an engine's server."""

    def __init__(self, engine: Component, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{engine.ports['http']}"
        self._session = session
        self.prompt = SHORT

    async def post(self, path: str, **body: Any) -> None:
        async with self._session.post(f"{self.url}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def first_token(self, name: str) -> None:
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
        await self.post("/inference/v1/generate", model=name, token_ids=self.prompt, sampling_params=sampling)

    async def up(self) -> None:
        while True:
            try:
                async with self._session.get(f"{self.url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:  # not up yet
                pass
            await asyncio.sleep(0.2)

    async def load(self, name: str, folder: Path, *, probe: Sequence[int] = ()) -> None:
        """Loads an adapter and requests the first token; with a probe, also requests its log-probs like an agent."""
        await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
        if probe:
            await self.post("/inference/v1/generate", model=name, token_ids=list(probe), sampling_params=SCORING)
        await self.first_token(name)

    async def unload(self, name: str) -> None:
        await self.post("/v1/unload_lora_adapter", lora_name=name)


class Engine(Server):
    """An engine and its agent."""

    def __init__(self, engine: Component, session: aiohttp.ClientSession, channel: rpc.Channel) -> None:
        super().__init__(engine, session)
        self._stub = stubs.EngineAgentServiceStub(channel)

    async def up(self) -> None:
        """Waits until the agent reports the engine as ready."""
        while True:
            seen = await rpc.call(
                self._stub.GetEngine,
                pb.GetEngineRequest(),
                pb.GetEngineResponse,
                timeout=300,
                peer="agent",
                token=Secret.LEARNER_TO_INFERENCE.here(),
                wait=True,
            )
            if seen.state == pb.ENGINE_STATE_READY:
                return
            await asyncio.sleep(0.2)

    async def ours(self, policy: PolicyVersion, uri: str) -> None:
        request = pb.LoadPolicyRequest(policy=policy_to_proto(policy), uri=uri)
        await rpc.call(
            self._stub.LoadPolicy,
            request,
            pb.LoadPolicyResponse,
            timeout=LOAD_SECONDS,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
        )
        await self.first_token(policy.name)

    async def forget(self, policy: PolicyVersion) -> None:
        request = pb.RetirePolicyRequest(policy=policy_to_proto(policy))
        await rpc.call(
            self._stub.RetirePolicy,
            request,
            pb.RetirePolicyResponse,
            timeout=LOAD_SECONDS,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The running servers."""

    engines: list[Engine]
    vllm: Server
    base: str
    """Address of the model."""
    model: PolicyModel
    """The model in the learner."""
    prompt: list[int]
    """First prompt of the job."""


@asynccontextmanager
async def started(manifest: Path, folder: Path) -> AsyncGenerator[Bench]:
    """Starts a job's engines, and plain vLLM."""
    job = read_job(manifest)
    run = RunDir(folder / "run")
    for part in ("logs", "settings", "work"):
        (run.path / part).mkdir(parents=True)
    write_engine_folder(run.path / ENGINE_FOLDER)
    keys = {secret.value: secrets.token_urlsafe(16) for secret in Secret}
    launcher = Launcher(folder=run.path, secrets=keys)
    headers = {"Authorization": f"Bearer {keys[Secret.ENGINE_CONTROL_KEY.value]}"}
    os.environ[Secret.LEARNER_TO_INFERENCE.value] = keys[Secret.LEARNER_TO_INFERENCE.value]
    async with AsyncExitStack() as stack:
        ports = stack.enter_context(reserved_ports(job, None))
        site = site_of(job, run, manifest.parent, ports=ports, cache_dir=folder)
        parts = [part for part in plan(job, site) if part.role in {Role.ENGINE, Role.INFERENCE}]
        servers, agents = ([part for part in parts if part.role is role] for role in (Role.ENGINE, Role.INFERENCE))
        lone = alone(servers[0])
        running = [await launcher.start(part) for part in (*parts, lone)]
        stack.callback(lambda: [process.release() for process in running])
        connector = aiohttp.TCPConnector(keepalive_timeout=KEPT_SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, connector=connector))
        engines: list[Engine] = []
        for engine, agent in zip(servers, agents, strict=True):
            channel = await stack.enter_async_context(rpc.channel(f"127.0.0.1:{agent.ports['grpc']}"))
            engines.append(Engine(engine, session, channel))
        vllm = Server(lone, session)
        await asyncio.gather(*(server.up() for server in (*engines, vllm)))
        lora = job.spec.model.adapter
        learnt = PolicyModel(
            site.model, dtype="float32", rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=1
        )
        yield Bench(engines=engines, vllm=vllm, base=site.model, model=learnt, prompt=await first_prompt(job, site))


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Medians in ms over the same versions."""

    vllm: float
    """Plain vLLM, manually."""
    ours: float
    """With one engine."""
    together: float
    """With all engines."""
    by_hand: float
    """KestRL's engine, manually."""
    least: float
    """The same with the verification's request."""


class Way(NamedTuple):
    """A way to a first token."""

    go: Callable[[], Awaitable[Any]]
    undo: Callable[[], Awaitable[Any]]


def ways(bench: Bench, version: AdapterManifest, uri: str) -> dict[str, Way]:
    """Ways by field of `Latencies`."""
    files, policy = Path(uri.removeprefix("file://")), version.policy

    def by_hand(kind: str, server: Server, *, probe: Sequence[int] = ()) -> Way:
        name = f"{kind}-{policy.step}"
        return Way(partial(server.load, name, files, probe=probe), partial(server.unload, name))

    def by_agents(engines: list[Engine]) -> Way:
        return Way(
            lambda: asyncio.gather(*(engine.ours(policy, uri) for engine in engines)),
            lambda: asyncio.gather(*(engine.forget(policy) for engine in engines)),
        )

    first = bench.engines[0]
    return {
        "vllm": by_hand("vllm", bench.vllm),
        "by_hand": by_hand("by_hand", first),
        "least": by_hand("least", first, probe=version.probe.token_ids),
        "ours": by_agents([first]),
        "together": by_agents(bench.engines),
    }


async def latencies(bench: Bench, folder: Path, prompt: list[int], versions: Iterable[int]) -> Latencies:
    store = open_store((folder / "store").as_uri())
    taken = {field.name: list[float]() for field in fields(Latencies)}
    for server in (*bench.engines, bench.vllm):
        server.prompt = prompt
    for version in versions:
        with torch.no_grad():
            for weight in bench.model.parameters():
                weight.add_(torch.randn_like(weight) * 0.01)
        published, uri = adapters.publish(store, bench.model, job="bench", step=version, base=bench.base, parent=None)
        in_turn = list(ways(bench, published, uri).items())
        start = version % len(in_turn)  # rotated, since the first one runs with caches emptied by the optimiser step
        for kind, way in in_turn[start:] + in_turn[:start]:
            began = time.perf_counter()
            await way.go()
            taken[kind].append((time.perf_counter() - began) * 1000)
            await way.undo()
    return Latencies(**{kind: statistics.median(times[1:]) for kind, times in taken.items()})


async def figures(model_name: str, manifest: Path) -> AsyncIterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with started(manifest, folder) as bench:
            versions = itertools.count()
            for prompt in (bench.prompt, SHORT):
                seen = await latencies(bench, folder, prompt, itertools.islice(versions, VERSIONS))
                name = f"adapter_latency/{model_name}/prompt_of_{len(prompt)}"
                yield Row(name=name, value=seen.ours, unit="ms", reference=seen.vllm, against="plain vLLM, manually")
                for part, value in (("on_our_engine", seen.ours), ("proof_by_hand", seen.least)):
                    yield Row(
                        name=f"{name}/{part}",
                        value=value,
                        unit="ms",
                        reference=seen.by_hand,
                        against="KestRL's engine, manually",
                    )
                if (count := len(bench.engines)) > 1:
                    both = f"{name}/{count}_engines"
                    yield Row(name=both, value=seen.together, unit="ms", reference=seen.ours, against="one engine")


def measure() -> Iterator[Row]:
    async def collected(name: str, manifest: Path) -> list[Row]:
        return [row async for row in figures(name, manifest)]

    for name, manifest in JOBS.items():
        yield from asyncio.run(collected(name, manifest))


if __name__ == "__main__":
    main(__doc__, measure)
