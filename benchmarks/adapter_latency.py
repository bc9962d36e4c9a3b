"""From an adapter's weights in storage to its first token, proved, against loading the same files by hand and asking for a token.

Real engines with their agents, as the plan of each demo starts them, side by side as often as the demo has replicas. Each version is new;
medians over `VERSIONS` of them. The token is asked for with the prompt of the demo's first episode, and again with one of 40 tokens: a request
that costs no more than the proof. `proof_by_hand` is the least that a proof by a request can cost: the same files loaded by hand, the proof's
request by the same client, then the token.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import torch
from benchmarks.report import Row, main

from kestrl import rpc
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.data import load_scenarios
from kestrl.episode import PolicyVersion
from kestrl.local.place import site_of
from kestrl.local.processes import Launcher
from kestrl.local.rundir import RunDir
from kestrl.plan.components import Component, Role, Secret
from kestrl.plan.planning import plan
from kestrl.plan.settings import ToolEntry
from kestrl.plan.site import Site
from kestrl.rpc.codec import policy_to_proto
from kestrl.spec import AgentRLJob
from kestrl.spec.load import read_job
from kestrl.storage import open_store
from kestrl_inference.engine import SCORING
from kestrl_learner import adapters
from kestrl_learner.model import PolicyModel
from kestrl_rollout.chat import Message
from kestrl_rollout.model import load_model
from kestrl_tools.catalogue import load_tools
from kestrl_tools.lanes import Lanes

EXAMPLES = Path(__file__).parents[1] / "examples" / "email-search"
JOBS = {"tiny": EXAMPLES / "quickstart.yaml", "smollm2": EXAMPLES / "smollm2.yaml"}
"""By the name of their model."""
VERSIONS, LOAD_SECONDS = 13, 120.0
SHORT = list(range(300, 340))


def first_prompt(job: AgentRLJob, site: Site) -> list[int]:
    """What the job's first episode asks its engine."""
    face = load_model(site.model, site.template, tools=True, started=datetime.now().astimezone())
    entries = [ToolEntry(name=tool.name, use=tool.use, config=tool.config) for tool in job.spec.tools]
    tools = face.chat.toolset([tool.schema.to_openai() for tool in load_tools(entries, Lanes()).values()])
    (scenario,) = load_scenarios(Path(site.train), size=1)
    return face.chat.prompt([Message(role=said["role"], text=said["content"]) for said in scenario.messages], tools)


class Engine:
    """An engine and its agent."""

    def __init__(self, engine: Component, session: aiohttp.ClientSession, channel: rpc.Channel) -> None:
        self.url = f"http://127.0.0.1:{engine.ports['http']}"
        self._session, self._stub = session, stubs.EngineAgentServiceStub(channel)
        self.prompt = SHORT

    async def post(self, path: str, **body: Any) -> None:
        async with self._session.post(f"{self.url}{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def first_token(self, name: str) -> None:
        sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
        await self.post("/inference/v1/generate", model=name, token_ids=self.prompt, sampling_params=sampling)

    async def up(self) -> None:
        """The agent's own word: it has seen the engine."""
        while True:
            seen = await rpc.call(
                self._stub.GetEngine, pb.GetEngineRequest(), pb.GetEngineResponse, timeout=300, peer="agent", wait=True
            )
            if seen.state == pb.ENGINE_STATE_READY:
                return
            await asyncio.sleep(0.2)

    async def ours(self, policy: PolicyVersion, uri: str) -> None:
        request = pb.LoadPolicyRequest(policy=policy_to_proto(policy), uri=uri)
        await rpc.call(self._stub.LoadPolicy, request, pb.LoadPolicyResponse, timeout=LOAD_SECONDS, peer="agent")
        await self.first_token(policy.name)

    async def forget(self, policy: PolicyVersion) -> None:
        request = pb.RetirePolicyRequest(policy=policy_to_proto(policy))
        await rpc.call(self._stub.RetirePolicy, request, pb.RetirePolicyResponse, timeout=LOAD_SECONDS, peer="agent")

    async def bare(self, name: str, folder: Path, *, probe: Sequence[int] = ()) -> None:
        """By hand; with a probe, its log-probs are asked for as an agent does, and not looked at."""
        await self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))
        if probe:
            await self.post("/inference/v1/generate", model=name, token_ids=list(probe), sampling_params=SCORING)
        await self.first_token(name)


@asynccontextmanager
async def started(manifest: Path, folder: Path) -> AsyncGenerator[tuple[list[Engine], str, PolicyModel, list[int]]]:
    """A job's engines that are up, where its model is, the model as the learner has it, and the job's first prompt."""
    job = read_job(manifest)
    run = RunDir(folder / "run")
    for part in ("logs", "settings", "work"):
        (run.path / part).mkdir(parents=True)
    site = site_of(job, run, manifest.parent, base_port=None, cache_dir=folder)
    keys = {secret.value: secrets.token_urlsafe(16) for secret in Secret}
    launcher = Launcher(folder=run.path, secrets=keys)
    parts = [part for part in plan(job, site) if part.role in {Role.ENGINE, Role.INFERENCE}]
    headers = {"Authorization": f"Bearer {keys[Secret.ENGINE_CONTROL_KEY.value]}"}
    os.environ[Secret.JOB_TOKEN.value] = keys[Secret.JOB_TOKEN.value]
    async with AsyncExitStack() as stack:
        running = [await launcher.start(part) for part in parts]
        stack.callback(lambda: [process.let_go() for process in running])
        session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
        engines: list[Engine] = []
        servers, agents = ([part for part in parts if part.role is role] for role in (Role.ENGINE, Role.INFERENCE))
        for engine, agent in zip(servers, agents, strict=True):
            channel = await stack.enter_async_context(rpc.channel(f"127.0.0.1:{agent.ports['grpc']}"))
            engines.append(Engine(engine, session, channel))
        await asyncio.gather(*(engine.up() for engine in engines))
        lora = job.spec.model.adapter
        learnt = PolicyModel(
            site.model, dtype="float32", rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=1
        )
        yield engines, site.model, learnt, first_prompt(job, site)


async def timed(work: Sequence[Any]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*work)
    return time.perf_counter() - began


async def figures(model_name: str, manifest: Path) -> AsyncIterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with started(manifest, folder) as (engines, base, model, own):
            store = open_store((folder / "store").as_uri())
            versions = itertools.count()

            async def latencies(prompt: list[int]) -> tuple[float, float, float, float]:
                """By one engine, by all, by hand, by hand with a proof's request; in ms."""
                one, all_, bare, floor = list[float](), list[float](), list[float](), list[float]()
                for engine in engines:
                    engine.prompt = prompt
                for version in itertools.islice(versions, VERSIONS):
                    with torch.no_grad():
                        for weight in model.parameters():
                            weight.add_(torch.randn_like(weight) * 0.01)
                    published, uri = adapters.publish(store, model, job="bench", step=version, base=base, parent=None)
                    files = Path(uri.removeprefix("file://"))
                    for taken, name, probe in ((bare, "bare", ()), (floor, "floor", published.probe.token_ids)):
                        taken.append(await timed([engines[0].bare(f"{name}-{version}", files, probe=probe)]))
                        await engines[0].post("/v1/unload_lora_adapter", lora_name=f"{name}-{version}")
                    for taken, some in ((one, engines[:1]), (all_, engines)):
                        taken.append(await timed([engine.ours(published.policy, uri) for engine in some]))
                        await asyncio.gather(*(engine.forget(published.policy) for engine in some))
                ours, together, by_hand, least = (
                    statistics.median(taken[1:]) * 1000 for taken in (one, all_, bare, floor)
                )
                return ours, together, by_hand, least

            at = f"adapter_latency/{model_name}"
            for prompt in (own, SHORT):
                ours, together, by_hand, least = await latencies(prompt)
                name = f"{at}/prompt_of_{len(prompt)}"
                yield Row(name=f"{name}/one_engine", value=ours, unit="ms", reference=by_hand, against="load by hand")
                yield Row(
                    name=f"{name}/proof_by_hand", value=least, unit="ms", reference=by_hand, against="load by hand"
                )
                if len(engines) > 1:
                    both = f"{name}/{len(engines)}_engines"
                    yield Row(name=both, value=together, unit="ms", reference=ours, against="one engine")


def measure() -> list[Row]:
    async def collected() -> list[Row]:
        return [row for name, manifest in JOBS.items() async for row in figures(name, manifest)]

    return asyncio.run(collected())


if __name__ == "__main__":
    main(__doc__, measure)
