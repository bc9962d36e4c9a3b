"""An episode in progress: the `Conversation` that an agent loop uses, and the record of the episode.

The conversation owns the tokens. Each prompt is the last one, the sampled tokens and the ids of new messages; a loop
cannot change it. It also keeps the first platform failure, so that a loop that swallows one cannot continue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from kestrl._shared.telemetry import span
from kestrl._shared.telemetry.names import Attr, SpanName
from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel
from kestrl._shared.text.parser import Parsed
from kestrl.agents import Call, Completion, LimitReached, Limits, Reply, Tokenizer
from kestrl.episode import PROMPT_TOO_LONG, CallOutcome, Json, Row, Scenario, StopReason, ToolCall, Turn
from kestrl.errors import Boundary, KestrlError, UserCodeError, UserInputError, described, encodable
from kestrl.tools import ToolSchema
from kestrl_rollout.conversation.recorder import Recorder
from kestrl_rollout.conversation.tool_session import OfferedTools, ToolAnswer, ToolSession
from kestrl_rollout.conversation.transformers_tokenizer import TransformersTokenizer
from kestrl_rollout.deadlines import Scope, Waiting, deadline, now
from kestrl_rollout.engine.engine_session import EngineSession, Sampled
from kestrl_rollout.requests import Deadlines

CUT_RESERVE = 24
"""Tokens reserved for the marker of a shortened result."""
TOOL_ERRORS = tuple((f"tool_errors.{outcome}", outcome) for outcome in CallOutcome if outcome is not CallOutcome.OK)
"""Metric names of failed tool calls by outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds on tool calls from the worker's settings."""

    max_parallel_calls: int
    max_tool_tokens: int


class _Platform:
    """Context around platform code: records failures, and keeps internal errors apart from the loop's."""

    __slots__ = ("_note",)

    def __init__(self, note: Callable[[KestrlError], None]) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KestrlError):
            self._note(error)
        elif isinstance(error, Exception):
            bug = KestrlError(described(error), code="internal")
            self._note(bug)
            raise bug from error


class EpisodeConversation:
    """Implements `kestrl.agents.Conversation`."""

    def __init__(
        self,
        *,
        scenario: Scenario,
        seed: int,
        limits: Limits,
        deadlines: Deadlines,
        chat_model: ChatModel,
        engine: EngineSession,
        offered: OfferedTools,
        tools: ToolSession,
        tool_limits: ToolLimits,
        waiting: Waiting,
    ) -> None:
        self._scenario = scenario
        self._seed = seed
        self._limits = limits
        self._deadlines = deadlines
        self._chat_model = chat_model
        self._reader = chat_model.reader
        self._engine = engine
        self._offered = offered
        self._tools = tools
        self._tool_limits = tool_limits
        self._waiting = waiting
        self._messages = [Message(role=said["role"], text=said["content"]) for said in scenario.messages]
        self._transcript: list[dict[str, Json]] = [dict(said) for said in scenario.messages]
        self._recorder = Recorder()
        self._ids: list[int] = []
        """The row so far: the last prompt and the tokens sampled after it."""
        self._last_reply = 0
        """Index of the model's last message."""
        self._by_tokens = False
        self._metrics: dict[str, float] = {}
        self._turn_ends = now() + deadlines.turn
        self._sampled = 0
        self._stop: StopReason | None = None
        self._broken: KestrlError | None = None
        self.turns: list[Turn] = []
        self.tool_calls: list[ToolCall] = []

    @property
    def scenario(self) -> Scenario:
        return self._scenario

    @property
    def tools(self) -> Sequence[ToolSchema]:
        return self._offered.tools

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def messages(self) -> Sequence[Mapping[str, Json]]:
        return tuple(self._transcript)

    @property
    def metrics(self) -> MutableMapping[str, float]:
        return self._metrics

    @property
    def tokenizer(self) -> Tokenizer:
        return TransformersTokenizer(self._chat_model)

    def append_user(self, text: str) -> None:
        if not isinstance(text, str) or encodable(text) != text:  # pyright: ignore[reportUnnecessaryIsInstance] - a user's loop
            raise UserCodeError("append_user() takes text without lone surrogates", code="bad_message")
        self._messages.append(Message(role="user", text=text))
        self._transcript.append({"role": "user", "content": text})

    def stop(self, reason: StopReason) -> None:
        if reason not in set(StopReason) - {StopReason.FAILED}:
            raise UserCodeError(
                f"stop({reason!r:.100}): give a StopReason; a loop fails by raising, not by stop(FAILED)",
                code="bad_stop_reason",
            )
        self._stop = StopReason(reason)

    async def generate(self) -> Reply | None:
        self._check()
        if self._by_tokens:
            raise UserCodeError("generate() cannot follow generate_tokens() in one episode", code="mixed_loop")
        if self._stop is not None:
            return None
        with self._platform():
            prompt = self._prompt()
            room = self._room(len(prompt))
        if room == 0:
            return None
        sampled = await self._sample(prompt, room, self._chat_model.stop_ids)
        with self._platform():
            reasoning = self._chat_model.chat.reasons(self._messages, self._offered.toolset)
            parsed = self._parse(sampled.completion, reasoning=reasoning)
        turn = self._record(prompt, sampled, parsed.text, reasoning=reasoning)
        self._ids = [*prompt, *sampled.completion.token_ids]
        self._last_reply = len(self._messages)
        self._messages.append(parsed.message)
        return Reply(
            index=turn.index,
            text=parsed.text,
            content=parsed.content,
            calls=parsed.calls,
            finish_reason=turn.finish_reason,
        )

    async def generate_tokens(
        self, prompt_ids: Sequence[int], *, max_tokens: int | None = None, stop_token_ids: Sequence[int] = ()
    ) -> Completion:
        self._check()
        if self._ids:
            raise UserCodeError("generate_tokens() cannot follow generate() in one episode", code="mixed_loop")
        self._by_tokens = True
        room = self._room(len(prompt_ids))
        if room == 0:
            raise LimitReached(f"the episode's limit is reached: {self._stop}")
        room = room if max_tokens is None else min(room, max_tokens)
        stops = tuple(dict.fromkeys((*self._chat_model.stop_ids, *stop_token_ids)))
        sampled = await self._sample(prompt_ids, room, stops)
        reasoning = self._reader.opens_reasoning(prompt_ids)
        text = self._text_of(sampled.completion, stops, reasoning=reasoning)
        self._record(prompt_ids, sampled, text, reasoning=reasoning)
        return sampled.completion

    def _text_of(self, completion: Completion, stops: Sequence[int], *, reasoning: bool) -> str:
        """The text of a turn, without the token that ended it."""
        ids = completion.token_ids
        return self._reader.text(ids[:-1] if ids and ids[-1] in stops else ids, reasoning=reasoning)

    def keep(self, token_ids: Sequence[int], mask: Sequence[int]) -> None:
        self._recorder.set_training_mask(token_ids, mask)

    async def call_tools(self, calls: Sequence[Call]) -> Sequence[ToolCall]:
        self._check()
        with self._platform():
            results = await self._run_calls(calls)
        for call, result in zip(calls, results, strict=True):
            self.tool_calls.append(result)
            self._messages.append(Message(role="tool", text=result.text, name=call.name, call_id=call.id))
            self._transcript.append({"role": "tool", "name": result.name, "content": result.text})
        return results

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _platform(self) -> _Platform:
        return _Platform(self._record_failure)

    def _record_failure(self, error: KestrlError) -> None:
        self._broken = self._broken or error

    def _prompt(self) -> list[int]:
        chat, toolset = self._chat_model.chat, self._offered.toolset
        if self._ids:
            new = chat.extension(self._messages, since=self._last_reply, last=self._ids[-1], tools=toolset)
            if new is not None:
                return self._ids + new
        return chat.prompt(self._messages, toolset)

    def _room(self, prompt_tokens: int) -> int:
        """Largest number of tokens of the next turn; 0 ends the episode and sets the stop reason."""
        limits = self._limits
        if len(self.turns) >= limits.max_turns:
            self._stop = self._stop or StopReason.MAX_TURNS
            return 0
        if not self.turns and prompt_tokens >= limits.context_length:
            raise UserInputError(
                f"scenario {self._scenario.id}: its prompt has {prompt_tokens} tokens, the engine holds "
                f"{limits.context_length}; shorten it or raise inference.contextLength",
                code=PROMPT_TOO_LONG,
            )
        room = min(limits.max_tokens - self._sampled, limits.context_length - prompt_tokens)
        if room <= 0:
            self._stop = self._stop or StopReason.MAX_TOKENS
            return 0
        return min(room, limits.max_tokens_per_turn or room)

    async def _sample(self, prompt: Sequence[int], max_tokens: int, stops: Sequence[int]) -> Sampled:
        self._turn_ends = now() + self._deadlines.turn
        with self._platform(), self._waiting.on(Boundary.ENGINE):
            async with deadline(Scope.TURN, self._turn_ends, self._waiting):
                return await self._engine.sample(
                    prompt, turn=len(self.turns), max_tokens=max_tokens, stop_token_ids=stops
                )

    def _parse(self, completion: Completion, *, reasoning: bool) -> Parsed:
        ids, finish = completion.token_ids, completion.finish_reason
        if finish == "stop" and ids[-1] in self._chat_model.stop_ids:
            ids = ids[:-1]
        return self._reader.parse(ids, self._offered.schemas, reasoning=reasoning, cut=finish == "length")

    def _record(self, prompt: Sequence[int], sampled: Sampled, text: str, *, reasoning: bool) -> Turn:
        completion = sampled.completion
        position = self._recorder.record(prompt, completion)
        turn = Turn(
            index=len(self.turns),
            row=position.row,
            start=position.start,
            end=position.end,
            text=text,
            finish_reason=completion.finish_reason,
            engine=sampled.engine,
            policy=completion.policy,
            seconds=sampled.seconds,
            reasoning_opened=reasoning,
        )
        self.turns.append(turn)
        self._sampled += len(completion.token_ids)
        self._transcript.append({"role": "assistant", "content": text})
        return turn

    async def _run_calls(self, calls: Sequence[Call]) -> list[ToolCall]:
        if len(calls) == 1:
            return [await self._run_call(calls[0], 0)]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._run_call(call, index), name=f"tool-call-{index}")
                    for index, call in enumerate(calls)
                ]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        return [task.result() for task in running]

    async def _run_call(self, call: Call, index: int) -> ToolCall:
        started = time.monotonic()
        answer = self._refusal(call, index)
        attributes = {Attr.TOOL_NAME: call.name, Attr.TURN: len(self.turns) - 1}
        with span(SpanName.TOOL_CALL, attributes) as current:
            if answer is None:
                assert call.arguments is not None
                answer = await self._dispatch(call.name, call.arguments)
            current.set_attribute(Attr.OUTCOME, answer.outcome)
        if answer.final:
            self._stop = self._stop or StopReason.FINAL_TOOL
        return ToolCall(
            turn=len(self.turns) - 1,
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
        if index >= self._tool_limits.max_parallel_calls:
            limit = self._tool_limits.max_parallel_calls
            text = f"Error: at most {limit} tool calls in one turn; this one was not made. Make it in the next turn."
            return ToolAnswer(outcome=CallOutcome.TOOL_ERROR, text=text, final=False, data={})
        if call.problem is None:
            return None
        return ToolAnswer(outcome=call.problem, text=call.message, final=False, data={})

    async def _dispatch(self, name: str, arguments: Mapping[str, Json]) -> ToolAnswer:
        with self._waiting.on(Boundary.TOOL):
            seconds = self._deadlines.tool
            if not self._tools.opened:
                # Within the turn's deadline, not the tool's: a restarting service is not a failure of the tool.
                async with deadline(Scope.TURN, self._turn_ends, self._waiting):
                    await self._tools.reachable()
                seconds *= 2  # the first call also creates the tools
            began = now()
            scope = Scope.TOOL if began + seconds < self._turn_ends else Scope.TURN  # one timer: the earlier deadline
            async with deadline(scope, min(began + seconds, self._turn_ends), self._waiting):
                return await self._tools.call(name, arguments, seconds=seconds)

    def _shorten(self, text: str) -> str:
        limit = self._tool_limits.max_tool_tokens
        cut = self._chat_model.vocabulary.cut(text, limit, reserve=CUT_RESERVE)
        if cut is None:
            return text
        self._metrics["tool_results_cut"] = self._metrics.get("tool_results_cut", 0.0) + 1
        kept, tokens = cut
        return f"{kept}\n[cut here: {tokens} tokens or more, limit {limit}]"

    def abandon(self, error: KestrlError) -> None:
        """Makes every further use by a loop that runs on after its end fail."""
        self._record_failure(error)

    @property
    def broken(self) -> KestrlError | None:
        """The first platform failure, whether or not the loop let it propagate."""
        return self._broken

    def rows(self) -> tuple[Row, ...]:
        return self._recorder.close()

    def finish(self) -> StopReason:
        """Completes the metrics; returns the stop reason."""
        outcomes = [call.outcome for call in self.tool_calls]
        self._metrics |= {
            "num_turns": len(self.turns),
            "sampled_tokens": self._sampled,
            "tool_calls": len(outcomes),
            "forks": self._recorder.forks,
            "engine_retries": self._engine.retries,
            **{name: outcomes.count(outcome) for name, outcome in TOOL_ERRORS},
        }
        if self._stop is not None:
            return self._stop
        cut = bool(self.turns) and self.turns[-1].finish_reason == "length"
        return StopReason.MAX_TOKENS if cut else StopReason.ANSWERED
