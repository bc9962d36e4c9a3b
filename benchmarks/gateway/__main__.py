"""What an agent by URL costs the rollout worker: CPU of a turn beside the built-in loop's, the latency that the gateway
adds to a call, and what 10,000 episodes leave behind.

The worker is the real process on one core, as in `benchmarks.rollout_worker`; engine, tools, judge and the agent, a
service that sends its whole history with each call, share the other. The added latency is at half the load that the
core bears, with 1,000 episodes open: the quantile of calls to the gateway less that of calls which the same client
makes meanwhile to the engine itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, main
from benchmarks.rollout_worker import TURNS, Measured, drive, pinned, worker

from kestrl._shared.plan.settings.rollout import OutsideAgent
from kestrl_demo_models.tiny import tiny

OPEN = 1_000
"""Open episodes while latencies are measured."""
KEPT_TURNS = 2
"""Turns of the episodes after which leaks are looked for."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Episodes of each part."""

    cpu: int = 2_000
    latency: int = 2_000
    leaks: int = 10_000
    concurrency: int = 512
    open: int = OPEN


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds."""

    memory_mb: float
    descriptors: int
    processes: int

    @classmethod
    def of(cls, pid: int) -> Held:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        memory = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        return cls(memory, len(list(Path(f"/proc/{pid}/fd").iterdir())), len(children))


class Bench:
    """Workers beside the same services."""

    def __init__(self, services: dict[str, int], agent: int) -> None:
        self._services, self._agent = services, agent
        self.engine = services["engine"]

    def outside(self, turns: int, think: float) -> OutsideAgent:
        """The agent, whose turns are `think` seconds apart on average."""
        engine = f"http://127.0.0.1:{self.engine}/inference/v1/generate"
        config = {"turns": turns, "think": think, "engine": engine}
        return OutsideAgent(url=f"http://127.0.0.1:{self._agent}/run", config=config)

    @contextmanager
    def worker(self, concurrency: int, outside: OutsideAgent | None) -> Generator[tuple[str, int]]:
        with worker(0, self._services, concurrency, None, outside) as started:
            yield started

    def seconds(self) -> dict[str, list[float]]:
        """How long calls took since the last time."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._agent}/seconds") as answer:
            return json.load(answer)

    def run(self, concurrency: int, episodes: int, outside: OutsideAgent | None, turns: int = TURNS) -> Measured:
        with self.worker(concurrency, outside) as (address, pid):
            return asyncio.run(drive(address, pid, self.engine, concurrency, episodes, turns))


def cpu(bench: Bench, sizes: Sizes) -> tuple[Measured, list[Row]]:
    """CPU of a turn, beside that of the built-in loop."""
    own = bench.run(sizes.concurrency, sizes.cpu, None)
    served = bench.run(sizes.concurrency, sizes.cpu, bench.outside(TURNS, 0))
    pairs = (("cpu", "ms/turn", served.cpu_ms_per_turn, own.cpu_ms_per_turn),)
    pairs += (("episodes", "1/s", served.episodes_per_second, own.episodes_per_second),)
    at = f"gateway/{sizes.concurrency}"
    rows = [
        Row(name=f"{at}/{name}", value=value, unit=unit, reference=reference, against="the built-in loop")
        for name, unit, value, reference in pairs
    ]
    return served, rows


def latency(bench: Bench, sizes: Sizes, served: Measured) -> Iterator[Row]:
    """The latency that the gateway adds to a call, at half the load that the core bears."""
    rate = 0.5 * served.episodes_per_second * TURNS
    bench.seconds()
    bench.run(sizes.open, sizes.latency, bench.outside(TURNS, sizes.open / rate))
    seconds = bench.seconds()
    later = {name: each[len(each) // 2 :] for name, each in seconds.items()}
    cuts = {name: statistics.quantiles(each, n=100) for name, each in later.items()}
    for name, cut in (("p50", 49), ("p99", 98)):
        added = 1000 * (cuts["gateway"][cut] - cuts["engine"][cut])
        yield Row(name=f"gateway/{sizes.open}_open/added_latency_{name}", value=added, unit="ms")
        yield Row(name=f"gateway/{sizes.open}_open/engine_{name}", value=1000 * cuts["engine"][cut], unit="ms")


def leaks(bench: Bench, sizes: Sizes) -> Iterator[Row]:
    """What episodes leave in the worker, after as many as it runs at once."""
    outside = bench.outside(KEPT_TURNS, 0)
    with bench.worker(sizes.concurrency, outside) as (address, pid):
        asyncio.run(drive(address, pid, bench.engine, sizes.concurrency, sizes.concurrency, KEPT_TURNS))
        before = Held.of(pid)
        asyncio.run(drive(address, pid, bench.engine, sizes.concurrency, sizes.leaks, KEPT_TURNS))
        after = Held.of(pid)
    at = f"gateway/{sizes.leaks}_episodes"
    yield Row(name=f"{at}/memory", value=after.memory_mb, unit="MB", reference=before.memory_mb, against="before")
    yield Row(
        name=f"{at}/descriptors", value=after.descriptors, unit="1", reference=before.descriptors, against="before"
    )
    yield Row(name=f"{at}/processes", value=after.processes - before.processes, unit="1 more")


def measure(sizes: Sizes = Sizes()) -> Iterator[Row]:
    with ExitStack() as stack:
        fakes = stack.enter_context(pinned(1, "benchmarks.fake_services", str(tiny())))
        agent = stack.enter_context(pinned(1, "benchmarks.gateway.agent"))
        assert fakes.stdout is not None
        assert agent.stdout is not None
        bench = Bench(json.loads(fakes.stdout.readline()), int(agent.stdout.readline()))
        os.sched_setaffinity(0, {1})
        served, rows = cpu(bench, sizes)
        yield from rows
        yield from latency(bench, sizes, served)
        yield from leaks(bench, sizes)


def quick() -> Iterator[Row]:
    return measure(Sizes(cpu=256, latency=128, leaks=512, concurrency=64, open=64))


if __name__ == "__main__":
    main(__doc__, measure, quick)
