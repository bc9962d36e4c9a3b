"""Running the tool calls of a turn: those of one turn at once, each within its deadline and answered in text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.agents import Call
from kestrl.episode import CallOutcome, Json, ToolCall
from kestrl.errors import Boundary
from kestrl_rollout.conversation.tool_session import ToolAnswer, ToolSession
from kestrl_rollout.deadlines import Scope, Waiting, deadline, now

CUT_RESERVE = 24
"""Tokens reserved for the marker of a shortened result."""
TOOL_ERRORS = tuple(
    (f"tool_errors.{outcome}", outcome)
    for outcome in CallOutcome
    if outcome not in (CallOutcome.OK, CallOutcome.UNANSWERED)
)
"""Metric names of failed tool calls by outcome."""


def error_counts(calls: Sequence[ToolCall]) -> dict[str, int]:
    """Metrics that count failed tool calls by outcome."""
    outcomes = [call.outcome for call in calls]
    return {name: outcomes.count(outcome) for name, outcome in TOOL_ERRORS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds on tool calls from the worker's settings."""

    max_parallel_calls: int
    max_tool_tokens: int


class EpisodeToolCalls:
    """An episode's calls of its tools."""

    def __init__(
        self,
        tools: ToolSession,
        *,
        limits: ToolLimits,
        vocabulary: Vocabulary,
        seconds: float,
        waiting: Waiting,
        boundary: Boundary,
    ) -> None:
        self._tools = tools
        self._limits = limits
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._waiting = waiting
        self._boundary = boundary
        self.final = False
        """Whether a tool ended the episode."""
        self.cut = 0
        """Number of results that were shortened."""

    async def run(self, calls: Sequence[Call], *, turn: int, ends: float) -> list[ToolCall]:
        """Runs the calls of a turn at once.

        Args:
            calls: As the model wrote them.
            turn: Index of the turn.
            ends: Deadline of the turn.

        Raises:
            KestrlError: A tool failed or a deadline passed.
        """
        if len(calls) == 1:
            return [await self.run_one(calls[0], 0, turn=turn, ends=ends)]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self.run_one(call, index, turn=turn, ends=ends), name=f"tool-call-{index}")
                    for index, call in enumerate(calls)
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        return [task.result() for task in running]

    async def act(self, tool: str, text: str, *, turn: int, ends: float) -> ToolAnswer:
        """Gives the environment a turn of the model; a wrong action is answered with text for the model.

        Raises:
            KestrlError: The environment failed or a deadline passed.
        """
        with span(SpanName.TOOL_CALL, {Attr.TOOL_NAME: tool, Attr.TURN: turn}) as current:
            answer = await self._dispatch(tool, {"text": text}, ends)
            current.set_attribute(Attr.OUTCOME, answer.outcome)
        return replace(answer, text=self._shorten(answer.text))

    async def run_one(self, call: Call, index: int, *, turn: int, ends: float) -> ToolCall:
        """Runs a call.

        Args:
            call: As the model wrote it.
            index: Number of the calls of its turn before it.
            turn: Index of the turn.
            ends: Deadline of the turn.

        Raises:
            KestrlError: The tool failed or a deadline passed.
        """
        started = time.monotonic()
        answer = self._refusal(call, index)
        with span(SpanName.TOOL_CALL, {Attr.TOOL_NAME: call.name, Attr.TURN: turn}) as current:
            if answer is None:
                assert call.arguments is not None
                answer = await self._dispatch(call.name, call.arguments, ends)
            current.set_attribute(Attr.OUTCOME, answer.outcome)
        self.final = self.final or answer.final
        return ToolCall(
            turn=turn,
            name=call.name,
            raw=call.raw,
            arguments=call.arguments,
            outcome=answer.outcome,
            text=self._shorten(answer.text),
            data=answer.data,
            seconds=time.monotonic() - started,
        )

    def _refusal(self, call: Call, index: int) -> ToolAnswer | None:
        """The result of a call that is not passed to a tool; None if it is."""
        if index >= self._limits.max_parallel_calls:
            limit = self._limits.max_parallel_calls
            text = f"Error: at most {limit} tool calls in one turn; this one was not made. Make it in the next turn."
            return ToolAnswer(outcome=CallOutcome.TOOL_ERROR, text=text, final=False, data={})
        if call.problem is None:
            return None
        return ToolAnswer(outcome=call.problem, text=call.message, final=False, data={})

    async def _dispatch(self, name: str, arguments: Mapping[str, Json], ends: float) -> ToolAnswer:
        with self._waiting.call(self._boundary) as waiting:
            seconds = self._seconds
            if not self._tools.opened:
                # Within the turn's deadline, not the tool's: a restarting service is not a failure of the tool.
                async with deadline(Scope.TURN, ends, waiting):
                    await self._tools.reachable()
                seconds *= 2  # the first call also creates the tools
            began = now()
            scope = Scope.TOOL if began + seconds < ends else Scope.TURN  # one timer: the earlier deadline
            async with deadline(scope, min(began + seconds, ends), waiting):
                return await self._tools.call(name, arguments, seconds=seconds)

    def _shorten(self, text: str) -> str:
        limit = self._limits.max_tool_tokens
        cut = self._vocabulary.cut(text, limit, reserve=CUT_RESERVE)
        if cut is None:
            return text
        self.cut += 1
        beginning, tokens = cut
        return f"{beginning}\n[cut here: {tokens} tokens or more, limit {limit}]"
