"""A tool that runs code, as a provider of the tool service."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from kestrl.errors import UserInputError
from kestrl.tools import SandboxInUse, WarmPool
from kestrl.tools.provider import CodeProvider, Kwargs, ProviderSession, ToolDefinition, kwargs_failure, refuse_fixed
from kestrl.tools.schema import read
from kestrl_sandbox.contract import SandboxFailure
from kestrl_sandbox.interpreter.config import OF_THE_POOL, InterpreterConfig
from kestrl_sandbox.interpreter.session import InterpreterSession, Snippet
from kestrl_sandbox.interpreter.shared_pool import SHARED
from kestrl_sandbox.pool.sandbox_pool import SandboxPool


class Interpreter(CodeProvider):
    """One tool, whose parameters and description are those of `program`."""

    def __init__(self, name: str, config: Kwargs, warm_pool: Callable[[], WarmPool] | None = None) -> None:
        try:
            self._config = InterpreterConfig.read(config)
        except TypeError as error:
            raise UserInputError(f"its config does not fit: {error}") from error
        self._name, self._fixed, self._warm_pool = name, config, warm_pool
        self._pool: SandboxPool | None = None
        described = read(type(self), name, method="program")
        self._definition = ToolDefinition(
            schema=described.schema, arguments=described.arguments, fillable=described.fillable
        )

    @abstractmethod
    def program(self, *arguments: Any, **named: Any) -> Snippet:
        """The program that a call asks to run; subclasses declare the parameters that the model sees."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def environment(self) -> bool:
        return False

    @property
    def has_state(self) -> bool:
        return False

    @property
    def has_prompt(self) -> bool:
        return False

    @property
    def sandbox(self) -> SandboxInUse | None:
        if self._pool is None:
            return None
        capabilities = self._pool.capabilities
        return SandboxInUse(backend=capabilities.backend, isolation=capabilities.isolation.value)

    async def list_tools(self) -> Sequence[ToolDefinition]:
        return [self._definition]

    def check(self, create_kwargs: Kwargs) -> None:
        self._with_row(create_kwargs)

    async def start(self) -> None:
        """Opens the pool, or shares the one that another tool of the job has opened.

        Raises:
            UserInputError: The config cannot be used, differs from that of the pool, or asks for an isolation that is
                not offered.
            SandboxFailure: No sandbox could be claimed.
        """
        self._config.check()
        warm_pool = None if self._warm_pool is None else self._warm_pool()
        self._pool = await SHARED.acquire(self._config.pool_settings(warm_pool))

    async def open(self, create_kwargs: Kwargs) -> ProviderSession:
        config = self._with_row(create_kwargs)
        if self._pool is None:
            raise SandboxFailure("no pool of sandboxes is open in this process", code="sandbox_closed")
        return InterpreterSession(self._pool, config, self.program, SHARED.outcomes)

    def health(self) -> str:
        return ""

    async def stop(self) -> None:
        if self._pool is not None:
            self._pool = None
            await SHARED.release()

    def _with_row(self, create_kwargs: Kwargs) -> InterpreterConfig:
        """Config with what a row adds; raises ToolFailure for what it cannot."""
        refuse_fixed(self._name, "create_kwargs", self._fixed, create_kwargs)
        of_the_pool = ", ".join(sorted(OF_THE_POOL & set(create_kwargs)))
        if of_the_pool:
            reason = f"{of_the_pool} of the pool, which all episodes share, is set by the tool's config in the manifest"
            raise kwargs_failure(self._name, "create_kwargs", reason)
        try:
            return InterpreterConfig.read({**self._fixed, **create_kwargs})
        except TypeError as error:
            raise kwargs_failure(self._name, "create_kwargs", f"{type(self).__name__}: {error}") from error
