"""An episode that is served: its key, its calls in flight, and the answers that a retry gets again."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any

from kestrl_rollout.gateway.dialogue import Dialogue
from kestrl_rollout.gateway.response_store import ResponseStore
from kestrl_rollout.gateway.sampler import Sampler

ANSWER_BYTES = 2 * 1024 * 1024
"""Bytes of an episode's answers that are kept for retries, beside the newest."""
MAX_CALLS = 64
"""Calls of an episode in flight; a client that makes more is asked to wait."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key")


def digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def sent_keys(headers: Mapping[str, str]) -> list[str]:
    """The keys that a request holds, in any of the forms that clients use."""
    bearer = headers.get("authorization", "")
    keys = [bearer[7:]] if bearer[:7].lower() == "bearer " else []
    return [*keys, *(headers[name] for name in KEY_HEADERS if name in headers)]


def is_key(key: bytes, headers: Mapping[str, str]) -> bool:
    """Whether every key of a request is the one with this digest, and there is one."""
    keys = sent_keys(headers)
    return bool(keys) and all(hmac.compare_digest(digest(candidate), key) for candidate in keys)


@dataclass(eq=False, slots=True)
class Opened:
    """An episode while it is served."""

    sampler: Sampler
    dialogue: Dialogue
    responses: ResponseStore
    key: bytes
    """Digest of its key."""
    context: Context
    """The loop's, so that spans of calls belong to the episode."""
    running: dict[bytes, _Running] = field(default_factory=dict[bytes, "_Running"])
    """The newest call in flight by the digest of its body."""
    tasks: set[asyncio.Task[bytes]] = field(default_factory=set["asyncio.Task[bytes]"])
    _answers: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict[bytes, bytes])
    _answer_bytes: int = 0

    async def answer(self, body: bytes, *, retry: bool, work: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """The answer to a call: for a retry that of the call before, or else a new one.

        A retry of a call in flight waits for it. A call that no client waits for any more is cancelled.

        Args:
            body: The request's body.
            retry: Whether the client has sent it before.
            work: Samples the answer.
        """
        key = hashlib.sha256(body).digest()
        if retry and key in self._answers:
            return self._answers[key]
        running = self.running.get(key) if retry else None
        if running is None:
            task = asyncio.get_running_loop().create_task(work(), context=self.context.copy())
            running = self.running[key] = _Running(task)
            self.tasks.add(task)
            task.add_done_callback(lambda task: self._done(key, task))
        running.clients += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.clients -= 1
            if not running.clients:
                running.task.cancel()  # no effect on one that is done

    async def complete(self, work: Coroutine[Any, Any, bytes]) -> bytes:
        """Does work to its end, also where its client goes away: what a tool has done cannot be taken back."""
        task = asyncio.get_running_loop().create_task(work, context=self.context.copy())
        self.tasks.add(task)
        task.add_done_callback(self._completed)
        return await asyncio.shield(task)

    def _completed(self, task: asyncio.Task[bytes]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved also where no client waits for it

    def _done(self, key: bytes, task: asyncio.Task[bytes]) -> None:
        self.tasks.discard(task)
        running = self.running.get(key)
        if running is not None and running.task is task:
            del self.running[key]
        if not task.cancelled() and task.exception() is None:
            self._keep(key, task.result())

    def _keep(self, key: bytes, answer: bytes) -> None:
        self._answer_bytes += len(answer) - len(self._answers.pop(key, b""))
        self._answers[key] = answer
        while len(self._answers) > 1 and self._answer_bytes > ANSWER_BYTES:
            self._answer_bytes -= len(self._answers.popitem(last=False)[1])

    async def close(self) -> None:
        """Ends the calls in flight."""
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass(eq=False, slots=True)
class _Running:
    """A call in flight."""

    task: asyncio.Task[bytes]
    clients: int = 0
