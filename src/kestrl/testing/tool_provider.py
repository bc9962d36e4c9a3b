"""Conformance suite of tool providers, for a user's test:
`asyncio.run(check_tool_provider(lambda: MyProvider(...), {"search": {"word": "lamp"}}))`.

It lists the tools, opens sessions at the same time, calls, cancels, closes and stops, and raises `AssertionError` with
the property that does not hold.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kestrl.errors import KestrlError, ToolFailure
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.json_schema import JsonSchema, SchemaInvalid
from kestrl.tools.provider import NO_KWARGS, Kwargs, ProviderSession, ToolDefinition, ToolProvider

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
SECONDS = 60.0
"""Time limit of each step."""
CANCEL_SECONDS = 10.0
"""Time limit of the end of a cancelled call."""
SESSIONS = 3


async def check_tool_provider(
    make: Callable[[], ToolProvider],
    calls: Mapping[str, Kwargs],
    *,
    create_kwargs: Kwargs = NO_KWARGS,
    invalid_create_kwargs: Kwargs | None = None,
    slow: tuple[str, Kwargs] | None = None,
) -> None:
    """Checks a provider.

    Args:
        make: Makes a provider; called several times, and each one is stopped.
        calls: Arguments of a call that succeeds, by tool; at least one.
        create_kwargs: Valid `create_kwargs` of a session.
        invalid_create_kwargs: `create_kwargs` that must be refused, if there are any.
        slow: A call that takes longer than a second, to be cancelled, if there is one.

    Raises:
        AssertionError: A property does not hold; the message names it.
    """
    assert calls, "give at least one call that succeeds"
    await _check_stop_without_start(make())
    first, second = make(), make()
    try:
        tools = await _within(first.list_tools(), "list_tools()")
        listed_again = await _within(second.list_tools(), "list_tools()")
        assert _listed(tools) == _listed(listed_again), (
            "two providers made alike list different tools, or in another order"
        )
    finally:
        await _within(second.stop(), "stop() of a provider that only listed its tools")
    try:
        _check_definitions(first, tools)
        await _within(first.start(), "start()")
        assert not first.health(), f"a provider that has started reports a problem: {first.health()}"
        if invalid_create_kwargs is not None:
            await _check_invalid(first, invalid_create_kwargs)
        first.check(create_kwargs)
        await _check_sessions(first, {tool.name: tool for tool in tools}, calls, create_kwargs)
        if slow is not None:
            await _check_cancelled(first, slow, calls, create_kwargs)
    finally:
        await _within(first.stop(), "stop()")


async def _within(work: Any, label: str) -> Any:
    try:
        async with asyncio.timeout(SECONDS):
            return await work
    except TimeoutError:
        raise AssertionError(f"{label} takes longer than {SECONDS:g} s") from None


async def _check_stop_without_start(provider: ToolProvider) -> None:
    await _within(provider.stop(), "stop() of a provider that was never used")


def _listed(tools: Sequence[ToolDefinition]) -> list[tuple[str, str, str]]:
    return [(tool.name, tool.schema.description, json.dumps(tool.schema.parameters, sort_keys=True)) for tool in tools]


def _check_definitions(provider: ToolProvider, tools: Sequence[ToolDefinition]) -> None:
    assert NAME.fullmatch(provider.name), f"{provider.name!r} is not a name of a provider ({NAME.pattern})"
    assert tools, "a provider lists at least one tool"
    names = [tool.name for tool in tools]
    assert len(set(names)) == len(names), f"the names of tools are not unique: {names}"
    for tool in tools:
        assert NAME.fullmatch(tool.name), f"{tool.name!r} is not a name of a tool ({NAME.pattern})"
        parameters = tool.schema.parameters
        assert parameters.get("type") == "object", f"{tool.name}: its parameters are not a JSON Schema of type object"
        try:
            JsonSchema(parameters)
        except SchemaInvalid as error:
            raise AssertionError(f"{tool.name}: its parameters are not a JSON Schema: {error}") from error


async def _check_invalid(provider: ToolProvider, create_kwargs: Kwargs) -> None:
    for method, trial in (("check", _called(provider.check, create_kwargs)), ("open", provider.open(create_kwargs))):
        code = await _refusal(_within(trial, f"{method}()"))
        assert code is not None, f"{method}() accepts invalid create_kwargs"
        assert code == "tool_kwargs_invalid", f"{method}() refuses invalid create_kwargs as {code!r}"


async def _refusal(trial: Awaitable[object]) -> str | None:
    try:
        await trial
    except ToolFailure as error:
        return error.code
    return None


async def _called(check: Callable[[Kwargs], None], create_kwargs: Kwargs) -> None:
    check(create_kwargs)


async def _check_sessions(
    provider: ToolProvider, tools: Mapping[str, ToolDefinition], calls: Mapping[str, Kwargs], create_kwargs: Kwargs
) -> None:
    unknown = sorted(set(calls) - set(tools))
    assert not unknown, f"calls: there are no tools {unknown}; there are {sorted(tools)}"
    sessions: list[ProviderSession] = await asyncio.gather(
        *(_within(provider.open(create_kwargs), "open()") for _ in range(SESSIONS))
    )
    await asyncio.gather(*(_check_session(provider, session, tools, calls) for session in sessions))


async def _check_session(
    provider: ToolProvider, session: ProviderSession, tools: Mapping[str, ToolDefinition], calls: Mapping[str, Kwargs]
) -> None:
    try:
        assert not session.prompt or provider.has_prompt, "a session has a prompt, and the provider says that none has"
        for name, arguments in calls.items():
            parsed = tools[name].arguments.parse(dict(arguments))
            _check_result(name, await _within(session.call(name, parsed, NO_KWARGS), f"{name}()"))
        if provider.has_state:
            _check_json("the state", await _within(session.state(), "state()"))
    finally:
        await _within(session.close(), "close()")


def _check_result(name: str, result: object) -> None:
    if isinstance(result, ToolResult):
        assert isinstance(result.text, str), f"{name}: the text of its result is {type(result.text).__name__}"
        _check_json(f"{name}: the data of its result", dict(result.data))
    else:
        _check_json(f"{name}: its result", result)


def _check_json(label: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise AssertionError(f"{label} has no JSON form: {error}") from error


async def _check_cancelled(
    provider: ToolProvider, slow: tuple[str, Kwargs], calls: Mapping[str, Kwargs], create_kwargs: Kwargs
) -> None:
    """A call that is cancelled ends at once, its session can be closed, and other sessions work."""
    name, arguments = slow
    cancelled, other = await _within(provider.open(create_kwargs), "open()"), await provider.open(create_kwargs)
    work = asyncio.ensure_future(cancelled.call(name, arguments, NO_KWARGS))
    ended_tasks, _ = await asyncio.wait({work}, timeout=1.0)
    assert not ended_tasks, f"the slow call of {name} ended within a second"
    work.cancel()
    ended_tasks, _ = await asyncio.wait({work}, timeout=CANCEL_SECONDS)
    assert ended_tasks, f"a cancelled call of {name} does not end within {CANCEL_SECONDS:g} s"
    assert work.cancelled(), f"a cancelled call of {name} does not end as cancelled"
    await _within(cancelled.close(), "close() after a cancelled call")
    call, call_arguments = next(iter(calls.items()))
    try:
        _check_result(
            call, await _within(other.call(call, call_arguments, NO_KWARGS), f"{call}() beside a cancelled call")
        )
    except (ToolError, KestrlError) as error:
        raise AssertionError(f"{call} fails in another session after a cancelled call: {error}") from error
    finally:
        await _within(other.close(), "close()")
