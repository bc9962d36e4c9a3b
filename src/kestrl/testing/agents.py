"""Conformance suite of agents by URL: what every `kestrl.agents.runs.Run` must bear, without a model.

A user's test calls `check_run(agent)` with the function that the manifest names in `agent.run`, or with a function that
starts its program. The suite serves episodes over the Chat Completions API and says what it is given to say. It raises
AssertionError with the property that does not hold, or what the agent raised.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kestrl.agents.runs import Run, run_result
from kestrl.testing.episode_server import EpisodeServer, Reply, serving

EPISODES = 3
MOST_AFTER_END = 10
"""Calls that an agent may still make once its calls are refused: clients retry a few times."""
ROW: Mapping[str, Any] = {
    "id": "conformance-1",
    "ordinal": 0,
    "messages": [{"role": "user", "content": "What is 6 * 7?"}],
    "ground_truth": "42",
    "metadata": {},
}


def check_run(
    run: Run,
    *,
    replies: Sequence[Reply] = ("42",),
    row: Mapping[str, Any] = ROW,
    seconds: float = 60.0,
) -> None:
    """Checks an agent.

    Args:
        run: The agent, sync or async.
        replies: What the model says, turn by turn: texts, or messages with `tool_calls`. The last one is repeated.
        row: The scenario.
        seconds: Time limit of an episode.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    with serving(replies) as server:
        outcomes = _episodes(server, run, row, [f"first-{index}" for index in range(EPISODES)], seconds)
        for name, (error, returned) in outcomes.items():
            if error is not None:
                raise AssertionError(f"{name}: the agent raised {error!r}") from error
            run_result("the agent", json.loads(json.dumps(returned)))
        _check_calls(server)
        server.limit = 1
        _episodes(server, run, row, ["limited"], seconds)  # it may raise what its client raises
        limited = server.episodes["limited"]
        if limited.refused > MOST_AFTER_END:
            raise AssertionError(
                f"{limited.refused} calls were made after the first was refused with 400, limit_reached: end the run"
            )
        _check_calls(server)


def _check_calls(server: EpisodeServer) -> None:
    for name, episode in server.episodes.items():
        if episode.problems:
            raise AssertionError(f"{name}: {episode.problems[0]}")
        if not episode.calls:
            raise AssertionError(f"{name}: no call was made to its base URL")


def _episodes(
    server: EpisodeServer, run: Run, row: Mapping[str, Any], names: Sequence[str], seconds: float
) -> dict[str, tuple[BaseException | None, object]]:
    """Runs episodes at once, each in a thread: what each raised and returned."""
    threads = ThreadPoolExecutor(max_workers=len(names))
    try:
        running = {
            name: threads.submit(
                _run, run, row, server.base_url(name), server.episodes[name].key, time.time() + seconds
            )
            for name in names
        }
        outcomes: dict[str, tuple[BaseException | None, object]] = {}
        for name, future in running.items():
            try:
                error = future.exception(seconds)
            except TimeoutError:
                raise AssertionError(f"{name}: the run did not end within {seconds:g} s") from None
            outcomes[name] = (error, None if error is not None else future.result())
        return outcomes
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def _run(run: Run, row: Mapping[str, Any], base_url: str, key: str, deadline: float) -> object:
    returned = run(json.loads(json.dumps(row)), base_url, key, deadline)
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(returned: Any) -> object:
    return await returned
