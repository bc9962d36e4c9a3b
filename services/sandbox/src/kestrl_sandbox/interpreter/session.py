"""The calls of one episode."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kestrl.errors import UserInputError
from kestrl.tools import ToolResult
from kestrl.tools.provider import Kwargs
from kestrl_sandbox.contract import Echo, Language, Result, Run, SandboxFailure
from kestrl_sandbox.interpreter.config import InterpreterConfig
from kestrl_sandbox.interpreter.observation import facts, text_of
from kestrl_sandbox.pool.sandbox_pool import PooledSession, SandboxPool


class Snippet(NamedTuple):
    """What a call asks to run."""

    code: str
    language: Language


class InterpreterSession:
    """Runs the programs of an episode, one after the other."""

    prompt = ""

    def __init__(
        self,
        pool: SandboxPool,
        config: InterpreterConfig,
        program_of: Callable[..., Snippet],
        outcomes: Counter[str],
    ) -> None:
        """Prepares a session without a sandbox.

        Args:
            pool: Where programs run.
            config: Config of the tool with the row's.
            program_of: Reads a call's arguments.
            outcomes: Runs by outcome, for metrics.
        """
        self._pool, self._config, self._program_of, self._outcomes = pool, config, program_of, outcomes
        self._files = {path: text.encode() for path, text in (config.files or {}).items()}
        self._turn = asyncio.Lock()
        self._kept: PooledSession | None = None
        self._fresh = True

    async def call(self, tool: str, arguments: Kwargs, filled: Kwargs) -> object:
        del tool  # always a single one
        program = self._program_of(**{**arguments, **filled})
        async with self._turn:
            return await self._run(program)

    async def state(self) -> object:
        return None

    async def close(self) -> None:
        """Ends the sandbox that is kept between calls."""
        async with self._turn:
            kept, self._kept = self._kept, None
            if kept is not None:
                await kept.close()

    async def _run(self, program: Snippet) -> ToolResult:
        files = self._files if self._fresh or not self._config.session else {}
        echo = Echo.PRINT if program.language is Language.PYTHON else Echo.NOTHING
        run = Run(code=program.code, language=program.language, limits=self._config.limits, files=files, echo=echo)
        session_lost = False
        try:
            if self._config.session:
                result, session_lost = await self._in_session(run)
            else:
                result = await self._pool.run(run)
        except SandboxFailure:
            self._outcomes["sandbox_failure"] += 1
            raise
        except UserInputError as error:  # of the model: the config was checked at the start
            return ToolResult(text=f"The code was not run: {error}.", data={"outcome": "refused"})
        self._outcomes[result.outcome] += 1
        return ToolResult(text=text_of(result, lost=session_lost), data=facts(result))

    async def _in_session(self, run: Run) -> tuple[Result, bool]:
        if self._kept is None:
            self._kept = await self._pool.session()
        restarts = self._kept.restarts
        result = await self._kept.run(run)
        session_lost = self._kept.restarts > restarts
        self._fresh = session_lost
        return result, session_lost
