"""inspect_ai's own conformance checks for sandboxes (`self_check`, 44 of them) against a session of ours.

`make inspect-check` runs it in an environment of its own. The deviations are `EXPECTED`.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
)
from inspect_ai.util._sandbox.self_check import *  # noqa: F403 - that is how its checks are collected

from kestrl_sandbox.backends.zygote import Zygote
from kestrl_sandbox.config import PoolConfig
from kestrl_sandbox.contract import Language, Limits, Outcome, Run, SandboxSession
from kestrl_sandbox.pool.sandbox_pool import SandboxPool

EXPECTED = {
    "test_exec_as_user": "there is one user in a sandbox, and nobody becomes root",
    "test_read_file_is_directory": "files are read below /work, /tmp and /dev/shm only, and it reads /etc",
}
LONGEST = 60.0


class Environment(SandboxEnvironment):
    """A session as inspect_ai's sandbox."""

    def __init__(self, session: SandboxSession) -> None:
        self._session = session

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002 - its name for it
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user not in {None, "sandbox"}:
            raise SandboxUserUnsupportedError(f"there is no user {user}")
        lines = [f"cd {shlex.quote(cwd)} || exit 1"] if cwd else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items()]
        lines.append("exec " + " ".join(map(shlex.quote, cmd)))
        limits = Limits(seconds=timeout or LONGEST, output_bytes=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE)
        stdin = input.encode() if isinstance(input, str) else input or b""
        result = await self._session.run(Run(code="\n".join(lines), language=Language.BASH, stdin=stdin, limits=limits))
        if result.outcome is Outcome.TIMEOUT:
            raise TimeoutError
        stdout, stderr = result.stdout.decode(), result.stderr.decode()
        if result.exit_code == 126:
            raise PermissionError(stderr)
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stdout)
        code = result.exit_code if result.exit_code is not None else 128 + (result.signal or 0)
        return ExecResult(success=code == 0, returncode=code, stdout=stdout, stderr=stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        content = contents.encode() if isinstance(contents, str) else contents
        result = await self._session.run(Run(code="", files={file: content}))
        if result.outcome is Outcome.POLICY_DENIED:
            raise (
                IsADirectoryError(result.message) if "directory" in result.message else PermissionError(result.message)
            )

    async def read_file(self, file: str, text: bool = True) -> Any:
        most = min(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE, 60 << 20)
        result = await self._session.run(Run(code="", fetch=[file], limits=Limits(file_bytes=most)))
        if file in result.files:
            return result.files[file].decode() if text else result.files[file]
        reason = f"{file}: {result.missing[file]}"
        for words, kind in (("No such file", FileNotFoundError), ("Permission denied", PermissionError)):
            if words in reason:
                raise kind(reason)
        if "are read" in reason:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, "")
        raise OSError(reason)

    @classmethod
    async def sample_cleanup(cls, *_arguments: Any) -> None:
        """Has nothing to do: the fixture closes the session."""


@pytest_asyncio.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[Environment]:
    reason = EXPECTED.get(request.node.originalname)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    pool = await SandboxPool.start(Zygote.start, PoolConfig(max_sandboxes=1, disk_mb=256))
    session = await pool.session()
    yield Environment(session)
    await session.close()
    await pool.close()
