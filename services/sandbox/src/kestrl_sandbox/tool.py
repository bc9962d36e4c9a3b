"""`code_interpreter`: a tool that runs code in the sandbox of its node.

```yaml
spec:
  tools: [{name: code_interpreter, use: "kestrl_sandbox.tool:CodeInterpreter", config: {session: true, seconds: 5}}]
```

`PythonInterpreter` is the same with the signature of ReTool's conversations: the code, and no choice of a language.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, Literal

from kestrl._shared.telemetry.metrics import observe
from kestrl._shared.telemetry.names import Metric
from kestrl.errors import UserInputError
from kestrl.tools import SandboxInUse, ToolResult, WarmPool
from kestrl_sandbox.backends import AUTO, open_sandbox
from kestrl_sandbox.config import PoolConfig, default_size
from kestrl_sandbox.contract import STRENGTH, Echo, Isolation, Language, Limits, Outcome, Result, Run, SandboxFailure
from kestrl_sandbox.pool.sandbox_pool import PooledSession, SandboxPool
from kestrl_sandbox.remote.claims import ClaimedSandboxes

log = logging.getLogger(__name__)
CLAIMS = 16
"""Default of `max_sandboxes` for sandboxes that are claimed, each of which is a pod."""
OUTPUT_BYTES = 200_000
"""Bytes of each output stream that are kept; the rollout worker cuts the text to `agent.maxToolTokens`."""
_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PoolSettings:
    """What the tools that share a pool have in common."""

    isolation: Isolation
    backend: str
    max_sandboxes: int
    memory_mb: int
    warm_pool: WarmPool | None

    def check_same(self, opened: _PoolSettings) -> None:
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


class _Shared:
    """The pool of this process, for all episodes and all tools that run code."""

    pool: SandboxPool | None = None
    settings: _PoolSettings | None = None
    tools: int = 0
    outcomes: ClassVar[Counter[str]] = Counter()


class _Interpreter:
    """A tool that runs code in a sandbox of its own."""

    def __init__(
        self,
        isolation: str = Isolation.NAMESPACES,
        backend: str = AUTO,
        session: bool = False,
        seconds: float = 10.0,
        memory_mb: int = 512,
        max_sandboxes: int | None = None,
        files: Mapping[str, str] | None = None,
    ) -> None:
        """Config of the tool.

        Args:
            isolation: Least isolation that the job accepts: `namespaces` or `kernel`.
            backend: A back-end by name, or `auto`.
            session: Whether variables, files and processes are kept between the calls of an episode.
            seconds: Limit of one call.
            memory_mb: Limit of memory.
            max_sandboxes: Sandboxes at the same time; with `session` one per episode that has made a call.
            files: Text files to write before each run (with `session`, before the first), by path below /work; for
                rows.
        """
        del isolation, backend, max_sandboxes  # of the pool, which start_service has opened
        self._limits = Limits(seconds=seconds, memory_mb=memory_mb, output_bytes=OUTPUT_BYTES)
        self._files = {path: text.encode() for path, text in (files or {}).items()}
        self._keep = session
        self._session: PooledSession | None = None
        self._fresh = True

    @classmethod
    async def start_service(
        cls,
        isolation: str = Isolation.NAMESPACES,
        backend: str = AUTO,
        session: bool = False,
        seconds: float = 10.0,
        memory_mb: int = 512,
        max_sandboxes: int | None = None,
        files: Mapping[str, str] | None = None,
        *,
        warm_pool: WarmPool | None = None,
    ) -> SandboxInUse:
        """Opens the pool when the tool service starts, or shares the one that another tool of the job has opened, and
        reports what isolates its sandboxes: on this node, or with `warm_pool` in the pods that are claimed from it.

        Raises:
            UserInputError: The config cannot be used, differs from that of the pool, or asks for an isolation that is
                not offered.
            SandboxFailure: No sandbox could be claimed.
        """
        Run(code="", limits=Limits(seconds=seconds, memory_mb=memory_mb), files=dict.fromkeys(files or {}, b"")).check()
        if isolation not in {item.value for item in Isolation}:
            raise UserInputError(f"isolation: there is no {isolation!r}; there are {', '.join(Isolation)}")
        if warm_pool is not None and backend != AUTO:
            raise UserInputError(
                f"backend: is {backend}, and code runs in claimed sandboxes (`sandbox.claim`), whose template chooses "
                "the back-end; remove it"
            )
        size = max_sandboxes or (CLAIMS if warm_pool else default_size() * (8 if session else 1))
        settings = _PoolSettings(
            isolation=Isolation(isolation),
            backend=backend,
            max_sandboxes=size,
            memory_mb=memory_mb,
            warm_pool=warm_pool,
        )
        if _Shared.pool is not None and _Shared.settings is not None:
            settings.check_same(_Shared.settings)
        pool = _Shared.pool or await cls._open(settings)
        _Shared.tools += 1
        capabilities = pool.capabilities
        return SandboxInUse(backend=capabilities.backend, isolation=capabilities.isolation.value)

    @staticmethod
    async def _open(settings: _PoolSettings) -> SandboxPool:
        config = PoolConfig(max_sandboxes=settings.max_sandboxes, memory_mb=settings.memory_mb)
        if settings.warm_pool is None:
            pool = await open_sandbox(config, least=settings.isolation, backend=settings.backend)
        else:
            pool = await _claimed(config, settings.warm_pool, settings.isolation)
        _Shared.pool, _Shared.settings = pool, settings
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
        observe(Metric.SANDBOX_RUNS, lambda: _Shared.outcomes)
        return pool

    @classmethod
    async def stop_service(cls) -> None:
        """Ends all sandboxes when the last tool that runs code is stopped."""
        _Shared.tools -= 1
        if _Shared.tools > 0:
            return
        pool, _Shared.pool, _Shared.settings = _Shared.pool, None, None
        if pool is not None:
            await pool.close()

    async def close(self) -> None:
        """Ends the session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _run(self, code: str, language: Language) -> ToolResult:
        files = self._files if self._fresh or not self._keep else {}
        echo = Echo.PRINT if language is Language.PYTHON else Echo.NOTHING
        run = Run(code=code, language=language, limits=self._limits, files=files, echo=echo)
        session_lost = False
        try:
            if self._keep:
                result, session_lost = await self._in_session(run)
            else:
                result = await self._pool().run(run)
        except SandboxFailure:
            _Shared.outcomes["sandbox_failure"] += 1
            raise
        except UserInputError as error:  # of the model: the config was checked at the start
            return ToolResult(text=f"The code was not run: {error}.", data={"outcome": "refused"})
        _Shared.outcomes[result.outcome] += 1
        return ToolResult(text=text_of(result, lost=session_lost), data=facts(result))

    async def _in_session(self, run: Run) -> tuple[Result, bool]:
        if self._session is None:
            self._session = await self._pool().session()
        restarts = self._session.restarts
        result = await self._session.run(run)
        session_lost = self._session.restarts > restarts
        self._fresh = session_lost
        return result, session_lost

    @staticmethod
    def _pool() -> SandboxPool:
        if _Shared.pool is None:
            raise SandboxFailure("no pool of sandboxes is open in this process", code="sandbox_closed")
        return _Shared.pool


class CodeInterpreter(_Interpreter):
    """Runs Python and bash."""

    async def __call__(self, code: str, language: Literal["python", "bash"] = "python") -> ToolResult:
        """Runs a program and returns its output. There is no network; files can be written in the current folder.

        Args:
            code: The program. The value of its last expression is printed, too.
            language: Language of the program.
        """
        return await self._run(code, Language(language))


class PythonInterpreter(_Interpreter):
    """Runs Python: `code_interpreter` as ReTool's conversations and verl's recipe declare it."""

    async def __call__(self, code: str) -> ToolResult:
        """A tool for executing code.

        Args:
            code: The code to execute.
        """
        return await self._run(unfenced(code), Language.PYTHON)


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


def unfenced(code: str) -> str:
    """The code within a Markdown fence that encloses all of it, as verl's recipe reads it; other code as it is."""
    fenced = _FENCED.fullmatch(code)
    return fenced[1] if fenced and "```" not in fenced[1] else code


def text_of(result: Result, *, lost: bool = False) -> str:
    """What the model reads: output, errors, and how the code ended where that was not well."""
    parts = [result.stdout.decode(errors="replace")]
    if result.stdout_truncated:
        parts.append(f"[output cut after {len(result.stdout)} bytes]")
    if result.stderr:
        parts.append("[stderr]\n" + result.stderr.decode(errors="replace"))
    if result.stderr_truncated:
        parts.append(f"[stderr cut after {len(result.stderr)} bytes]")
    if result.message:
        parts.append(f"[{result.message}]")
    if lost:
        parts.append("[The session has ended: variables are lost.]")
    text = "\n".join(part.rstrip("\n") for part in parts if part)
    return text or "[no output]"


def facts(result: Result) -> dict[str, object]:
    """What a reward may know: `ToolCall.data`."""
    return {
        "outcome": result.outcome.value,
        "exit_code": result.exit_code,
        "signal": result.signal,
        "seconds": round(result.seconds, 4),
        "truncated": result.truncated,
        "ok": result.outcome is Outcome.OK,
    }
