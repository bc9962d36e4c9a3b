"""The tool calls of an agent by URL: what the model wrote, what the job's tools answered, what the model was shown.

Every call that the model wrote in a turn is one of the episode's, malformed ones too. What becomes of it is learned
later: the agent calls a tool of the job by MCP, or sends the result of a tool of its own with its next request, or
neither. A call by MCP is that of the newest turn in which the model asked for this tool with these arguments, and else
the agent's own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from kestrl._shared.text.parser import unknown_tool
from kestrl.agents import Call, LimitReached
from kestrl.episode import CallOutcome, Json, StopReason, ToolCall, Turn
from kestrl.tools import ToolSchema
from kestrl_rollout.conversation.tool_calls import EpisodeToolCalls
from kestrl_rollout.deadlines import now
from kestrl_rollout.history.canonical import canonical_arguments

NOT_SHOWN = "tool_results_not_shown"
"""Metric: answers of the job's tools to calls of the model that no later request of the agent had."""
OWN_CALLS = "tool_calls_by_agent"
"""Metric: calls of the job's tools that the model did not write."""


@dataclass(slots=True, eq=False)
class _Attempt:
    call: ToolCall
    place: int | None
    """Place among the calls of its turn; None for a call of the agent's own."""
    results_shown: bool = True
    """Whether later requests have its result as a message."""
    by_mcp: bool = False
    """Whether a tool of the job was called for it."""
    shown: bool = False
    """Whether its result came back in a request."""


class AgentCalls:
    """Implements `kestrl_rollout.gateway.sampler.JobTools`."""

    def __init__(
        self,
        calls: EpisodeToolCalls,
        tools: Sequence[ToolSchema],
        turns: Sequence[Turn],
        *,
        seconds: float,
        check: Callable[[], None],
        platform: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Records the calls of one episode.

        Args:
            calls: Runs the calls of the job's tools.
            tools: The job's tools.
            turns: The turns of the episode so far.
            seconds: Time limit of a call with all that it waits for.
            check: Raises once the episode can go on no more.
            platform: A context whose failures are the episode's.
        """
        self._calls, self._tools, self._turns = calls, tools, turns
        self._seconds, self._check, self._platform = seconds, check, platform
        self._attempts: list[_Attempt] = []
        self._made = Counter[int]()
        """Calls by MCP of each turn."""

    @property
    def schemas(self) -> Sequence[ToolSchema]:
        return self._tools

    @property
    def stop(self) -> StopReason | None:
        """The end of the episode by a tool, if there was one."""
        return StopReason.FINAL_TOOL if self._calls.final else None

    def check_open(self) -> None:
        """Raises LimitReached when a tool has ended the episode."""
        if self._calls.final:
            raise LimitReached("the episode is over: a tool has ended it")

    def add_turn(self, turn: int, calls: Sequence[Call], *, results_shown: bool = True) -> None:
        """Adds the calls that the model wrote in a turn.

        Args:
            turn: Index of the turn.
            calls: Its calls.
            results_shown: Whether later requests have messages, with the results and the tools that were offered. A
                client that owns its tokens sends neither, so that a tool which the job does not have may be its own.
        """
        for place, call in enumerate(calls):
            outcome = call.problem or CallOutcome.UNANSWERED
            if outcome is CallOutcome.UNKNOWN_TOOL and not results_shown:
                outcome = CallOutcome.UNANSWERED
            record = _record(turn, call.name, call.raw, call.arguments, outcome)
            self._attempts.append(_Attempt(record, place, results_shown))

    def show(self, turn: int, place: int, text: str, *, failed: bool) -> None:
        """Records the result of a call as the agent sent it to the model; the first one counts."""
        attempt = next(
            (
                attempt_shown
                for attempt_shown in self._attempts
                if (attempt_shown.call.turn, attempt_shown.place) == (turn, place)
            ),
            None,
        )
        if attempt is None or attempt.shown:
            return
        attempt.shown = True
        outcome = attempt.call.outcome
        if outcome is CallOutcome.UNANSWERED and not attempt.by_mcp:
            outcome = CallOutcome.TOOL_ERROR if failed else CallOutcome.OK
        attempt.call = replace(attempt.call, text=text, outcome=outcome)

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolCall:
        """Calls a tool of the job.

        Raises:
            LimitReached: A tool has ended the episode.
            KestrlError: The tool failed or a deadline passed, with which the episode has failed.
        """
        self._check()
        self.check_open()
        attempt = self._claimed(name, arguments)
        turn, raw = attempt.call.turn, attempt.call.raw
        number, self._made[turn] = self._made[turn], self._made[turn] + 1
        call = Call(name=name, arguments=arguments, raw=raw)
        names = [tool.name for tool in self._tools]
        if name not in names:
            call = replace(call, problem=CallOutcome.UNKNOWN_TOOL, message=unknown_tool(name, names))
        with self._platform():
            answered = await self._calls.run_one(call, number, turn=turn, ends=now() + self._seconds)
        self._check()
        attempt.call = replace(answered, text=attempt.call.text) if attempt.shown else answered
        return answered

    def _claimed(self, name: str, arguments: Mapping[str, Json]) -> _Attempt:
        """The call of the model that a call by MCP is made for, or a new one of the agent's own."""
        canonical = canonical_arguments(arguments)
        open_calls = [
            attempt
            for attempt in self._attempts
            if attempt.call.outcome in (CallOutcome.UNANSWERED, CallOutcome.UNKNOWN_TOOL)
            and attempt.call.arguments is not None
            and not (attempt.by_mcp or attempt.shown)
            and _is_name(attempt.call.name, name)
            and canonical_arguments(attempt.call.arguments) == canonical
        ]
        # The newest turn, and in it the first call; max() takes the first of equals.
        claimed = max(
            open_calls, key=lambda candidate: (candidate.call.name == name, candidate.call.turn), default=None
        )
        if claimed is None:
            turn = max(0, len(self._turns) - 1)
            claimed = _Attempt(_record(turn, name, "", arguments, CallOutcome.UNANSWERED), None)
            self._attempts.append(claimed)
        claimed.by_mcp = True
        return claimed

    def records(self) -> list[ToolCall]:
        """The calls in the order of their turns."""
        return sorted((attempt.call for attempt in self._attempts), key=lambda call: call.turn)

    def metrics(self) -> dict[str, float]:
        """What the calls' outcomes do not say, where there is any of it."""
        counts = {
            NOT_SHOWN: sum(
                attempt.by_mcp and attempt.place is not None and attempt.results_shown and not attempt.shown
                for attempt in self._attempts
            ),
            OWN_CALLS: sum(attempt.place is None for attempt in self._attempts),
            "tool_results_cut": self._calls.cut,
        }
        return {name: float(count) for name, count in counts.items() if count}


def _record(turn: int, name: str, raw: str, arguments: Mapping[str, Json] | None, outcome: CallOutcome) -> ToolCall:
    return ToolCall(turn=turn, name=name, raw=raw, arguments=arguments, outcome=outcome, text="")


def _is_name(name: str, tool: str) -> bool:
    """Whether a name in a prompt is that of a tool: clients put the server's before it, as in `mcp__job__search`."""
    return name == tool or re.search(rf"[^A-Za-z0-9]{re.escape(tool)}$", name) is not None
