"""What all hosts of agents have in common: a request, what a run returns, and how it ends otherwise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

from kestrl.agents.runs import RunResult, invalid, run_result
from kestrl.data.values import exceeds_values
from kestrl.errors import encodable
from kestrl.tools.shapes import is_mapping

MAX_RESULT = 4 * 1024 * 1024
"""Maximum bytes of what a run returns."""
MAX_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One episode for an agent."""

    row: Mapping[str, Any]
    base_url: str
    key: str
    mcp_url: str
    deadline: float
    """Unix seconds."""
    config: Mapping[str, Any]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class RunEnded(Exception):
    """A run ended without a result."""

    def __init__(self, message: str, *, names: Sequence[str] = (), code: str, retryable: bool = False) -> None:
        """Describes the end.

        Args:
            message: What happened.
            names: Names by which the job may know it as a stop: of the exception's class and its bases, `exit:CODE`,
                `http:STATUS`.
            code: Code of the failure if it is none.
            retryable: Whether an unchanged retry may succeed.
        """
        super().__init__(encodable(message))
        self.names, self.code, self.retryable = tuple(names), code, retryable


class Host(Protocol):
    """Runs episodes of an agent."""

    field: str
    """The manifest field of the agent."""
    name: str
    """The agent as in that field."""

    async def run(self, request: RunRequest) -> RunResult:
        """Runs an episode; cancelled at its deadline.

        Raises:
            RunEnded: The run ended without a result.
            UserCodeError: It returned what is no result.
        """
        ...


def read_result(agent: str, text: bytes) -> RunResult:
    """What a run returned as JSON.

    Raises:
        RunEnded: It is the description of an error: `{"error": {"type": "MaxTurnsExceeded", "message": "..."}}`.
        UserCodeError: It is no result.
    """
    if len(text) > MAX_RESULT:
        raise invalid(agent, f"its result has more than {MAX_RESULT} bytes")
    if exceeds_values(text):
        raise invalid(agent, "its result has too many values")
    try:
        returned: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(agent, f"its result is not JSON: {error}") from error
    if is_mapping(returned) and "error" in returned:
        raise error_end(agent, returned["error"])
    return run_result(agent, returned)


def error_end(agent: str, error: object) -> RunEnded:
    """The end that a run describes."""
    described = cast("Mapping[str, Any]", error) if is_mapping(error) else {"message": error}
    kind, message = str(described.get("type", "")), str(described.get("message", ""))
    types: Any = described.get("types")
    names = [str(name) for name in cast("list[object]", types)] if isinstance(types, list) else [kind]
    text = ": ".join(part for part in (kind[:MAX_NAME], message[:500]) if part)
    return RunEnded(f"{agent}: raised {text}", names=[name for name in names if name], code="agent_raised")
