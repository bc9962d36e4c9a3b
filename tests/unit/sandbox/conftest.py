"""One pool of sandboxes for a module's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import SandboxPool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    try:
        started = await SandboxPool.start(
            Zygote.start, PoolConfig(max_sandboxes=8, memory_mb=256, disk_mb=16, inodes=512)
        )
    except SandboxFailure as error:
        pytest.skip(f"no sandbox on this node: {error}")
    yield started
    await started.close()
