"""Scaling with the size of a job: the ledger from 10 to 10,000 steps, a publication from 1 to 8 engines, against the
smallest of each.

All engines and agents share one process, so a publication is measured twice: with engines that answer immediately,
which shows the CPU cost, and with engines that take as long for a verification as real ones, which shows whether
engines wait for each other.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from benchmarks.report import Row, main
from tests.fakes.engine import Completion, FakeEngine, Prompt, score
from tests.fakes.ports import free_port

from kestrl._shared import rpc
from kestrl._shared.plan.settings.inference import AgentSettings
from kestrl._shared.plan.settings.learner import EngineEntry
from kestrl.api.inference.v1 import inference_pb2_grpc as stubs
from kestrl.engines.vllm import Vllm
from kestrl.episode import PolicyVersion
from kestrl.storage import AdapterManifest, Probe, open_store, publish_adapter
from kestrl.storage.adapters import WEIGHTS, digest
from kestrl_inference.engine import Engine
from kestrl_inference.loaded_adapters import LoadedAdapters
from kestrl_inference.servicer import EngineAgentServicer
from kestrl_inference.watch import Watch
from kestrl_learner.engines.discovery import ListedEngines
from kestrl_learner.engines.engines import Engines
from kestrl_learner.ledger import Ledger
from kestrl_learner.progress.progress import Progress

GROUPS = 8
ENGINES = (1, 2, 4, 8)
PROOFS = {"": 0.0, "_of_150_ms": 0.15}
"""Seconds of a verification, by suffix of the row's name: none, and SmolLM2's on a CPU."""
LEDGER_STEPS = (10, 100, 1_000, 10_000)
TIMED_STEPS = 20
"""Number of last steps that are timed."""


def ledger(steps: int) -> tuple[float, float]:
    """Milliseconds of one step's entries after the given number of steps, and the memory of the process."""
    with tempfile.TemporaryDirectory() as folder:
        book = Ledger(f"sqlite:///{Path(folder) / 'ledger.db'}", seed=1, size=steps * GROUPS, epochs=1, run="bench")
        book.rewind(0)
        began = 0.0
        for step in range(steps):
            if step == max(0, steps - TIMED_STEPS):
                began = time.perf_counter()
            leases = [book.lease(step) for _ in range(GROUPS)]
            for lease in leases:
                assert lease is not None
                book.finish(lease)
            book.train([lease for lease in leases if lease is not None], step + 1)
        taken = 1000 * (time.perf_counter() - began) / min(steps, TIMED_STEPS)
        book.close()
        return taken, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def alone(steps: int) -> tuple[float, float]:
    """Measures in a child process, for separate memory figures."""
    command = [sys.executable, "-m", "benchmarks.growth", "--only", str(steps)]
    first, second = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(first), float(second)


async def publish(count: int, proof_seconds: float, versions: int = 9) -> float:
    """Milliseconds from a version in storage until the engines have verified it, through the learner's client."""
    with tempfile.TemporaryDirectory() as name:
        folder, progress = Path(name), Progress(1, count, 1)
        async with AsyncExitStack() as stack:
            entries = [await engine_and_agent(index, folder, stack, proof_seconds) for index in range(count)]
            engines = Engines(ListedEngines(entries), progress, 60.0)
            stack.push_async_callback(engines.close)
            watching = asyncio.create_task(engines.watch())
            stack.push_async_callback(ended, watching)
            taken: list[float] = []
            for step in range(versions):
                policy, uri = put(folder / "store", step)
                began = time.perf_counter()
                proved = await engines.publish(policy, uri)
                taken.append(1000 * (time.perf_counter() - began))
                assert len(proved) == count
                await engines.retire({policy.name})
            return statistics.median(taken[1:])


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def engine_and_agent(index: int, folder: Path, stack: AsyncExitStack, proof_seconds: float) -> EngineEntry:
    engine = FakeEngine()

    async def after_a_while(prompt: Prompt) -> Completion:
        await asyncio.sleep(proof_seconds)
        return engine.sample(prompt)

    engine.script = after_a_while if proof_seconds else None
    await stack.enter_async_context(engine)
    settings = AgentSettings(
        component=f"inference-{index}",
        job="bench",
        run="bench",
        listen=f"127.0.0.1:{free_port()}",
        engine_name=f"engine-{index}",
        engine_url=engine.url,
        base_model="base",
        adapters_dir=str(folder / f"adapters-{index}"),
        slots=4,
        probe_bound=1e-3,
        draws=0,  # the fake's log-probs are no distribution
        poll_seconds=1.0,
    )
    client = Engine(engine.url, "base", Vllm(), timeout=30.0)
    stack.push_async_callback(client.close)
    adapters = LoadedAdapters(settings, client)
    adapters.prepare()
    watch = Watch(client, adapters, settings.poll_seconds, settings.component)
    await watch.look()
    agent, stop = EngineAgentServicer(settings, adapters, watch), asyncio.Event()
    serving = asyncio.create_task(
        rpc.serve(
            settings.component,
            settings.listen,
            lambda server: stubs.add_EngineAgentServiceServicer_to_server(agent, server),
            until=stop.wait(),
            grace=0.1,
        )
    )
    stack.push_async_callback(asyncio.wait, [serving])
    stack.callback(stop.set)
    return EngineEntry(name=settings.engine_name, url=engine.url, agent_address=settings.listen)


def put(store: Path, step: int) -> tuple[PolicyVersion, str]:
    """Publishes a version of one megabyte."""
    files = {WEIGHTS: os.urandom(1_000_000), "adapter_config.json": b'{"r": 8}'}
    sha256, tokens = digest(files[WEIGHTS]), tuple(range(20, 50))
    probe = Probe(
        token_ids=tokens, logprobs=tuple(score(sha256, tokens)[1:]), base_logprobs=tuple(score("", tokens)[1:])
    )
    manifest = AdapterManifest(
        job="bench",
        step=step,
        sha256=sha256,
        files={name: digest(content) for name, content in files.items()},
        base_model="base",
        rank=8,
        alpha=16,
        targets=("q_proj",),
        parent=None,
        probe=probe,
    )
    return manifest.policy, publish_adapter(open_store(store.as_uri()), files, manifest)


def measure() -> Iterator[Row]:
    seen = {steps: alone(steps) for steps in LEDGER_STEPS}
    smallest = seen[LEDGER_STEPS[0]]
    for steps, (taken, memory) in seen.items():
        against = f"{LEDGER_STEPS[0]} steps"
        yield Row(
            name=f"growth/ledger/{steps}/time", value=taken, unit="ms/step", reference=smallest[0], against=against
        )
        yield Row(name=f"growth/ledger/{steps}/memory", value=memory, unit="MB", reference=smallest[1], against=against)
    for kind, seconds in PROOFS.items():
        taken = {count: asyncio.run(publish(count, seconds)) for count in ENGINES}
        for count, value in taken.items():
            name = f"growth/publish/{count}_engines{kind}"
            yield Row(name=name, value=value, unit="ms", reference=taken[1], against="one engine")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--only"]:
        print(*ledger(int(sys.argv[2])))
    else:
        main(__doc__, measure)
