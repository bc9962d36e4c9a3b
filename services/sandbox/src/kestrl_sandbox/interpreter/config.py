"""The config of a tool that runs code: the manifest's, with what a row adds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kestrl.errors import UserInputError
from kestrl.tools import WarmPool
from kestrl_sandbox.backends import AUTO
from kestrl_sandbox.config import default_size
from kestrl_sandbox.contract import Isolation, Limits, Run
from kestrl_sandbox.interpreter.shared_pool import PoolSettings

CLAIMS = 16
"""Default of `max_sandboxes` for sandboxes that are claimed, each of which is a pod."""
OUTPUT_BYTES = 200_000
"""Bytes of each output stream that are kept; the rollout worker cuts the text to `agent.maxToolTokens`."""
OF_THE_POOL = frozenset({"isolation", "backend", "max_sandboxes"})
"""Fields of the pool that all episodes share, which a row cannot set."""


@dataclass(frozen=True, slots=True)
class InterpreterConfig:
    """Config of the tool."""

    isolation: str = Isolation.NAMESPACES
    """Least isolation that the job accepts: `namespaces` or `kernel`."""
    backend: str = AUTO
    """A back-end by name, or `auto`."""
    session: bool = False
    """Whether variables, files and processes are kept between the calls of an episode."""
    seconds: float = 10.0
    """Limit of one call."""
    memory_mb: int = 512
    """Limit of memory."""
    max_sandboxes: int | None = None
    """Sandboxes at the same time; with `session` one per episode that has made a call."""
    files: Mapping[str, str] | None = None
    """Text files to write before each run (with `session`, before the first), by path below /work; for rows."""

    @classmethod
    def read(cls, kwargs: Mapping[str, Any]) -> InterpreterConfig:
        """Config from keyword arguments.

        Raises:
            TypeError: There is no such argument; the message names it.
        """
        inspect.signature(cls).bind(**kwargs)  # whose messages do not name the constructor
        return cls(**kwargs)

    @property
    def limits(self) -> Limits:
        return Limits(seconds=self.seconds, memory_mb=self.memory_mb, output_bytes=OUTPUT_BYTES)

    def check(self) -> None:
        """Checks what every run has.

        Raises:
            UserInputError: A limit or a path cannot be used.
        """
        limits = Limits(seconds=self.seconds, memory_mb=self.memory_mb)
        Run(code="", limits=limits, files=dict.fromkeys(self.files or {}, b"")).check()

    def pool_settings(self, warm_pool: WarmPool | None) -> PoolSettings:
        """What the pool must be for this tool.

        Raises:
            UserInputError: There is no such isolation, or claimed sandboxes have another say in the back-end.
        """
        if self.isolation not in {isolation.value for isolation in Isolation}:
            raise UserInputError(f"isolation: there is no {self.isolation!r}; there are {', '.join(Isolation)}")
        if warm_pool is not None and self.backend != AUTO:
            raise UserInputError(
                f"backend: is {self.backend}, and code runs in claimed sandboxes (`sandbox.claim`), whose template "
                "chooses the back-end; remove it"
            )
        size = self.max_sandboxes or (CLAIMS if warm_pool else default_size() * (8 if self.session else 1))
        return PoolSettings(
            isolation=Isolation(self.isolation),
            backend=self.backend,
            max_sandboxes=size,
            memory_mb=self.memory_mb,
            warm_pool=warm_pool,
        )
