"""A thousand calls leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Limits, Outcome, Run
from kestrl_sandbox.pool.cgroups import remove_stale
from kestrl_sandbox.pool.sandbox_pool import SandboxPool

CALLS = 1000
SLOTS = 4
MEMORY_GROWTH = 4 << 20
PROGRAMS = {
    "print(1)": Outcome.OK,
    "import os\nif os.fork() == 0:\n    os.setsid()\n    import time; time.sleep(60)": Outcome.OK,
    "open('/tmp/x', 'w').write('x' * 100_000); 1 / 0": Outcome.NONZERO_EXIT,
    "import os; os.kill(os.getpid(), 9)": Outcome.SIGNAL,
    "while True: pass": Outcome.TIMEOUT,
}


IMAGE_BUILD = ("buildah", "/containers/", "mmdebstrap")
"""Parts of paths at which an image build mounts."""


def below(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = {int(child) for child in (task / "children").read_text().split()}
        except OSError:
            continue
        for child in children:
            found |= {child} | below(child) if Path(f"/proc/{child}").exists() else set()
    return found


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cgroups() -> set[Path]:
    return {path for path in Path("/sys/fs/cgroup").glob("**/kestrl-sandbox-*") if f"-{os.getpid()}-" in path.name}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def mounts() -> set[str]:
    """Mounts of this process's namespace, but for those of an image build, which `make test-all` runs beside."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {line for line in lines if not any(word in line for word in IMAGE_BUILD)}


def only_child(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def processes_in(cgroup: Path) -> list[str]:
    return [pid for path in cgroup.rglob("cgroup.procs") for pid in path.read_text().split()]


async def test_a_thousand_calls_leave_nothing_behind() -> None:
    had_cgroups = cgroups()
    had_descriptors, had_mounts = descriptors(), mounts()
    programs = [code for code, outcome in PROGRAMS.items() if outcome is not Outcome.TIMEOUT]
    pool = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=SLOTS))
    try:
        assert isinstance(pool._backend, Zygote)
        zygote = pool._backend._process.pid

        async def calls(count: int) -> None:
            for number in range(count):
                code = programs[number % len(programs)]
                assert (await pool.run(Run(code=code))).outcome is PROGRAMS[code]

        await asyncio.gather(*[calls(10) for _ in range(SLOTS)])
        first = only_child(zygote)
        memory, own = resident(first), resident(os.getpid())
        await asyncio.gather(*[calls(CALLS // SLOTS) for _ in range(SLOTS)])
        for _ in range(SLOTS):
            endless = Run(code="while True: pass", limits=Limits(seconds=0.1))
            assert (await pool.run(endless)).outcome is Outcome.TIMEOUT
        # One leader per slot, each with a sandbox that is ready: process 1 and the one for the code.
        assert len(below(first)) <= 3 * SLOTS
        assert resident(first) - memory < MEMORY_GROWTH
        assert resident(os.getpid()) - own < 4 * MEMORY_GROWTH
    finally:
        await pool.close()
    assert not exists(first)
    # A place's cgroup may be busy for minutes although it is empty (Linux 6.18); the next start removes it.
    assert [path for path in cgroups() - had_cgroups if processes_in(path)] == []
    assert (descriptors(), mounts()) == (had_descriptors, had_mounts)


def test_cgroups_of_a_killed_service_are_removed_at_the_next_start(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    stale, alive = tmp_path / f"kestrl-sandbox-{ended.pid}-abc", tmp_path / f"kestrl-sandbox-{os.getpid()}-abc"
    for folder in (stale / "1", alive / "1", tmp_path / "other"):
        folder.mkdir(parents=True)
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([alive.name, "other"])
