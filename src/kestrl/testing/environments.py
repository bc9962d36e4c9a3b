"""Conformance suite of adapters of environments, for a user's test:
`asyncio.run(check_environment(lambda: MyAdapter(...), rows=[{"word": "lamp"}], turns=["chair", "lamp"]))`.

It plays each row several times, with the given turns and with those of `gold()`, and raises `AssertionError` with the
property that does not hold.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kestrl.episode import ACT, ENVIRONMENT_REWARD
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.shapes import is_list, is_mapping

SECONDS = 60.0
"""Time limit of each call."""
Turn = str | Mapping[str, Any]
"""A turn of the model: text for `act`, or a call as `{"name": ..., "arguments": {...}}`."""


@dataclass(frozen=True, slots=True)
class _Played:
    """What a play has shown."""

    prompt: str
    shown: tuple[str, ...]
    rewards: Mapping[str, float]

    @property
    def total(self) -> float:
        return math.fsum(self.rewards.values())


async def check_environment(
    make: Callable[[], Any],
    *,
    rows: Sequence[Mapping[str, Any]],
    turns: Sequence[Turn] = (),
    wrong: Turn | None = None,
) -> None:
    """Checks an adapter.

    Args:
        make: Makes an instance, one for every episode.
        rows: Columns of rows, with which `reset` is called; at least one.
        turns: Turns that every row can be played with.
        wrong: A turn that is no valid action, if there is one.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    assert rows, "give at least one row"
    _check_class(make())
    for row in rows:
        plays = [await _play(make(), row, turns) for _ in range(2)]
        assert plays[0].prompt == plays[1].prompt, f"reset() shows something else the second time, for the row {row}"
        assert plays[0].shown == plays[1].shown, f"the same turns are answered differently the second time, for {row}"
        assert plays[0].rewards == plays[1].rewards, f"the same turns earn another reward the second time, for {row}"
        nothing = await _play(make(), row, ())
        await _check_apart(make, row, turns, nothing)
        await _check_gold(make, row, nothing)
        if wrong is not None:
            await _check_wrong(make(), row, wrong)


def _check_class(adapter: Any) -> None:
    assert callable(getattr(adapter, ENVIRONMENT_REWARD, None)), f"it has no {ENVIRONMENT_REWARD}()"
    hooks = {"reset", "state", ENVIRONMENT_REWARD, "close", "gold", "start_service", "stop_service"}
    public = [name for name, _ in inspect.getmembers(cast("object", type(adapter)), callable) if name[0] != "_"]
    assert set(public) - hooks, f"it has neither {ACT}(text) nor tools (public methods): nothing can be played"


async def _check_apart(make: Callable[[], Any], row: Mapping[str, Any], turns: Sequence[Turn], alone: _Played) -> None:
    """Another episode of the row, played at the same time, changes nothing."""
    quiet = make()
    await _begun(quiet, row)
    await _play(make(), row, turns)
    assert await _rewards(quiet) == alone.rewards, f"an episode is changed by another one beside it, for the row {row}"
    await _called(quiet, "close", {}, required=False)


async def _check_gold(make: Callable[[], Any], row: Mapping[str, Any], nothing: _Played) -> None:
    """The adapter's own solution earns more than doing nothing, and is not shown."""
    adapter = make()
    prompt = await _begun(adapter, row)
    gold = await _called(adapter, "gold", {}, required=False)
    await _called(adapter, "close", {}, required=False)
    if gold is None:
        return
    solution = gold if is_list(gold) else [gold]
    leaked = [text for text in solution if isinstance(text, str) and len(text) > 2 and text in prompt]
    assert not leaked, f"the solution stands in what reset() shows, for the row {row}"
    earned = await _play(make(), row, solution)
    assert earned.total > nothing.total, (
        f"the solution earns {earned.total:g} and doing nothing {nothing.total:g}, for the row {row}"
    )


async def _check_wrong(adapter: Any, row: Mapping[str, Any], wrong: Turn) -> None:
    """A wrong action is answered, and the episode goes on."""
    await _begun(adapter, row)
    try:
        answer = await _taken(adapter, wrong)
    except ToolError:
        answer = ""
    assert not (isinstance(answer, ToolResult) and answer.final), f"a wrong action ends the episode, for the row {row}"
    await _rewards(adapter)
    await _called(adapter, "close", {}, required=False)


async def _play(adapter: Any, row: Mapping[str, Any], turns: Sequence[Turn]) -> _Played:
    prompt, observations = await _begun(adapter, row), list[str]()
    for turn in turns:
        try:
            answer = await _taken(adapter, turn)
        except ToolError as error:
            observations.append(str(error))
            continue
        observations.append(answer.text if isinstance(answer, ToolResult) else str(answer))
        if isinstance(answer, ToolResult) and answer.final:
            break
    rewards = await _rewards(adapter)
    await _called(adapter, "close", {}, required=False)
    return _Played(prompt, tuple(observations), rewards)


async def _taken(adapter: Any, turn: Turn) -> Any:
    if isinstance(turn, str):
        return await _called(adapter, ACT, {"text": turn})
    return await _called(adapter, str(turn["name"]), dict(turn["arguments"]))


async def _begun(adapter: Any, row: Mapping[str, Any]) -> str:
    opening = await _called(adapter, "reset", dict(row), required=False)
    assert opening is None or isinstance(opening, str), f"reset() returned a {type(opening).__name__}, not text or None"
    return opening or ""


async def _rewards(adapter: Any) -> dict[str, float]:
    """The parts of the reward; one without a name where it is a number."""
    returned = await _called(adapter, ENVIRONMENT_REWARD, {})
    parts: Mapping[Any, Any] = returned if is_mapping(returned) else {"": returned}
    for name, value in parts.items():
        number = isinstance(value, int | float) and math.isfinite(value)
        assert isinstance(name, str), f"{ENVIRONMENT_REWARD}() names a part by a {type(name).__name__}"
        assert number, (
            f"{ENVIRONMENT_REWARD}() returned {value!r}: return a finite number, or one for each part by name"
        )
    return {str(name): float(value) for name, value in parts.items()}


async def _called(adapter: Any, name: str, arguments: dict[str, Any], *, required: bool = True) -> Any:
    method = getattr(adapter, name, None)
    if method is None and not required:
        return None
    assert method is not None, f"it has no {name}()"
    try:
        async with asyncio.timeout(SECONDS):
            returned = method(**arguments)
            return await returned if inspect.isawaitable(returned) else returned
    except TimeoutError:
        raise AssertionError(f"{name}() took longer than {SECONDS:g} s") from None
    except (ToolError, AssertionError):
        raise
    except Exception as error:
        raise AssertionError(f"{name}() raised {type(error).__name__}: {error}") from error
