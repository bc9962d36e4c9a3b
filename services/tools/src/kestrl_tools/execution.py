"""One call: what the tool did, sorted into what the model may see and what is the tool's own failure."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from kestrl.episode import CallOutcome
from kestrl.errors import KestrlError, ToolFailure, described, encodable
from kestrl.tools import ToolError, ToolResult
from kestrl.user_tasks import enter_user_code

log = logging.getLogger(__name__)
MAX_TEXT = 1_000_000
"""Characters of an observation that leave this service; the rollout worker cuts it to the job's maxToolTokens."""
MAX_DATA = 4_000_000
"""Characters of a call's facts as JSON."""
MAX_STATE = 1_000_000
"""Characters of an environment's final state as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a call, when nothing but the model can be at fault."""

    outcome: CallOutcome
    text: str
    final: bool = False
    data_json: str = "{}"


async def guarded(tool: str, work: Awaitable[object]) -> object:
    """Awaits what a tool does.

    Raises:
        ToolError: For the model.
        KestrlError: As the tool raised it, when it knows better what broke (its sandbox, say).
        ToolFailure: The tool raised anything else, be it `SystemExit` or `KeyboardInterrupt`: it must not end the service.
    """
    enter_user_code()
    try:
        return await work
    except (ToolError, KestrlError, asyncio.CancelledError):
        raise
    except BaseException as error:
        log.exception("tool %s raised", tool)
        raise ToolFailure(f"{tool}: {described(error)}") from error


def answer_of(tool: str, result: object) -> Answer:
    """What a tool returned, as the model and the reward see it.

    Raises:
        ToolFailure: It is neither text, nor JSON, nor a `ToolResult`.
    """
    if isinstance(result, ToolResult):
        data = _json(tool, result.data, "data")
        if len(data) > MAX_DATA:
            raise _invalid(tool, f"its data are {len(data)} characters of JSON; at most {MAX_DATA} are kept")
        text = _text(tool, result.text)
        return Answer(outcome=CallOutcome.OK, text=text, final=bool(result.final), data_json=data)
    return Answer(outcome=CallOutcome.OK, text=_text(tool, result))


def state_of(environment: str, state: object) -> object:
    """An environment's state, as JSON can carry it.

    Raises:
        ToolFailure: It has no JSON form, or is too large.
    """
    text = _json(environment, state, "state")
    if len(text) > MAX_STATE:
        raise _invalid(
            environment, f"its state is {len(text)} characters of JSON; at most {MAX_STATE} go to the reward"
        )
    return json.loads(text)


def for_model(tool: str, error: ToolError) -> Answer:
    """What the tool said to the model.

    Raises:
        ToolFailure: The error cannot be read: its own `__str__` raised.
    """
    try:
        text = str(error)
    except BaseException as raised:
        raise ToolFailure(f"{tool}: the text of its {type(error).__name__}: {described(raised)}") from raised
    return Answer(outcome=CallOutcome.TOOL_ERROR, text=_clean(text) or "The tool refused without saying why.")


def _text(tool: str, value: object) -> str:
    return _clean(value if isinstance(value, str) else _json(tool, value, "result"))


def _clean(text: str) -> str:
    """Cut to what may travel; a lone surrogate, which UTF-8 and so the wire cannot carry, becomes a question mark."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[cut: {len(text) - MAX_TEXT} more characters]"
    return encodable(text)


def _json(tool: str, value: Any, what: str) -> str:
    try:
        return encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
    except Exception as error:  # objects of the user's own may raise anything here
        raise _invalid(
            tool, f"its {what} has no JSON form ({described(error)}); return text, a JSON value or a ToolResult"
        ) from error


def _invalid(tool: str, reason: str) -> ToolFailure:
    return ToolFailure(f"{tool}: {reason}", code="tool_result_invalid")
