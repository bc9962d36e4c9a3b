"""`python -m kestrl_tools.check.plays`: plays episodes of rows without a model, and reports what they have shown."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kestrl._shared.checking import ATTEMPT, NOTHING, SOLUTION, TRYING, PlaysCheck, run_check
from kestrl.data.rows import DataRow, read_rows
from kestrl.episode import ACT
from kestrl.errors import KestrlError, UserInputError, described
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.provider import Kwargs, ProviderSession
from kestrl.tools.shapes import is_list, is_mapping
from kestrl_tools.catalogue import JobTool, providers_of
from kestrl_tools.environments.provider import EnvironmentProvider, EnvironmentSession
from kestrl_tools.lifecycle import loaded, start_all
from kestrl_tools.rows import given, row_kwargs
from kestrl_tools.sessions import Opening, Sessions
from kestrl_tools.tool_threads import ToolThreads

LIFETIME_SECONDS = 600.0
Play = dict[str, Any]


def check(settings: PlaysCheck) -> dict[str, Any]:
    """The plays of the first rows.

    Raises:
        UserInputError: Tools cannot be loaded or started.
    """
    sys.path[:0] = settings.tools.python_path
    rows = read_rows(Path(settings.data.path), size=settings.data.size, promptless=settings.data.promptless)
    return asyncio.run(_check(settings, rows[: settings.rows]))


async def _check(settings: PlaysCheck, rows: Sequence[DataRow]) -> dict[str, Any]:
    threads = ToolThreads()
    folder = next(iter(settings.tools.python_path), None)
    async with loaded(settings.tools.tools, threads, folder=folder) as tools:
        await start_all(tools)
        environment = next(
            (provider for provider in providers_of(tools) if isinstance(provider, EnvironmentProvider)), None
        )
        if environment is not None:
            stage = _Environment(environment, tools, settings.tools.call_seconds)
            return {"rows": [await stage.row(row) for row in rows]}
        sessions = Sessions(
            tools,
            threads,
            call_seconds=settings.tools.call_seconds,
            max_sessions=len(rows) or 1,
            files=settings.tools.files,
        )
        return {"rows": [await _of_tools(tools, sessions, row) for row in rows]}


async def _of_tools(tools: Mapping[str, JobTool], sessions: Sessions, row: DataRow) -> dict[str, Any]:
    """The plays of a job without an environment: tools are not called, and answers are the judge's to make."""
    plays: dict[str, list[Play]] = {NOTHING: [], TRYING: []}
    stateful = any(tool.provider.has_state for tool in tools.values())
    for name, turns in ((NOTHING, [""]), (TRYING, [ATTEMPT])):
        for _ in range(2):
            opening = Opening(
                episode_id=row.place, tools=(), kwargs=row_kwargs(tools, row.scenario), lifetime=LIFETIME_SECONDS
            )
            try:
                prompt = await sessions.prompt(row.place, opening) if stateful else ""
                state = await sessions.state(row.place) if stateful else {}
                plays[name].append({"prompt": prompt, "turns": turns, "environments": state})
            except KestrlError as error:
                plays[name].append({"failure": str(error)})
            finally:
                await sessions.close(row.place)
    return {
        "ordinal": row.scenario.ordinal,
        "place": row.place,
        "plays": plays,
        "solution": None,
        "apart": True,
        "answers": True,
    }


class _Environment:
    """Plays of a job's environment."""

    def __init__(self, provider: EnvironmentProvider, tools: Mapping[str, JobTool], seconds: float) -> None:
        self._provider, self._tools, self._seconds = provider, tools, seconds

    async def row(self, row: DataRow) -> dict[str, Any]:
        """All plays of a row: each twice, and once more while another episode of the row is played."""
        kwargs = given(row_kwargs(self._tools, row.scenario), self._provider.name, "create_kwargs")
        attempt: list[Any] = [ATTEMPT] if self._provider.acts else []
        plays: dict[str, list[Play]] = {
            NOTHING: [await self._play(kwargs, []) for _ in range(2)],
            TRYING: [await self._play(kwargs, attempt) for _ in range(2)],
        }
        solution = await self._solution(kwargs) or self._expected(row)
        if solution is not None:
            plays[SOLUTION] = [await self._play(kwargs, solution) for _ in range(2)]
        apart = await self._apart(kwargs, plays[NOTHING][0], solution if solution is not None else attempt)
        return {
            "ordinal": row.scenario.ordinal,
            "place": row.place,
            "plays": plays,
            "prompt": "\n".join(message["content"] for message in row.scenario.messages),
            "solution": solution,
            "apart": apart,
            "answers": False,
        }

    async def _solution(self, kwargs: Kwargs) -> list[Any] | None:
        """The turns of a perfect player; None where the environment does not say, or cannot begin."""
        try:
            async with asyncio.timeout(self._seconds):
                session = await self._provider.open(kwargs)
                try:
                    gold = await cast("EnvironmentSession", session).gold()
                finally:
                    await session.close()
        except (KestrlError, ToolError, TimeoutError):
            return None  # the plays of the row report it
        return gold if gold is None or is_list(gold) else [gold]

    def _expected(self, row: DataRow) -> list[Any] | None:
        """The ground truth of a row as a turn, where the environment takes turns and names no solution."""
        ground_truth = row.scenario.ground_truth
        usable = isinstance(ground_truth, str | int | float) and not isinstance(ground_truth, bool)
        return [str(ground_truth)] if usable and self._provider.acts else None

    async def _apart(self, kwargs: Kwargs, undisturbed: Play, turns: Sequence[Any]) -> bool:
        """Whether an episode without a turn ends as it does alone while another one of the row is played."""
        if "failure" in undisturbed:
            return True
        try:
            async with asyncio.timeout(4 * self._seconds):
                quiet = await self._provider.open(kwargs)
                try:
                    await self._play(kwargs, turns)
                    return bool({self._provider.name: await quiet.state()} == undisturbed["environments"])
                finally:
                    await quiet.close()
        except (KestrlError, ToolError, TimeoutError):
            return True  # the plays of the row report it

    async def _play(self, kwargs: Kwargs, turns: Sequence[Any]) -> Play:
        try:
            async with asyncio.timeout(self._seconds * (2 + len(turns))):
                session = await self._provider.open(kwargs)
                try:
                    await _take(session, turns)
                    state = {self._provider.name: await session.state()}
                    texts = [turn if isinstance(turn, str) else "" for turn in turns]
                    return {"prompt": session.prompt, "turns": texts or [""], "environments": state}
                finally:
                    await session.close()
        except TimeoutError:
            return {"failure": "did not end within the deadline of its calls"}
        except (KestrlError, ToolError) as error:
            return {"failure": described(error)}


async def _take(session: ProviderSession, turns: Sequence[Any]) -> None:
    """Plays turns until the environment ends the episode; what it answers is not needed.

    Raises:
        UserInputError: A turn of `gold()` is neither text nor a call.
    """
    for turn in turns:
        name, arguments = (ACT, {"text": turn}) if isinstance(turn, str) else _call(turn)
        try:
            answer = await session.call(name, arguments, {})
        except ToolError:
            continue
        if isinstance(answer, ToolResult) and answer.final:
            return


def _call(turn: object) -> tuple[str, dict[str, Any]]:
    if is_mapping(turn) and isinstance(turn.get("name"), str) and is_mapping(turn.get("arguments")):
        return turn["name"], dict(turn["arguments"])
    raise UserInputError("gold() returns texts, or calls as {name, arguments}")


if __name__ == "__main__":
    run_check(PlaysCheck, check)
