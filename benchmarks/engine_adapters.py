"""What an engine samples in a second, and what adapters in a batch cost it: the base model, 1, 4 and 16 adapters.

Every engine that `kestrl engine install` has installed for CPUs, one after the other, with the tiny model: 64 turns of
up to 48 tokens behind prompts of 64, 16 at a time, dealt to the adapters in turn. The cases alternate, and figures are
medians over `ROUNDS`. The reference is the base model on the same engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
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


async def rates(engine: Installed, started: StartedEngine, folders: Sequence[Path]) -> dict[int, float]:
    """Median tokens per second by the number of adapters in the batch; 0 is the base model."""
    dialect = DIALECTS[engine.record.engine]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        client = Client(dialect, started, session)
        names = [f"bench.{index}" for index in range(len(folders))]
        for name, folder in zip(names, folders, strict=True):
            await client.send(dialect.load(name, str(folder)))
        cases = {0: [BASE_MODEL_NAME], **{count: names[:count] for count in COUNTS}}
        for policies in cases.values():  # an adapter's first request is slower
            await asyncio.gather(*map(client.turn, policies))
        seen: dict[int, list[float]] = {count: [] for count in cases}
        for _ in range(ROUNDS):
            for count, policies in cases.items():
                seen[count].append(await client.rate(policies))
    return {count: statistics.median(values) for count, values in seen.items()}


def figures(engine: Installed) -> Iterator[Row]:
    model = locate_model("demo://tiny", base=Path.cwd(), field="model")
    config = json.loads((Path(model) / "config.json").read_bytes())
    with tempfile.TemporaryDirectory(prefix="kestrl-bench-") as scratch:
        work = Path(scratch)
        folders = [work / f"adapter-{index}" for index in range(max(COUNTS))]
        for seed, folder in enumerate(folders):
            write_random_adapter(config, folder, seed=seed)
        with started_engine(engine, model, work, slots=max(COUNTS)) as started:
            seen = asyncio.run(rates(engine, started, folders))
    name = f"engine_adapters/{engine.record.engine}-{engine.record.version}"
    yield Row(name=f"{name}/base", value=seen[0], unit="tokens/s")
    for count in COUNTS:
        row = f"{name}/{count}_adapter{'s' if count > 1 else ''}"
        yield Row(name=row, value=seen[count], unit="tokens/s", reference=seen[0], against="the base model")


def measure() -> Iterator[Row]:
    engines = [each for each in installed_engines(engines_folder()) if each.record.device == "cpu"]
    if not engines:
        raise UserInputError("no engine is installed; run: kestrl engine install vllm, kestrl engine install sglang")
    for engine in engines:
        yield from figures(engine)


if __name__ == "__main__":
    main(__doc__, measure)
