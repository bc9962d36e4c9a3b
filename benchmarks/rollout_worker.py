"""Episodes per second and CPU per turn of one rollout worker on one core, against a bare loop that sends the same
requests.

The worker is the real process with masks, log-probs, tool calls, scores and (unless OTEL_SDK_DISABLED) spans. Its
servers run on the other core and are cheap (`fake_services`): an engine that answers after 50 ms, 4 turns per episode.
The limit is asyncio, aiohttp and uvloop with token ids in and out and nothing else (`bare_loop`), pinned to the same
core, in the same run. If KESTRL_VERL_PYTHON names a Python with verl 0.9.1, its ToolAgentLoop follows on the same core
(`verl_loop`). Other peers reach 66 (ART) and 26 (verifiers) episodes per second at 512 on one core.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Row, main
from tests.fakes.ports import free_port

from kestrl._shared import rpc
from kestrl._shared.credentials import Secret
from kestrl._shared.plan.settings.rollout import OutsideAgent, RolloutSettings
from kestrl._shared.rpc.status import TOKEN_KEY
from kestrl.api.common.v1 import common_pb2
from kestrl.api.rollout.v1 import rollout_pb2 as pb
from kestrl.api.rollout.v1 import rollout_pb2_grpc as stubs
from kestrl.episode import Scenario
from kestrl.episode.codec import scenario_to_proto
from kestrl_demo_models.tiny import tiny

LOADS = ((64, 2_000), (512, 4_000), (2_048, 8_192))
"""Concurrent episodes, and total episodes."""
GROUP = 8
TURNS = 4
TOKEN = "benchmark"
"""Credential for the worker under test."""
TICKS = os.sysconf("SC_CLK_TCK")
VERL_PYTHON = "KESTRL_VERL_PYTHON"


class Measured(NamedTuple):
    episodes_per_second: float
    cpu_ms_per_turn: float
    memory_mb: float


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


@contextmanager
def pinned(core: int, *arguments: str, **environment: str) -> Generator[subprocess.Popen[str]]:
    """A Python process pinned to one core that lives while its input is open."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=30)


def bare_loop(core: int, engine: int, concurrency: int, episodes: int) -> Measured:
    arguments = (str(engine), str(concurrency), str(episodes), str(tiny()))
    with pinned(core, "benchmarks.bare_loop", *arguments) as process:
        assert process.stdout is not None
        return Measured(**json.loads(process.stdout.readline()))


def verl_loop(core: int, engine: int, concurrency: int, episodes: int) -> Measured | None:
    """verl's loop, or nothing if no Python with verl is named."""
    python = os.environ.get(VERL_PYTHON)
    if not python:
        return None
    program = str(Path(__file__).with_name("verl_loop.py"))
    command = ["taskset", "-c", str(core), python, program, str(engine), str(concurrency), str(episodes), str(tiny())]
    return Measured(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


@contextmanager
def worker(
    core: int,
    services: dict[str, int],
    concurrency: int,
    endpoint: str | None,
    outside: OutsideAgent | None = None,
) -> Generator[tuple[str, int]]:
    """Starts a rollout worker, with an agent outside if one is given; yields its address and process."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        settings = RolloutSettings(
            component="rollout-0",
            job="bench",
            run="bench",
            listen=f"127.0.0.1:{port}",
            tokenizer=str(tiny()),
            agent="tool_agent",
            tools_address=f"127.0.0.1:{services['services']}",
            judge_address=f"127.0.0.1:{services['services']}",
            concurrency=concurrency,
            context_length=2048,
            drain_seconds=1.0,
            otlp_endpoint=endpoint,
            outside=outside,
        )
        path = Path(folder) / "settings.json"
        path.write_text(settings.model_dump_json())
        with pinned(
            core, "kestrl_rollout", "--settings", str(path), **{Secret.LEARNER_TO_ROLLOUT.value: TOKEN}
        ) as process:
            yield f"127.0.0.1:{port}", process.pid


def request(number: int, engine: int) -> pb.RunGroupRequest:
    messages = ({"role": "system", "content": "You look words up."}, {"role": "user", "content": "What is a kestrel?"})
    scenario = Scenario(id=str(number), ordinal=number, messages=messages)
    return pb.RunGroupRequest(
        group_id=f"bench/{number}",
        scenario=scenario_to_proto(scenario),
        size=GROUP,
        policy=common_pb2.PolicyVersion(job="bench", step=1, sha256="0" * 64),
        engines=[pb.Engine(name="engine-0", url=f"http://127.0.0.1:{engine}")],
        sampling=pb.Sampling(temperature=1.0, max_tokens=512, max_turns=TURNS + 1),
        deadlines=pb.Deadlines(tool=100, turn=200, episode=300, group=400),
        seed=number,
    )


class Slots:
    """Slots for episodes, granted in order of requests: a group starts with its first slot and gets the next ones
    first."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        taken = asyncio.get_running_loop().create_future()
        self._waiting.append((count, taken))
        self.give_back(0)
        await taken

    def give_back(self, count: int) -> None:
        self._free += count
        while self._waiting and self._free > 0:
            wanted, taken = self._waiting.popleft()
            self._free -= wanted
            taken.set_result(None)


async def drive(address: str, pid: int, engine: int, concurrency: int, episodes: int, turns: int = TURNS) -> Measured:
    """Closed loop, as in the learner: a group starts when one of `concurrency` slots is free; groups being scored need
    no slot."""
    async with rpc.channel(address) as channel:
        stub: Any = stubs.RolloutServiceStub(channel)
        numbers = iter(range(1_000_000))

        slots = Slots(concurrency)

        async def one() -> None:
            await slots.take(GROUP)
            group = request(next(numbers), engine)
            async for answer in stub.RunGroup(group, wait_for_ready=True, metadata=((TOKEN_KEY, TOKEN),)):
                if answer.HasField("group"):
                    whole = [episode for episode in answer.group.episodes if episode.stop_reason == "answered"]
                    assert len(whole) == GROUP, answer
                    assert all(len(episode.turns) == turns for episode in whole)
                else:
                    slots.give_back(answer.ended)

        async def load(count: int) -> None:
            await asyncio.gather(*(one() for _ in range(count)))

        await load(2 * concurrency // GROUP)
        before, began = cpu_seconds(pid), time.perf_counter()
        await load(episodes // GROUP)
        seconds, cpu = time.perf_counter() - began, cpu_seconds(pid) - before
    return Measured(episodes / seconds, 1000 * cpu / (episodes * turns), memory_mb(pid))


def rows(name: str, ours: Measured, theirs: Measured, against: str) -> Iterator[Row]:
    units = {"episodes": "1/s", "cpu": "ms/turn", "memory": "MB"}
    for (figure, unit), value, reference in zip(units.items(), ours, theirs, strict=True):
        yield Row(name=f"{name}/{figure}", value=value, unit=unit, reference=reference, against=against)


def measure() -> Iterator[Row]:
    with ExitStack() as stack:
        fakes = stack.enter_context(pinned(1, "benchmarks.fake_services", str(tiny())))
        assert fakes.stdout is not None
        services: dict[str, int] = json.loads(fakes.stdout.readline())
        traced = f"http://127.0.0.1:{services['services']}"
        os.sched_setaffinity(0, {1})
        for concurrency, episodes in LOADS:
            bare = bare_loop(0, services["engine"], concurrency, episodes)
            with worker(0, services, concurrency, traced) as (address, pid):
                ours = asyncio.run(drive(address, pid, services["engine"], concurrency, episodes))
            at = f"rollout_worker/{concurrency}"
            yield from rows(at, ours, bare, "bare aiohttp loop")
            verl = verl_loop(0, services["engine"], concurrency, episodes)
            if verl is not None:
                yield from rows(f"{at}/beside_verl", ours, verl, "verl")


if __name__ == "__main__":
    main(__doc__, measure)
