"""`python -m kestrl_rollout.bench --settings FILE`: a model behind an OpenAI-compatible endpoint as the agent.

It runs every validation scenario, once or several times, with the job's tool service and judge, and writes episodes and
summary as an evaluation does. Nothing here is trained on: episodes have messages and no tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, DefaultAsyncHttpxClient

from kestrl._shared.processes.stopping import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()  # before slow imports

from kestrl._shared import rpc
from kestrl._shared.bounded_answers import AnswerTooLong, bound
from kestrl._shared.credentials import Secret, header_value
from kestrl._shared.plan.settings.bench import BenchSettings
from kestrl._shared.plan.settings.common import ServiceSettings
from kestrl._shared.service import run_service
from kestrl.data import load_scenarios
from kestrl.episode import CallOutcome, Episode, Group, Scenario, StopReason, ToolCall, Turn
from kestrl.episode.codec import group_from_proto, group_to_proto
from kestrl.errors import EngineFailure, Failure, KestrlError, UserInputError
from kestrl.redaction import Redactor
from kestrl.tools import ToolSchema
from kestrl.tools.shapes import is_mapping, json_problem
from kestrl_rollout.bench_completion import BenchCompletion, CompletionCall, UnreadableCompletion, read_completion
from kestrl_rollout.bench_result import write_result
from kestrl_rollout.conversation.tool_session import SERVICE as TOOL_SERVICE
from kestrl_rollout.conversation.tool_session import ToolAnswer, ToolList, ToolSession
from kestrl_rollout.deadlines import now
from kestrl_rollout.groups.scoring import SERVICE as JUDGE_SERVICE
from kestrl_rollout.groups.scoring import Judge

log = logging.getLogger(__name__)
TOKEN_CHARACTERS = 4
"""Characters of a token, by which observations are cut: the endpoint's tokenizer is not known."""


@dataclass(slots=True)
class _Attempt:
    """What an episode has done so far."""

    messages: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list[Turn])
    calls: list[ToolCall] = field(default_factory=list[ToolCall])
    prompt_tokens: int = 0
    completion_tokens: int = 0
    completions: int = 0
    """Completions that were asked for."""
    requests: int = 0
    """HTTP requests for them, the client's repetitions included."""
    environments: Mapping[str, Any] = field(default_factory=dict[str, Any])


_ATTEMPT: ContextVar[_Attempt] = ContextVar("attempt")
"""The episode for which a request is sent."""


async def count_request(_request: object) -> None:
    """Hook of the HTTP client: counts a request of the current episode."""
    _ATTEMPT.get().requests += 1


class Bench:
    """Runs scenarios with one model."""

    def __init__(self, settings: BenchSettings, client: AsyncOpenAI, tools: rpc.Bundle, judge: rpc.Bundle) -> None:
        self._settings = settings
        self._client: Any = client  # its overloads do not take a mapping
        self._tools = ToolList(tools, seconds=settings.deadlines.tool)
        self._judge = Judge(judge, component=settings.component)
        self._redactor = Redactor([os.environ.get(settings.endpoint.key_variable, "")])
        self._used_tokens = 0

    async def run_all(self, scenarios: Sequence[Scenario]) -> list[Group]:
        """All samples of the scenarios, each in a group of its own; at most `concurrency` at a time.

        Raises:
            KestrlError: The judge service cannot be reached.
        """
        samples = range(self._settings.sampling.samples)
        pending = iter([(scenario, sample) for scenario in scenarios for sample in samples])
        groups: list[Group] = []

        async def run_next() -> None:
            for scenario, sample in pending:
                groups.append(await self.run(scenario, sample))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(self._settings.concurrency, len(scenarios) * len(samples))):
                    tasks.create_task(run_next())
        except* KestrlError as errors:
            raise errors.exceptions[0] from errors
        return sorted(groups, key=lambda group: (group.scenario.ordinal, group.id))

    async def run(self, scenario: Scenario, sample: int) -> Group:
        """One scored episode of a scenario; a failure is the episode's."""
        began, started_at = time.monotonic(), time.time()
        attempt = _Attempt([dict(message) for message in scenario.messages])
        _ATTEMPT.set(attempt)
        name = f"bench-{scenario.ordinal}.{sample}"
        failure: Failure | None = None
        stop = StopReason.FAILED
        try:
            async with asyncio.timeout(self._settings.deadlines.episode):
                stop = await self._converse(scenario, name, attempt)
        except KestrlError as error:
            failure = error.failure(component=self._settings.component)
        except TimeoutError:
            late = EngineFailure(f"no end after {self._settings.deadlines.episode:g} s", code="episode_timeout")
            failure = late.failure(component=self._settings.component)
        group = Group(
            id=f"{self._settings.run}/{name}",
            scenario=scenario,
            episodes=(self._episode(scenario, name, attempt, stop, failure, started_at, time.monotonic() - began),),
        )
        encoded = group_to_proto(group)
        ends = now() + self._settings.deadlines.group
        await self._judge.score(encoded, max_turns=self._settings.max_turns, ends=ends)
        return group_from_proto(encoded)

    def _episode(
        self,
        scenario: Scenario,
        name: str,
        attempt: _Attempt,
        stop: StopReason,
        failure: Failure | None,
        started_at: float,
        seconds: float,
    ) -> Episode:
        return Episode(
            id=f"{self._settings.run}/{name}/0",
            group_id=f"{self._settings.run}/{name}",
            scenario_id=scenario.id,
            index=0,
            seed=0,
            rows=(),
            turns=tuple(attempt.turns),
            tool_calls=tuple(attempt.calls),
            messages=tuple(attempt.messages),
            stop_reason=stop,
            failure=failure,
            policy=None,
            engine=self._settings.endpoint.model,
            started_at=started_at,
            seconds=seconds,
            metrics={
                "completion_tokens": float(attempt.completion_tokens),
                "total_tokens": float(attempt.prompt_tokens + attempt.completion_tokens),
                "engine_retries": float(attempt.requests - attempt.completions),
            },
            environments=attempt.environments,
        )

    async def _converse(self, scenario: Scenario, name: str, attempt: _Attempt) -> StopReason:
        offered = await self._tools.of(scenario)
        seconds = self._settings.deadlines.episode
        session = self._tools.session(name, scenario, tuple(offered), seconds=seconds)
        try:
            if self._tools.has_prompt(offered):
                last = attempt.messages[-1]
                last["content"] += await session.prompt(seconds=self._settings.deadlines.tool)
            stop = await self._turns(offered, session, attempt)
            if self._tools.has_state(offered):
                attempt.environments = await session.state(seconds=self._settings.deadlines.tool)
            return stop
        finally:
            await session.close()

    async def _turns(self, tools: Mapping[str, ToolSchema], session: ToolSession, attempt: _Attempt) -> StopReason:
        while len(attempt.turns) < self._settings.max_turns:
            room = self._settings.max_tokens - attempt.completion_tokens
            if room <= 0:
                return StopReason.MAX_TOKENS
            completion = await self._complete(
                list(tools.values()), attempt, min(room, self._settings.max_tokens_per_turn)
            )
            if not completion.calls:
                return StopReason.MAX_TOKENS if completion.finish_reason == "length" else StopReason.ANSWERED
            for index, call in enumerate(completion.calls):
                tool_call, final = await self._call(tools, session, call, index, len(attempt.turns) - 1)
                attempt.calls.append(tool_call)
                attempt.messages.append({"role": "tool", "tool_call_id": call.id, "content": tool_call.text})
                if final:
                    return StopReason.FINAL_TOOL
        return StopReason.MAX_TURNS

    async def _complete(self, tools: Sequence[ToolSchema], attempt: _Attempt, max_tokens: int) -> BenchCompletion:
        """The model's next turn, recorded.

        Raises:
            EngineFailure: The endpoint refused, failed, or did not answer in time, or the budget is used up.
        """
        endpoint, sampling = self._settings.endpoint, self._settings.sampling
        self._check_budget()
        arguments: dict[str, Any] = {
            "model": endpoint.model,
            "messages": attempt.messages,
            "max_completion_tokens": max_tokens,
            **({"tools": [tool.to_openai() for tool in tools]} if tools else {}),
            **({} if sampling.own_temperature else {"temperature": sampling.temperature}),
            **({"top_p": sampling.top_p} if sampling.top_p < 1 else {}),
        }
        began = time.monotonic()
        attempt.completions += 1
        try:
            answer: Any = await self._client.chat.completions.with_raw_response.create(**arguments)
            completion = read_completion(answer.http_response.content, self._redactor)
        except APIStatusError as error:
            text = self._redactor.text(f"{endpoint.model}: HTTP {error.status_code}: {error.message}")[:500]
            raise EngineFailure(text, code=_status_code(error.status_code)) from error
        except (AnswerTooLong, UnreadableCompletion) as error:
            raise EngineFailure(f"{endpoint.model}: {error}", code="bad_answer") from error
        except APITimeoutError as error:
            text = f"{endpoint.model}: no answer in {self._settings.deadlines.turn:g} s"
            raise EngineFailure(text, code="turn_timeout") from error
        except APIConnectionError as error:
            text = f"{endpoint.model}: {endpoint.url or 'the endpoint'} cannot be reached: {error}"
            raise EngineFailure(text, code="endpoint_unreachable") from error
        self._count_tokens(completion, attempt)
        attempt.messages.append(dict(completion.message))
        attempt.turns.append(
            Turn(
                index=len(attempt.turns),
                row=0,
                start=0,
                end=0,
                text=completion.text,
                finish_reason=completion.finish_reason,
                engine=endpoint.model,
                policy=endpoint.model,
                seconds=time.monotonic() - began,
            )
        )
        return completion

    def _check_budget(self) -> None:
        endpoint = self._settings.endpoint
        if endpoint.budget_tokens is not None and self._used_tokens >= endpoint.budget_tokens:
            text = f"{endpoint.model}: {self._used_tokens} tokens used, of {endpoint.budget_tokens} of --budget-tokens"
            raise EngineFailure(text, code="budget_used_up")

    def _count_tokens(self, completion: BenchCompletion, attempt: _Attempt) -> None:
        if not completion.counted and self._settings.endpoint.budget_tokens is not None:
            text = f"{self._settings.endpoint.model}: a completion without usage, which --budget-tokens needs"
            raise EngineFailure(text, code="no_usage")
        attempt.prompt_tokens += completion.prompt_tokens
        attempt.completion_tokens += completion.completion_tokens
        self._used_tokens += completion.prompt_tokens + completion.completion_tokens

    async def _call(
        self, tools: Mapping[str, ToolSchema], session: ToolSession, call: CompletionCall, index: int, turn: int
    ) -> tuple[ToolCall, bool]:
        name, raw = call.name, call.arguments
        began = time.monotonic()
        arguments: Any = None
        try:
            arguments = json.loads(raw or "{}")
            problem = None if is_mapping(arguments) else CallOutcome.INVALID_JSON
        except (ValueError, RecursionError):
            problem = CallOutcome.INVALID_JSON
        if problem is not None:
            answer = _refused(problem, "Error: the arguments are not a JSON object. Send the call again.")
        elif reason := json_problem(arguments):
            arguments = None
            answer = _refused(CallOutcome.SCHEMA_VIOLATION, f"Error: the arguments cannot be sent: {reason}.")
        elif name not in tools:
            answer = _refused(CallOutcome.UNKNOWN_TOOL, f"Error: there is no tool {name!r}. Use: {', '.join(tools)}.")
        elif index >= self._settings.max_parallel_calls:
            limit = self._settings.max_parallel_calls
            answer = _refused(CallOutcome.TOOL_ERROR, f"Error: at most {limit} tool calls in one turn.")
        else:
            await session.reachable()
            answer = await session.call(name, arguments, seconds=self._settings.deadlines.tool)
        tool_call = ToolCall(
            turn=turn,
            name=name,
            raw=raw,
            arguments=arguments if is_mapping(arguments) else None,
            outcome=answer.outcome,
            text=self._shortened(answer.text),
            data=answer.data,
            seconds=time.monotonic() - began,
        )
        return tool_call, answer.final

    def _shortened(self, text: str) -> str:
        limit = self._settings.max_tool_tokens * TOKEN_CHARACTERS
        return text if len(text) <= limit else f"{text[:limit]}\n[cut here: {len(text)} characters, limit {limit}]"


def _status_code(status: int) -> str:
    """Code of a failure by HTTP status, after the client's repetitions."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limited"
    return "endpoint_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "endpoint_refused"


def _refused(outcome: CallOutcome, text: str) -> ToolAnswer:
    return ToolAnswer(outcome=outcome, text=text, final=False, data={})


async def work(settings: ServiceSettings) -> None:
    """Runs all scenarios and writes the result.

    Raises:
        KestrlError: The data cannot be read, or no episode could be scored.
    """
    assert isinstance(settings, BenchSettings)
    key = os.environ.get(settings.endpoint.key_variable)
    if not key:
        raise UserInputError(f"{settings.endpoint.key_variable} is not set")
    header_value(key, settings.endpoint.key_variable)
    scenarios = load_scenarios(Path(settings.data.path), size=settings.data.size, promptless=settings.data.promptless)
    endpoint = settings.endpoint
    began = time.monotonic()
    async with (
        AsyncOpenAI(
            base_url=endpoint.url,
            api_key=key,
            timeout=settings.deadlines.turn,
            max_retries=endpoint.retries,
            http_client=DefaultAsyncHttpxClient(event_hooks={"request": [count_request], "response": [bound]}),
        ) as client,
        rpc.channel(settings.tools_address) as to_tools,
        rpc.Bundle(to_tools, TOOL_SERVICE, peer="tools", token=Secret.ROLLOUT_TO_TOOLS.here()) as tools,
        rpc.channel(settings.judge_address) as to_judge,
        rpc.Bundle(to_judge, JUDGE_SERVICE, peer="judge", token=Secret.ROLLOUT_TO_JUDGE.here()) as judge,
    ):
        groups = await Bench(settings, client, tools, judge).run_all(scenarios)
    await asyncio.to_thread(write_result, settings, groups, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(run_service(BenchSettings, work))
