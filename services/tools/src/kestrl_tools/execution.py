"""Result of one call: an observation for the model, or a failure of the tool."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from kestrl._shared.user_tasks import enter_user_code
from kestrl.episode import CallOutcome
from kestrl.errors import KestrlError, ToolFailure, described, encodable
from kestrl.tools import ToolError, ToolResult
from kestrl.tools.shapes import is_mapping, json_problem

log = logging.getLogger(__name__)
MAX_TEXT = 1_000_000
"""Maximum characters of an observation; the rollout worker truncates it to the job's maxToolTokens."""
MAX_DATA = 4_000_000
"""Maximum characters of a call's facts as JSON."""
MAX_STATE = 1_000_000
"""Maximum characters of an environment's final state as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Outcome of a call that is not a failure of the tool."""

    outcome: CallOutcome
    text: str
    final: bool = False
    data_json: str = "{}"


async def guarded(tool: str, work: Awaitable[object]) -> object:
    """Awaits the work of a tool and converts its exceptions.

    Raises:
        ToolError: A message for the model.
        KestrlError: A typed failure raised by the tool, such as of its sandbox.
        ToolFailure: The tool raised anything else, including `SystemExit` and `KeyboardInterrupt`, which must not end
            the service.
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
    """Converts the return value of a tool to an answer.

    Raises:
        ToolFailure: The value is neither text, nor JSON, nor a `ToolResult` with a mapping of facts.
    """
    if isinstance(result, ToolResult):
        data, facts = _json(tool, result.data, "data")
        if len(data) > MAX_DATA:
            raise _invalid(tool, f"its data are {len(data)} characters of JSON; at most {MAX_DATA} are kept")
        if not is_mapping(facts):
            raise _invalid(tool, f"its data are a {type(result.data).__name__}, not a mapping")
        text = _text(tool, result.text)
        return Answer(outcome=CallOutcome.OK, text=text, final=bool(result.final), data_json=data)
    return Answer(outcome=CallOutcome.OK, text=_text(tool, result))


def state_of(environment: str, state: object) -> object:
    """State of an environment as JSON text.

    Raises:
        ToolFailure: The state has no JSON form, or is too large.
    """
    text, value = _json(environment, state, "state")
    if len(text) > MAX_STATE:
        raise _invalid(
            environment, f"its state is {len(text)} characters of JSON; at most {MAX_STATE} go to the reward"
        )
    return value


def for_model(tool: str, error: ToolError) -> Answer:
    """Answer with the message of a `ToolError`.

    Raises:
        ToolFailure: The `__str__` of the error raised.
    """
    try:
        text = str(error)
    except BaseException as raised:
        raise ToolFailure(f"{tool}: the text of its {type(error).__name__}: {described(raised)}") from raised
    return Answer(outcome=CallOutcome.TOOL_ERROR, text=_clean(text) or "The tool refused the call without a message.")


def _text(tool: str, value: object) -> str:
    return _clean(value if isinstance(value, str) else _json(tool, value, "result")[0])


def _clean(text: str) -> str:
    """Truncates a text and replaces lone surrogates, which UTF-8 cannot encode, by question marks."""
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}\n[cut: {len(text) - MAX_TEXT} more characters]"
    return encodable(text)


def _json(tool: str, value: Any, role: str) -> tuple[str, object]:
    """A value as JSON, and what a reader gets from it."""
    try:
        text = encodable(json.dumps(value, ensure_ascii=False, allow_nan=False))
        decoded: object = json.loads(text)
    except Exception as error:  # objects of user code may raise anything here
        raise _invalid(
            tool, f"its {role} has no JSON form ({described(error)}); return text, a JSON value or a ToolResult"
        ) from error
    if problem := json_problem(decoded):
        raise _invalid(tool, f"its {role} cannot be passed on: {problem}")
    return text, decoded


def _invalid(tool: str, reason: str) -> ToolFailure:
    return ToolFailure(f"{tool}: {reason}", code="tool_result_invalid")
