"""The code sandbox: `print(1)` with full isolation, beside a bare interpreter without any, and what 10,000 calls leave
behind.

Every figure is of the same run on the same machine. CPU per call is the whole of it: the sandbox's processes and the
service's; on a machine that does something else too it is the figure to compare.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from benchmarks.report import Row, main

from kestrl_sandbox.backends.bwrap import Bubblewrap
from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Run, SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import SandboxPool

SEQUENTIAL = 200
CONCURRENT = 32
CALLS = 640
LEAK_CALLS = int(os.environ.get("KESTRL_SANDBOX_CALLS", "10000"))
GOAL_MS, GOAL_RATE = 8.0, 250.0
CODE = "print(1)"
Call = Callable[[], Awaitable[bytes]]


async def bare() -> bytes:
    """A bare interpreter per call: no isolation, no limit."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", CODE, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0]


async def latency(call: Call) -> list[float]:
    """Milliseconds of calls one after the other."""
    taken: list[float] = []
    for _ in range(SEQUENTIAL):
        started = time.perf_counter()
        assert await call() == b"1\n"
        taken.append((time.perf_counter() - started) * 1e3)
    return sorted(taken)


async def rate(call: Call, calls: int) -> float:
    """Calls per second with `CONCURRENT` at the same time."""

    async def some() -> None:
        for _ in range(calls // CONCURRENT):
            assert await call() == b"1\n"

    started = time.perf_counter()
    await asyncio.gather(*[some() for _ in range(CONCURRENT)])
    return calls / (time.perf_counter() - started)


def below(pid: int) -> list[int]:
    """All processes below one, itself included."""
    found = [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found
    for child in children:
        found += below(int(child))
    return found


def cpu(pid: int) -> float:
    """CPU seconds of this process, and of a zygote with all it has started."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    total = own.ru_utime + own.ru_stime
    for process in below(pid):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


def resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def left() -> dict[str, int]:
    """What could be left behind on this machine."""
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "cgroups": len(
            [path for path in Path("/sys/fs/cgroup").glob("**/kestrl-sandbox-*") if str(os.getpid()) in path.name]
        ),
    }


def of(pool: SandboxPool) -> Call:
    async def call() -> bytes:
        return (await pool.run(Run(code=CODE))).stdout

    return call


async def measured() -> AsyncIterator[Row]:
    pool = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=8))
    zygote = pool._backend._process.pid
    call = of(pool)
    await rate(call, CONCURRENT * 2)
    plain, ours = await latency(bare), await latency(call)
    yield Row(
        name="sandbox/print/p50",
        value=statistics.median(ours),
        unit="ms",
        reference=statistics.median(plain),
        against="bare interpreter",
    )
    yield Row(name="sandbox/print/p99", value=ours[-3], unit="ms", reference=plain[-3], against="bare interpreter")
    yield Row(
        name="sandbox/print/p50_goal", value=statistics.median(ours), unit="ms", reference=GOAL_MS, against="goal"
    )
    before = cpu(zygote)
    plain_rate, our_rate = await rate(bare, CALLS // 2), 0.0
    before = cpu(zygote)
    our_rate = await rate(call, CALLS)
    yield Row(name="sandbox/print/at_32", value=our_rate, unit="/s", reference=plain_rate, against="bare interpreter")
    yield Row(name="sandbox/print/at_32_goal", value=our_rate, unit="/s", reference=GOAL_RATE, against="goal")
    yield Row(name="sandbox/print/cpu", value=(cpu(zygote) - before) / CALLS * 1e3, unit="ms a call")
    memory, processes = resident(os.getpid()), len(below(zygote))
    await rate(call, LEAK_CALLS // CONCURRENT * CONCURRENT)
    yield Row(name="sandbox/left/memory", value=resident(os.getpid()) - memory, unit="MiB after 10,000 calls")
    yield Row(name="sandbox/left/processes", value=len(below(zygote)) - processes, unit="more than before")
    await pool.close()


async def with_bubblewrap() -> AsyncIterator[Row]:
    try:
        pool = await SandboxPool.start(Bubblewrap.start, PoolConfig(max_sandboxes=8))
    except SandboxFailure:
        return  # this interpreter is where bubblewrap cannot bind it
    try:
        yield Row(name="sandbox/bwrap/p50", value=statistics.median(await latency(of(pool))), unit="ms")
        yield Row(name="sandbox/bwrap/at_32", value=await rate(of(pool), CALLS // 2), unit="/s")
    finally:
        await pool.close()


async def rows() -> list[Row]:
    before = left()
    found = [row async for row in measured()]
    found += [row async for row in with_bubblewrap()]
    after = left()
    found += [
        Row(name=f"sandbox/left/{name}", value=after[name] - count, unit="more than before")
        for name, count in before.items()
    ]
    found.append(
        Row(name="sandbox/load", value=os.getloadavg()[0], unit="processes that wanted a core in the last minute")
    )
    return found


def measure() -> Iterator[Row]:
    yield from asyncio.run(rows())


if __name__ == "__main__":
    main(__doc__, measure)
