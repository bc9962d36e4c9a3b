"""`python -m kestrl_rollout.plays`: plays rows in an environment that runs its episodes itself, with turns that no
model has made.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kestrl._shared.checking import ANSWER_FORMS, ATTEMPT, NOTHING, SOLUTION, TRYING, RunsCheck, run_check
from kestrl.agents.runs import row_of
from kestrl.data.rows import DataRow, read_rows
from kestrl.episode import ENVIRONMENT_REWARD, ENVIRONMENT_WEIGHTS
from kestrl.errors import UserCodeError
from kestrl.testing.episode_server import EpisodeServer, serving
from kestrl.tools.shapes import is_mapping
from kestrl_rollout.hosts.host import Host, RunEnded, RunRequest
from kestrl_rollout.hosts.opening import opened_environment_host

Play = dict[str, Any]


def check(settings: RunsCheck) -> dict[str, Any]:
    """The plays of the first rows.

    Raises:
        UserInputError: The environment cannot be loaded.
    """
    sys.path[:0] = settings.python_path
    rows = read_rows(Path(settings.data.path), size=settings.data.size, promptless=settings.data.promptless)
    return asyncio.run(_check(settings, rows[: settings.rows]))


async def _check(settings: RunsCheck, rows: Sequence[DataRow]) -> dict[str, Any]:
    with serving([""]) as server:
        async with opened_environment_host(settings.environment, settings.python_path) as host:
            stage = _Stage(host, server, settings)
            form = await stage.form(rows)
            return {
                "rows": await asyncio.gather(*(stage.row(row, form) for row in rows)),
                "unpaid": form is None and any(_answer(row) is not None for row in rows),
            }


class _Stage:
    """Plays of an environment."""

    def __init__(self, host: Host, server: EpisodeServer, settings: RunsCheck) -> None:
        self._host, self._server, self._settings = host, server, settings
        self._places = asyncio.Semaphore(settings.environment.sessions)
        self._number = 0

    async def form(self, rows: Sequence[DataRow]) -> str | None:
        """The form in which the answer of a row earns most; None if none earns more than doing nothing."""
        for row in rows:
            answer = _answer(row)
            if answer is None:
                continue
            turns = ["", *(form.format(answer) for form in ANSWER_FORMS)]
            nothing, *plays = await asyncio.gather(*(self._play(row, turn) for turn in turns))
            earned = dict(zip(ANSWER_FORMS, map(self._total, plays), strict=True))
            best = max(earned, key=lambda form: earned[form])
            if earned[best] > self._total(nothing):
                return best
        return None

    def _total(self, play: Play) -> float:
        """What a play earns by the weights of the environment."""
        if "failure" in play:
            return -math.inf
        parts = play["environments"][self._settings.environment.name]
        rewards, weights = parts[ENVIRONMENT_REWARD], parts[ENVIRONMENT_WEIGHTS]
        return math.fsum(rewards[name] * weights[name] for name in rewards)

    async def row(self, row: DataRow, form: str | None) -> dict[str, Any]:
        """All plays of a row: each twice, and one more beside another episode of the row."""
        answer = _answer(row)
        turns = {NOTHING: "", TRYING: ATTEMPT}
        if form is not None and answer is not None:
            turns[SOLUTION] = form.format(answer)
        plays = {name: [await self._play(row, turn) for _ in range(2)] for name, turn in turns.items()}
        beside, _ = await asyncio.gather(self._play(row, ""), self._play(row, turns.get(SOLUTION, ATTEMPT)))
        return {
            "ordinal": row.scenario.ordinal,
            "place": row.place,
            "plays": plays,
            "prompt": "",
            "solution": None if answer is None else [answer],
            "apart": "failure" in plays[NOTHING][0] or beside == plays[NOTHING][0],
            "answers": False,
        }

    async def _play(self, row: DataRow, turn: str) -> Play:
        """An episode in which every turn of the model is the given one."""
        self._number += 1
        name, seconds = f"play-{self._number}", self._settings.seconds
        episode = self._server.episodes[name]
        episode.replies = [turn]
        try:
            async with self._places, asyncio.timeout(seconds):
                request = RunRequest(
                    row=row_of(row.scenario),
                    base_url=self._server.base_url(name),
                    key=episode.key,
                    mcp_url="",
                    deadline=time.time() + seconds,
                    config={},
                )
                returned = await self._host.run(request)
        except TimeoutError:
            return {"failure": f"did not end within {seconds:g} s"}
        except (RunEnded, UserCodeError) as error:
            return {"failure": str(error)}
        info = returned.info
        if "failed" in info:
            return {"failure": f"{info['failed']}: {info.get('message', '')}"}
        if not episode.requests:
            return {"failure": "it ended without a call of the model"}
        parts = {ENVIRONMENT_REWARD: info["rewards"], ENVIRONMENT_WEIGHTS: info["weights"]}
        return {
            "prompt": json.dumps(episode.requests[0], ensure_ascii=False),
            "turns": [turn],
            "environments": {self._settings.environment.name: parts},
        }


def _answer(row: DataRow) -> str | None:
    """The answer of a task, where its data have one by this name."""
    task: object = row.scenario.metadata.get("task")
    answer: object = task.get("answer") if is_mapping(task) else None
    usable = isinstance(answer, str | int | float) and not isinstance(answer, bool)
    return str(answer) if usable else None


if __name__ == "__main__":
    run_check(RunsCheck, check)
