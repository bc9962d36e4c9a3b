"""Episodes of a task set of verifiers: its environment server and a client of it, in one process.

Runs in the interpreter of the environment, loaded by `host_program`, with the standard library and verifiers alone. The
server listens on a socket file that only this user can open. Requests of an episode go to its URL unchanged (verifiers'
`eval` client), so that the worker renders, samples and records, in whatever dialect the harness speaks; a server that
tokenises itself would render a second time.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

LONGEST_PATH = 80
"""Characters of the folder of a socket, of whose path the system takes 107."""
SHORT_FOLDER = "/tmp"  # noqa: S108 - for a folder of a name that nobody can guess
POLL_SECONDS = 0.1
SERVER_ENDED = 70
"""Exit status if the server ends by itself."""
MAX_TEXT = 500
MOST_REMOVED = 64
"""Work folders of ended hosts that are removed at a time, so that a start waits for no more."""
LOCK = "lock"


def work_root() -> Path:
    """Where hosts have their work folders."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without a name, in a container
        home = Path(tempfile.gettempdir())
    return home / ".cache" / "kestrl" / "verifiers"


def remove_unused(root: Path) -> None:
    """Removes work folders of hosts that have ended: a host is killed, so that it leaves its own."""
    if root.is_dir():
        with _locked(root):
            _remove_unlocked(root)


def work_folder(root: Path) -> tuple[Path, int]:
    """A new work folder, and the descriptor of its lock, which ends with this process. Those of ended hosts are
    removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root):  # nobody finds the folder before it is locked itself
        _remove_unlocked(root)
        folder = Path(tempfile.mkdtemp(prefix="host-", dir=root))
        return folder, _lock(folder, fcntl.LOCK_EX)


def _remove_unlocked(root: Path) -> None:
    for folder in itertools.islice(root.glob("host-*"), MOST_REMOVED):
        with suppress(OSError):  # it is in use, or of another user
            lock = _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path, operation: int) -> int:
    """Locks a folder by a file in it, which works over NFS too; the descriptor. Raises OSError."""
    descriptor = os.open(folder / LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _locked(root: Path) -> Generator[None]:
    descriptor = _lock(root, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)


def digest(task: Any) -> str:
    """SHA-256 of a task, as `kestrl data verifiers` writes it."""
    return hashlib.sha256(json.dumps(task, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def row_problem(columns: Mapping[str, Any]) -> tuple[str, str] | None:
    """Code and message of what is wrong with the columns of a row, if anything is."""
    task, expected = columns.get("task"), columns.get("digest")
    if not isinstance(task, Mapping):
        return "row_invalid", "the row has no column `task`; write it with kestrl data verifiers"
    if expected is not None and expected != digest(cast(object, task)):
        return "row_changed", "the task is another one than when the row was written: its digest differs"
    return None


class VerifiersHost:
    """The environment server of one environment, and its episodes."""

    def __init__(self, environment: dict[str, Any], sessions: int) -> None:
        """Describes it.

        Args:
            environment: Configuration of verifiers' environment.
            sessions: Episodes that it plays at the same time.
        """
        self._environment, self._sessions = environment, sessions
        self._keys = itertools.count()
        self._client: Any = None
        self._lock = -1
        self._server: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Loads the environment and starts its server."""
        serve: Any = import_module("verifiers.v1.serve")
        loaders: Any = import_module("verifiers.v1.utils.loaders")
        # Programs of episodes work below verifiers' cache, from where nobody would remove what a kill leaves.
        runtime: Any = import_module("verifiers.v1.runtimes.subprocess")
        runtime.CACHE_DIR, self._lock = work_folder(work_root())
        config = loaders.resolve_env_config(self._environment)
        long = len(tempfile.gettempdir()) > LONGEST_PATH
        folder = tempfile.mkdtemp(prefix="kestrl-vf-", dir=SHORT_FOLDER if long else None)  # only this user can open it
        server = serve.EnvServer(config=config, address=f"ipc://{folder}/server", max_concurrent=self._sessions)
        self._client = serve.EnvClient(server.address)
        self._server = asyncio.get_running_loop().create_task(_serving(server))
        while not await self._client.health(timeout=POLL_SECONDS):
            if self._server.done():
                await self._server
                raise RuntimeError("the environment server ended")
        shutil.rmtree(folder)  # both ends have opened it
        self._server.add_done_callback(_ended)

    async def run(self, row: dict[str, Any], base_url: str, key: str, deadline: float) -> dict[str, Any]:
        """Runs an episode; what it earned, or why it failed."""
        del deadline  # the worker cancels
        verifiers: Any = import_module("verifiers.v1")
        columns = row["metadata"]
        if (problem := row_problem(columns)) is not None:
            return _failed(*problem)
        # verifiers reads keys from variables alone, and keeps those with this part in their name from its harnesses.
        variable = f"KESTRL_API_KEY_{next(self._keys)}"
        os.environ[variable] = key
        client = verifiers.EvalClientConfig(base_url=base_url, api_key_var=variable)
        try:
            episode = await self._client.run(client, "policy", verifiers.SamplingConfig(), columns["task"])
        except RuntimeError as error:  # the server's answer to a request that it could not run
            return _failed("raised", str(error))
        finally:
            del os.environ[variable]
        return result(episode)


async def _serving(server: Any) -> None:
    try:
        await server.run()
    except SystemExit as error:  # such as of a runtime that wants an account; it would end the process without a word
        raise RuntimeError(str(error)) from error


def _ended(server: asyncio.Task[None]) -> None:
    """Ends the process with its server: no episode would ever be answered."""
    if not server.cancelled():
        print(f"the environment server ended: {server.exception()}", file=sys.stderr, flush=True)  # noqa: T201
        os._exit(SERVER_ENDED)


def result(episode: Any) -> dict[str, Any]:
    """What an episode of verifiers is to the worker: parts of its reward, metrics, and what it recorded; or a
    failure.
    """
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    reason = "; ".join(f"{error.type}: {error.message}" for error in errors[-2:])
    if len(episode.traces) > 1:
        names = ", ".join(trace.agent.name for trace in episode.traces)
        return _failed("several_agents", f"{names} have played, and one policy with one reward is trained")
    if not episode.ok or not episode.traces or not episode.traces[0].ok:
        return _failed("not_ok", reason or "the episode is not ok, and verifiers says no reason")
    (trace,) = episode.traces
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        return _failed("not_scored", f"it has no reward: {', '.join(unscored) or 'the task declares none'}")
    parts = {name: (float(reward.score), float(reward.weight)) for name, reward in trace.rewards.items()}
    infinite = [name for name, part in parts.items() if not all(map(math.isfinite, part))]
    if infinite:
        return _failed("reward_invalid", f"{', '.join(infinite)}: a score or a weight is no finite number")
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return {
        "metrics": metrics,
        "info": {
            "rewards": {name: score for name, (score, _) in parts.items()},
            "weights": {name: weight for name, (_, weight) in parts.items()},
            "sampled": [
                _recorded(trace.nodes[call.node].message, call) for call in trace.calls if call.node is not None
            ],
            "stop": trace.stop_condition or "",
        },
    }


def _recorded(message: Any, call: Any) -> dict[str, Any]:
    """A turn of the model as verifiers has recorded it."""
    return {
        "content": message.content or "",
        "calls": [called.name for called in message.tool_calls or ()],
        "tokens": None if call.usage is None else call.usage.completion_tokens,
    }


def _failed(code: str, message: str) -> dict[str, Any]:
    return {"info": {"failed": code, "message": message[:MAX_TEXT]}}
