"""The pool of sandboxes that the tools of a job share: opened for the first of them, closed after the last."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.errors import UserInputError
from kestrl.tools import WarmPool
from kestrl_sandbox.backends import open_sandbox
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import STRENGTH, Isolation
from kestrl_sandbox.pool.sandbox_pool import SandboxPool
from kestrl_sandbox.remote.claims import ClaimedSandboxes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What the tools that share a pool have in common."""

    isolation: Isolation
    """Least isolation that the job accepts."""
    backend: str
    max_sandboxes: int
    memory_mb: int
    warm_pool: WarmPool | None
    """Where sandboxes are claimed; None for those of this node."""

    def check_same(self, opened: PoolSettings) -> None:
        """Raises UserInputError for a setting that differs from those of the open pool."""
        for name in (field.name for field in fields(self)):
            mine, theirs = getattr(self, name), getattr(opened, name)
            if mine != theirs:
                if name == "warm_pool":
                    raise UserInputError(
                        "sandbox.claim: differs from that of another tool that runs code; all of them share one pool "
                        "of sandboxes: give them the same claim"
                    )
                raise UserInputError(
                    f"{name}: is {mine}, and {theirs} in another tool that runs code; all of them share one pool of "
                    "sandboxes: give them the same value"
                )


class _OpenPool(NamedTuple):
    pool: SandboxPool
    settings: PoolSettings


class SharedPool:
    """A pool with the number of its users. One at a time acquires or releases it."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        """Runs of all users so far, by outcome."""
        self.users = 0
        self._open: _OpenPool | None = None

    @property
    def pool(self) -> SandboxPool | None:
        """The pool; None while nobody uses it."""
        return None if self._open is None else self._open.pool

    async def acquire(self, settings: PoolSettings) -> SandboxPool:
        """The pool, opened with these settings if nobody uses it yet; `release` gives it back.

        Raises:
            UserInputError: The settings differ from those of the pool, or nothing here offers them.
            SandboxFailure: No sandbox could be claimed.
        """
        if self._open is None:
            self._open = _OpenPool(await self._opened(settings), settings)
        else:
            settings.check_same(self._open.settings)
        self.users += 1
        return self._open.pool

    async def release(self) -> None:
        """Ends all sandboxes if nobody else uses the pool."""
        self.users -= 1
        if self.users == 0 and self._open is not None:
            pool, self._open = self._open.pool, None
            await pool.close()

    async def _opened(self, settings: PoolSettings) -> SandboxPool:
        config = PoolConfig(max_sandboxes=settings.max_sandboxes, memory_mb=settings.memory_mb)
        if settings.warm_pool is None:
            pool = await open_sandbox(config, least=settings.isolation, backend=settings.backend)
        else:
            pool = await _claimed(config, settings.warm_pool, settings.isolation)
        capabilities = pool.capabilities
        log.info(
            "code runs in %s, isolated by %s: %s",
            capabilities.backend,
            capabilities.isolation,
            dict(capabilities.mechanisms),
        )
        observe(Metric.SANDBOX_BACKEND, lambda: {(capabilities.backend, capabilities.isolation.value): 1.0})
        observe(Metric.SANDBOX_RUNNING, lambda: pool.running)
        observe(Metric.SANDBOX_WAITING, lambda: pool.waiting)
        observe(Metric.SANDBOX_RUNS, lambda: self.outcomes)
        return pool


async def _claimed(config: PoolConfig, warm_pool: WarmPool, required: Isolation) -> SandboxPool:
    """A pool of claimed sandboxes.

    Raises:
        UserInputError: They isolate less than is asked for, or do not fit the config.
        SandboxFailure: No sandbox could be claimed.
    """
    pool = await SandboxPool.start(partial(ClaimedSandboxes.start, pool=warm_pool), config)
    capabilities = pool.capabilities
    if STRENGTH[capabilities.isolation] < STRENGTH[required]:
        await pool.close()
        raise UserInputError(
            f"isolation: at least {required} is asked for, and a {capabilities.backend} isolates by "
            f"{capabilities.isolation}; choose another pool, or another back-end in its template"
        )
    return pool


SHARED = SharedPool()
"""The pool of this process: limits on the sandboxes of a node hold over all tools of a job together."""
