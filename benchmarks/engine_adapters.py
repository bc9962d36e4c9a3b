"""What engines sample in a second, how fast they load an adapter, and what adapters in a batch cost: vLLM and SGLang
beside each other in one run.

All engines that `kestrl engine install` has installed for CPUs are started with the tiny model: 64 turns of up to 48
tokens behind prompts of 64, 16 at a time, dealt to 0 (the base model), 1, 4 or 16 adapters in turn. Only one engine has
requests at any time; the cases alternate between engines, so that other work on the machine meets all of them alike,
and figures are medians over `ROUNDS`. A base model is compared with the first engine's, adapters with the base model of
their engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from benchmarks.report import Row, main

from kestrl._app.engines.checking import StartedEngine, started_engine
from kestrl._app.engines.random_adapter import write_random_adapter
from kestrl._app.engines.store import Installed, engines_folder, installed_engines
from kestrl.data.locate import locate_model
from kestrl.engines import POLICY_HEADER, EngineDialect, Generate, Request
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME
from kestrl.errors import UserInputError

COUNTS = (1, 4, 16)
"""Adapters in a batch."""
TURNS, AT_ONCE, TOKENS, PROMPT_TOKENS = 64, 16, 48, 64
ROUNDS = 3
SECONDS = 300.0
JSON = {"content-type": "application/json"}


class Client:
    """Client of an engine that was started."""

    def __init__(self, dialect: EngineDialect, started: StartedEngine, session: aiohttp.ClientSession) -> None:
        self._dialect, self._started, self._session = dialect, started, session
        self._seeds = itertools.count(1)

    async def send(self, request: Request) -> tuple[bytes, str | None]:
        headers = {**JSON, "authorization": f"Bearer {self._started.key}"}
        url = f"{self._started.url}{request.path}"
        async with self._session.request(request.method, url, data=request.body or None, headers=headers) as answer:
            body = await answer.read()
            assert answer.status == 200, body[:300]
            return body, answer.headers.get(POLICY_HEADER)

    async def turn(self, policy: str) -> int:
        """Tokens of a sampled turn behind a prompt that no other turn has."""
        seed = next(self._seeds)
        draw = random.Random(seed)
        prompt = [draw.randrange(32, 232) for _ in range(PROMPT_TOKENS)]
        request = self._dialect.generate(
            Generate(
                id=f"bench/{seed}", policy=policy, prompt_ids=prompt, temperature=1.0, max_tokens=TOKENS, seed=seed,
                stop_token_ids=(),
            )
        )  # fmt: skip
        body, stamped = await self.send(request)
        sampled = self._dialect.read_generated(body, stamped)
        assert sampled.policy == policy
        return len(sampled.token_ids)

    async def rate(self, policies: Sequence[str]) -> float:
        """Tokens per second of a batch that is dealt to some policies."""
        places, began = asyncio.Semaphore(AT_ONCE), time.perf_counter()

        async def placed(policy: str) -> int:
            async with places:
                return await self.turn(policy)

        dealt = itertools.islice(itertools.cycle(policies), TURNS)
        counts = await asyncio.gather(*map(placed, dealt))
        return sum(counts) / (time.perf_counter() - began)


@dataclass
class Measured:
    """An engine that runs, and what was measured of it."""

    name: str
    client: Client
    adapters: Sequence[str]
    load_seconds: list[float]
    """Seconds of each load of an adapter, until the engine answers."""
    first_seconds: list[float]
    """Seconds of each adapter's first turn."""
    rates: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in (0, *COUNTS)})
    """Tokens per second by the number of adapters in the batch; 0 is the base model."""

    def policies(self, count: int) -> Sequence[str]:
        return self.adapters[:count] if count else [BASE_MODEL_NAME]


@asynccontextmanager
async def measured(engine: Installed, started: StartedEngine, folders: Sequence[Path]) -> AsyncGenerator[Measured]:
    """An engine with all adapters loaded, each of which has sampled once: an adapter's first turn is slower."""
    dialect = DIALECTS[engine.record.engine]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        client = Client(dialect, started, session)
        await client.turn(BASE_MODEL_NAME)
        names = [f"bench.{index}" for index in range(len(folders))]
        loads, firsts = list[float](), list[float]()
        for name, folder in zip(names, folders, strict=True):
            began = time.perf_counter()
            await client.send(dialect.load(name, str(folder)))
            loaded = time.perf_counter()
            await client.turn(name)
            loads.append(loaded - began)
            firsts.append(time.perf_counter() - loaded)
        yield Measured(f"{engine.record.engine}-{engine.record.version}", client, names, loads, firsts)


async def compared(engines: Sequence[tuple[Installed, StartedEngine]], folders: Sequence[Path]) -> Sequence[Measured]:
    """The measurements of all engines, case by case in turn."""
    async with AsyncExitStack() as stack:
        running = [await stack.enter_async_context(measured(*engine, folders)) for engine in engines]
        for _ in range(ROUNDS):
            for count in (0, *COUNTS):
                for each in running:
                    each.rates[count].append(await each.client.rate(each.policies(count)))
        return running


def rows(each: Measured, first: Measured) -> Iterator[Row]:
    """The figures of an engine, beside those of the first one."""
    name = f"engine_adapters/{each.name}"
    own = {count: statistics.median(values) for count, values in each.rates.items()}
    beside = None if each is first else first
    base = None if beside is None else statistics.median(beside.rates[0])
    against = "" if beside is None else beside.name
    yield Row(name=f"{name}/base", value=own[0], unit="tokens/s", reference=base, against=against)
    for count in COUNTS:
        row = f"{name}/{count}_adapter{'s' if count > 1 else ''}"
        yield Row(name=row, value=own[count], unit="tokens/s", reference=own[0], against="the base model")
    for row, seconds, others in (
        ("load", each.load_seconds, first.load_seconds),
        ("first_turn", each.first_seconds, first.first_seconds),
    ):
        value = 1000 * statistics.median(seconds)
        reference = None if beside is None else 1000 * statistics.median(others)
        yield Row(name=f"{name}/{row}", value=value, unit="ms", reference=reference, against=against)


def measure() -> Iterator[Row]:
    engines = [each for each in installed_engines(engines_folder()) if each.record.device == "cpu"]
    if not engines:
        raise UserInputError("no engine is installed; run: kestrl engine install vllm, kestrl engine install sglang")
    engines.sort(key=lambda each: (tuple(DIALECTS).index(each.record.engine), each.record.version))
    model = locate_model("demo://tiny", base=Path.cwd(), field="model")
    config = json.loads((Path(model) / "config.json").read_bytes())
    with tempfile.TemporaryDirectory(prefix="kestrl-bench-") as scratch, ExitStack() as stack:
        folders = [Path(scratch) / f"adapter-{index}" for index in range(max(COUNTS))]
        for seed, folder in enumerate(folders):
            write_random_adapter(config, folder, seed=seed)
        started = list[tuple[Installed, StartedEngine]]()
        for number, engine in enumerate(engines):
            work = Path(scratch) / f"engine-{number}"
            work.mkdir()
            running = started_engine(engine, model, work, slots=max(COUNTS))
            started.append((engine, stack.enter_context(running)))
        results = asyncio.run(compared(started, folders))
    for each in results:
        yield from rows(each, results[0])


if __name__ == "__main__":
    main(__doc__, measure)
