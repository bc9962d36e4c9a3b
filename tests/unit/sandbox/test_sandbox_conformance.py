"""Our back-ends and the conformance suite of sandboxes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from kestrl_sandbox.backends.bwrap import Bubblewrap
from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Capabilities, Result, Run, Sandbox, SandboxFailure, SandboxSession
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.testing import AT_ONCE, check_sandbox

CONFIG = PoolConfig(max_sandboxes=AT_ONCE, memory_mb=256, disk_mb=16, inodes=512)


async def zygote() -> SandboxPool:
    return await SandboxPool.start(Zygote.start, CONFIG)


async def bubblewrap() -> SandboxPool:
    return await SandboxPool.start(Bubblewrap.start, CONFIG)


@pytest.mark.parametrize("start", [zygote, bubblewrap])
async def test_a_back_end_conforms(start: Callable[[], Awaitable[Sandbox]]) -> None:
    try:
        await (await start()).close()
    except SandboxFailure as error:
        pytest.skip(f"no such sandbox on this node: {error}")
    await check_sandbox(start)


class Altered:
    """A pool, of which subclasses break one property each."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool = pool

    @property
    def capabilities(self) -> Capabilities:
        return self.pool.capabilities

    async def run(self, run: Run) -> Result:
        return await self.pool.run(run)

    async def session(self) -> SandboxSession:
        return await self.pool.session()

    async def close(self) -> None:
        await self.pool.close()


class Merged(Altered):
    """Returns both outputs as one."""

    async def run(self, run: Run) -> Result:
        result = await self.pool.run(run)
        return replace(result, stdout=result.stdout + result.stderr, stderr=b"")


class Quiet(Altered):
    """Does not say that output was cut."""

    async def run(self, run: Run) -> Result:
        return replace(await self.pool.run(run), stdout_truncated=False)


class Shared(Altered):
    """Gives everybody the same session."""

    common: SandboxSession | None = None

    async def session(self) -> SandboxSession:
        self.common = self.common or await self.pool.session()
        return self.common


@pytest.mark.parametrize(
    ("broken", "problem"),
    [(Merged, "both outputs are returned apart"), (Quiet, "what was cut says so"), (Shared, "sessions share nothing")],
)
async def test_a_broken_sandbox_is_found(broken: type[Altered], problem: str) -> None:
    async def start() -> Altered:
        try:
            return broken(await zygote())
        except SandboxFailure as error:
            pytest.skip(f"no sandbox on this node: {error}")

    with pytest.raises(AssertionError, match=problem):
        await check_sandbox(start)
