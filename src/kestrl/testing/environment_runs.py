"""Conformance suite of adapters of environments that run their episodes themselves, without a model:
`asyncio.run(check_environment_runs(open_adapter, row={...}, replies=["lamp"]))`.

It serves episodes over the Chat Completions API, kills the adapter's process amid one, and raises AssertionError with
the property that does not hold.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

from kestrl.testing.episode_server import EpisodeServer, Reply, serving
from kestrl.tools.shapes import is_mapping

EPISODES = 3
POLL_SECONDS = 0.05
END_SECONDS = 10.0
"""Time limit for the end of what a killed process had started."""
LINES = ("pid=", "ppid=", "stat=", "lstart=")
Process = tuple[int, str]
"""Number and start of a process, which no later one shares."""


class RunningAdapter(Protocol):
    """An adapter whose process is running."""

    @property
    def pid(self) -> int:
        """The process that runs the episodes; it is killed and has to be replaced."""
        ...

    async def run(self, row: Mapping[str, Any], base_url: str, key: str, deadline: float) -> Mapping[str, Any]:
        """Runs an episode.

        Args:
            row: The row.
            base_url: Base URL of the episode for a client of OpenAI's API; ends with `/v1`.
            key: API key of this episode alone.
            deadline: Unix seconds at which the episode ends.

        Returns:
            `rewards`, the parts of the reward by name, and optionally `metrics`.

        Raises:
            Exception: The episode failed.
        """
        ...


class _Suite:
    """The episodes of one adapter."""

    def __init__(self, adapter: RunningAdapter, server: EpisodeServer, row: Mapping[str, Any], seconds: float) -> None:
        self._adapter, self._server, self._row, self._seconds = adapter, server, row, seconds

    async def run(self, name: str, replies: Sequence[Reply] = ()) -> dict[str, Any]:
        """The outcome of an episode that has to succeed."""
        try:
            outcome = await self._run(name, replies)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{name}: the episode failed: {type(error).__name__}: {error}") from error
        self._check_calls(name)
        return _outcome(name, outcome)

    async def _run(self, name: str, replies: Sequence[Reply] = ()) -> Mapping[str, Any]:
        episode = self._server.episodes[name]
        episode.replies = replies
        row = json.loads(json.dumps(self._row))
        try:
            async with asyncio.timeout(self._seconds):
                return await self._adapter.run(
                    row, self._server.base_url(name), episode.key, time.time() + self._seconds
                )
        except TimeoutError:
            raise AssertionError(f"{name}: the run did not end within {self._seconds:g} s") from None

    def _check_calls(self, name: str) -> None:
        episode = self._server.episodes[name]
        assert not episode.problems, f"{name}: {episode.problems[0]}"
        assert episode.calls, f"{name}: no call was made to its base URL"

    async def check_twice(self) -> dict[str, Any]:
        """The same row with the same replies is the same episode; its outcome."""
        first, second = await self.run("first"), await self.run("second")
        requests = [self._server.episodes[name].requests for name in ("first", "second")]
        assert requests[0] == requests[1], "the same row with the same replies asks something else the second time"
        assert first["rewards"] == second["rewards"], "the same row and replies earn another reward the second time"
        return first

    async def check_at_once(self, alone: Mapping[str, Any], other: Sequence[Reply]) -> None:
        """Episodes at the same time have their own key and their own reward."""
        other_alone = await self.run("other-alone", other)
        names = [f"at-once-{number}" for number in range(EPISODES)]
        *outcomes, beside = await asyncio.gather(*map(self.run, names), self.run("other", other))
        for name, outcome in zip(names, outcomes, strict=True):
            assert outcome["rewards"] == alone["rewards"], f"{name}: earns another reward beside other episodes"
        assert beside["rewards"] == other_alone["rewards"], "other: earns another reward beside other episodes"

    async def check_killed(self, alone: Mapping[str, Any]) -> None:
        """A kill of the process is one failure, ends what it had started, and the next episode is played."""
        episode = self._server.episodes["killed"]
        episode.gate.clear()
        running = asyncio.create_task(self._run("killed"))
        try:
            await self._called("killed", running)
            pid = self._adapter.pid
            processes = await asyncio.to_thread(_descendants, pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait([running])
        finally:
            running.cancel()
            episode.gate.set()
        failure = running.exception()
        if isinstance(failure, AssertionError):
            raise failure
        assert isinstance(failure, Exception), "killed: its process was killed, and it did not fail"
        await _gone(processes)
        calls = episode.calls
        again = await self.run("after-the-kill")
        assert again["rewards"] == alone["rewards"], "after-the-kill: earns another reward than before"
        assert episode.calls == calls, "killed: calls were made after it had failed"

    async def _called(self, name: str, running: asyncio.Task[Any]) -> None:
        """Waits for the first call of an episode."""
        called = asyncio.create_task(asyncio.to_thread(self._server.episodes[name].called.wait, self._seconds))
        await asyncio.wait({called, running}, return_when=asyncio.FIRST_COMPLETED)
        self._server.episodes[name].called.set()  # so that the thread ends
        await called
        assert self._server.episodes[name].calls, f"{name}: no call was made to its base URL"


async def check_environment_runs(
    opened: Callable[[], AbstractAsyncContextManager[RunningAdapter]],
    *,
    row: Mapping[str, Any],
    replies: Sequence[Reply],
    other: Sequence[Reply] = ("",),
    left: Callable[[], Collection[object]] = tuple,
    seconds: float = 60.0,
) -> None:
    """Checks an adapter.

    Args:
        opened: The running adapter, while the context is open.
        row: The row that is played, with JSON values.
        replies: What the model says, turn by turn: texts, or messages with `tool_calls`. The last one is repeated.
        other: What it says in an episode beside others; one that earns another reward shows more.
        left: What an adapter leaves while it is closed, such as work folders.
        seconds: Time limit of an episode.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    before = set(left())
    with serving(replies) as server:
        async with opened() as adapter:
            suite = _Suite(adapter, server, row, seconds)
            alone = await suite.check_twice()
            await suite.check_at_once(alone, other)
            calls = {name: episode.calls for name, episode in server.episodes.items()}
            await suite.check_killed(alone)
            late = [name for name, number in calls.items() if server.episodes[name].calls != number]
            assert not late, f"{late[0]}: calls were made after its reward had arrived"
            processes = await asyncio.to_thread(_descendants, adapter.pid)
        await _gone(processes)
    leaks = sorted(map(str, set(left()) - before))
    assert not leaks, f"it has left {', '.join(leaks[:3])}"


def _outcome(name: str, returned: Mapping[str, Any]) -> dict[str, Any]:
    """What an episode returned, if its reward is one."""
    rewards: object = returned.get("rewards")
    assert is_mapping(rewards), f"{name}: it returned no rewards by name"
    assert rewards, f"{name}: it has no reward, which is a failure and not 0"
    for part, number in rewards.items():
        finite = isinstance(number, int | float) and math.isfinite(number)
        assert finite, f"{name}: the reward {part} is {number!r}, which is a failure and no number"
    return dict(returned)


def _descendants(pid: int) -> set[Process]:
    """A process and all that it has started."""
    started, children = dict[int, str](), dict[int, list[int]]()
    for number, parent, start in _processes():
        started[number] = start
        children.setdefault(parent, []).append(number)
    reached, waiting = set[Process](), [pid]
    while waiting:
        number = waiting.pop()
        if number in started:
            reached.add((number, started[number]))
            waiting += children.get(number, ())
    return reached


def _processes() -> list[tuple[int, int, str]]:
    """Number, parent and start of each process that has not ended."""
    command = ["ps", "-e", *(part for name in LINES for part in ("-o", name))]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - fixed
    lines = (line.split(maxsplit=3) for line in listing.stdout.splitlines())
    return [(int(number), int(parent), start) for number, parent, state, start in lines if not state.startswith("Z")]


async def _gone(processes: set[Process]) -> None:
    """Waits for the end of processes."""
    deadline = time.monotonic() + END_SECONDS
    while alive := processes & {(number, start) for number, _, start in await asyncio.to_thread(_processes)}:
        assert time.monotonic() < deadline, f"the process was ended, and {len(alive)} that it had started run on"
        await asyncio.sleep(POLL_SECONDS)
