"""An episode in progress: the `Conversation` that an agent loop uses, and the record of the episode.

The conversation owns the tokens. Each prompt of a linear loop is the last one, the sampled tokens and the ids of new
messages; a loop cannot change it. Calls with prompts of their own may be made several at once: each has its number,
seed, row, share of the budget and deadline from its arrival on. The conversation also keeps the first platform failure,
so that a loop that swallows one cannot continue.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace

from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel
from kestrl.agents import Call, Completion, Endpoint, Limits, Reply, Tokenizer
from kestrl.episode import CallOutcome, Json, Row, Scenario, StopReason, ToolCall, Turn
from kestrl.episode.deadlines import RolloutDeadlines
from kestrl.errors import Boundary, KestrlError, UserCodeError, encodable
from kestrl.tools import ToolSchema
from kestrl_rollout.conversation.admission import Admission
from kestrl_rollout.conversation.agent_calls import AgentCalls
from kestrl_rollout.conversation.main_row import MainRow, main_row
from kestrl_rollout.conversation.platform_code import PlatformCode
from kestrl_rollout.conversation.row_store import Place, RowStore
from kestrl_rollout.conversation.tool_calls import EpisodeToolCalls, ToolLimits, error_counts
from kestrl_rollout.conversation.tool_session import OfferedTools, ToolSession
from kestrl_rollout.conversation.transcript import Transcript
from kestrl_rollout.conversation.transformers_tokenizer import TransformersTokenizer
from kestrl_rollout.conversation.turn_texts import TurnTexts
from kestrl_rollout.deadlines import Scope, Waiting, deadline, now
from kestrl_rollout.engine.engine_session import EngineSession, ModelCall, Sampled
from kestrl_rollout.gateway.sampler import ChatCall, ChatTurn, Server, TokenCall

NOTHING_SHOWN = "(nothing is shown)"
"""User message after an action upon which the environment shows nothing."""


class EpisodeConversation:
    """Implements `kestrl.agents.Conversation`."""

    def __init__(
        self,
        *,
        scenario: Scenario,
        seed: int,
        limits: Limits,
        deadlines: RolloutDeadlines,
        chat_model: ChatModel,
        engine: EngineSession,
        offered: OfferedTools,
        tools: ToolSession,
        tool_limits: ToolLimits,
        waiting: Waiting,
        gateway: Server,
        ends: float,
    ) -> None:
        self._gateway = gateway
        self._scenario = scenario
        self._seed = seed
        self._limits = limits
        self._deadlines = deadlines
        self._ends = ends
        self._chat_model = chat_model
        self._texts = TurnTexts(chat_model)
        self._engine = engine
        self._offered = offered
        self._waiting = waiting
        self._calls = EpisodeToolCalls(
            tools,
            limits=tool_limits,
            vocabulary=chat_model.vocabulary,
            seconds=deadlines.tool,
            waiting=waiting,
            boundary=offered.boundary,
        )
        self._messages = [Message(role=message["role"], text=message["content"]) for message in scenario.messages]
        self._transcript = Transcript(scenario.messages)
        self._store = RowStore()
        self._admission = Admission(self._store, limits, seed, scenario=scenario.id, check=self._check)
        self._ids: list[int] = []
        """The row of a linear loop so far: the last prompt and the tokens sampled after it."""
        self._last_reply = 0
        """Index of the model's last message."""
        self._generating = False
        self._by_tokens = False
        self._named_row: int | None = None
        self._metrics: dict[str, float] = {}
        self._info: dict[str, Json] = {}
        self._turn_ends = now() + deadlines.turn
        self._stop: StopReason | None = None
        self._broken: KestrlError | None = None
        self._over = False
        self.turns: list[Turn] = []
        self.tool_calls: list[ToolCall] = []
        self.job_tools = AgentCalls(
            self._calls,
            offered.tools,
            self.turns,
            seconds=deadlines.turn,
            check=self._check,
            platform=self._platform,
        )

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
    def deadline(self) -> float:
        return self._ends

    @property
    def limit(self) -> StopReason | None:
        return self._admission.reached or self.job_tools.stop

    @property
    def messages(self) -> Sequence[Mapping[str, Json]]:
        return self._transcript.messages

    @property
    def metrics(self) -> MutableMapping[str, float]:
        return self._metrics

    @property
    def info(self) -> MutableMapping[str, Json]:
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        return TransformersTokenizer(self._chat_model)

    def append_user(self, text: str) -> None:
        if not isinstance(text, str) or encodable(text) != text:  # pyright: ignore[reportUnnecessaryIsInstance] - a user's loop
            raise UserCodeError("append_user() takes text without lone surrogates", code="bad_message")
        self._check_order("append_user()")
        self._messages.append(Message(role="user", text=text))
        self._transcript.append("user", text)

    @property
    def prompt_tokens(self) -> int:
        with self._platform():
            return len(self._prompt())

    def compact(self, text: str) -> None:
        self.append_user(text)
        *before, last = (Message(role=message["role"], text=message["content"]) for message in self._scenario.messages)
        self._messages = [*before, replace(last, text=f"{last.text}\n\n{text}")]
        self._ids, self._last_reply = [], 0

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
        self._check_order("generate()")
        if self._stop is not None or self._admission.reached is not None:
            return None
        with self._platform():
            prompt = self._prompt()
            if not self._admission.has_room(len(prompt)):
                return None
        seed = self._admission.seed_of_turn(len(self.turns))
        with self._admission.placed(prompt) as place:
            self._generating = True
            try:
                sampled = await self._sample(place, seed, None, self._chat_model.stop_ids)
            finally:
                self._generating = False
            with self._platform():
                reasoning = self._chat_model.chat.reasons(self._messages, self._offered.toolset)
                parsed = self._texts.parse(sampled.completion, self._offered.schemas, reasoning=reasoning)
            turn = self._record(place, seed, sampled, parsed.text, reasoning=reasoning)
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
        call = TokenCall(prompt_ids=prompt_ids, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        return (await self._generate_tokens(call))[1]

    async def generate_served(self, call: TokenCall) -> Completion:
        """Implements `kestrl_rollout.gateway.sampler.Sampler`."""
        turn, completion = await self._generate_tokens(call)
        with self._platform():
            parsed = self._texts.parse(
                completion, self._offered.schemas, reasoning=turn.reasoning_opened, further=call.stop_token_ids
            )
        self.job_tools.add_turn(turn.index, parsed.calls, results_shown=False)
        return completion

    async def _generate_tokens(self, call: TokenCall) -> tuple[Turn, Completion]:
        stops = tuple(dict.fromkeys((*self._chat_model.stop_ids, *call.stop_token_ids)))
        with self._placed_by_tokens(call.prompt_ids, call.max_tokens) as (place, seed):
            sampled = await self._sample(place, seed, call.max_tokens, stops)
            reasoning = self._texts.opens_reasoning(place.prompt)
            text = self._texts.text(sampled.completion, stops, reasoning=reasoning)
            return self._record(place, seed, sampled, text, reasoning=reasoning), sampled.completion

    async def generate_chat(self, call: ChatCall) -> ChatTurn:
        """Implements `kestrl_rollout.gateway.sampler.Sampler`."""
        with self._placed_by_tokens(call.prompt_ids, call.max_tokens) as (place, seed):
            sampled = await self._sample(place, seed, call.max_tokens, self._chat_model.stop_ids)
            with self._platform():
                completion, stop = self._texts.cut(sampled.completion, call.stops)
                reasoning = self._texts.opens_reasoning(place.prompt)
                parsed = self._texts.parse(completion, call.schemas, reasoning=reasoning)
            turn = self._record(place, seed, replace(sampled, completion=completion), parsed.text, reasoning=reasoning)
        self._transcript.set_history(turn.row, call.history, parsed.text)
        self.job_tools.add_turn(turn.index, parsed.calls)
        return ChatTurn(turn=turn, completion=completion, parsed=parsed, stop=stop)

    def beginning(self, row: int, end: int) -> Sequence[int]:
        return self._store.beginning(row, end)

    @contextmanager
    def _placed_by_tokens(self, prompt_ids: Sequence[int], max_tokens: int | None) -> Generator[tuple[Place, int]]:
        """The place and the seed of a call with a prompt of its own."""
        self._check()
        if self._generating or (self.turns and not self._by_tokens):
            raise UserCodeError("generate_tokens() cannot follow generate() in one episode", code="mixed_loop")
        if max_tokens is not None and max_tokens < 1:
            raise UserCodeError(f"generate_tokens(max_tokens={max_tokens}): at least 1", code="bad_max_tokens")
        self._by_tokens = True
        self.job_tools.check_open()
        prompt = list(prompt_ids)
        self._admission.check_room(len(prompt))
        seed = self._admission.seed_of_prompt(prompt)
        with self._admission.placed(prompt) as place:
            yield place, seed

    def serve(self) -> AbstractAsyncContextManager[Endpoint]:
        return self._gateway.serve(self)

    def keep(self, token_ids: Sequence[int], mask: Sequence[int]) -> None:
        row = self._store.set_training_mask(token_ids, mask)
        self._named_row = row if self._named_row is None else self._named_row

    def set_main(self, token_ids: Sequence[int]) -> None:
        self._named_row = self._store.locate(token_ids)

    async def call_tools(self, calls: Sequence[Call]) -> Sequence[ToolCall]:
        self._check()
        self._check_order("call_tools()")
        with self._platform():
            results = await self._calls.run(calls, turn=len(self.turns) - 1, ends=self._turn_ends)
        self._check_order("call_tools()")
        self._stop = self._stop or (self.limit if self._calls.final else None)
        for call, result in zip(calls, results, strict=True):
            self.tool_calls.append(result)
            self._messages.append(Message(role="tool", text=result.text, name=call.name, call_id=call.id))
            self._transcript.append("tool", result.text, name=result.name)
        return results

    async def act(self, text: str) -> bool:
        self._check()
        self._check_order("act()")
        if not self._offered.act:
            return False
        with self._platform():
            answer = await self._calls.act(self._offered.act, text, turn=len(self.turns) - 1, ends=self._turn_ends)
        if answer.outcome is not CallOutcome.OK:
            self._metrics["invalid_actions"] = self._metrics.get("invalid_actions", 0.0) + 1.0
        if answer.final:
            return False
        self.append_user(answer.text or NOTHING_SHOWN)
        return True

    def _check_order(self, act: str) -> None:
        """Refuses what would change the conversation while the model's turn is being sampled."""
        if self._generating:
            raise UserCodeError(f"{act} while generate() runs; await it first", code="concurrent_turns")

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._check_over()

    def _platform(self) -> PlatformCode:
        return PlatformCode(self.abandon)

    def _prompt(self) -> list[int]:
        chat, toolset = self._chat_model.chat, self._offered.toolset
        if self._ids:
            new = chat.extension(self._messages, since=self._last_reply, last=self._ids[-1], tools=toolset)
            if new is not None:
                return self._ids + new
        return chat.prompt(self._messages, toolset)

    async def _sample(self, place: Place, seed: int, max_tokens: int | None, stops: Sequence[int]) -> Sampled:
        with self._waiting.call(Boundary.ENGINE) as waiting:
            call = ModelCall(
                number=place.call,
                seed=seed,
                lane=place.lane,
                prompt_ids=place.prompt,
                max_tokens=await self._admission.admitted(place, max_tokens),
                stop_token_ids=stops,
            )
            ends = self._turn_ends = now() + self._deadlines.turn
            with self._platform():
                async with deadline(Scope.TURN, ends, waiting):
                    sampled = await self._engine.sample(call)
        self._check_over()
        return sampled

    def _record(self, place: Place, seed: int, sampled: Sampled, text: str, *, reasoning: bool) -> Turn:
        completion = sampled.completion
        position = self._store.record(place, completion)
        self._admission.spend(place, len(completion.token_ids))
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
            seed=seed,
        )
        self.turns.append(turn)
        self._transcript.append("assistant", text, row=position.row)
        return turn

    def _check_over(self) -> None:
        if self._over:
            raise UserCodeError("the episode is over; what was still being sampled is not used", code="episode_over")

    def abandon(self, error: KestrlError) -> None:
        """Makes every further use by a loop that runs on after its end fail."""
        self._broken = self._broken or error

    @property
    def broken(self) -> KestrlError | None:
        """The first platform failure, whether or not the loop let it propagate."""
        return self._broken

    @property
    def main(self) -> MainRow | None:
        """The main row, with its conversation."""
        return main_row(self._store.facts, linear=not self._by_tokens, loop_row=self._named_row)

    @property
    def main_messages(self) -> Sequence[Mapping[str, Json]]:
        """The conversation of the main row as text."""
        return self._transcript.of(self.main)

    def rows(self) -> tuple[Row, ...]:
        return self._store.close()

    def finish(self) -> StopReason:
        """Ends the conversation and completes the metrics; returns the stop reason."""
        self._over = True
        self.tool_calls += self.job_tools.records()
        self._metrics |= {
            "num_turns": len(self.turns),
            "sampled_tokens": self._admission.sampled,
            "tool_calls": len(self.tool_calls),
            "forks": self._store.forks,
            **self._engine.metrics(),
            **error_counts(self.tool_calls),
            **self.job_tools.metrics(),
        }
        main = self.main
        last = [turn for turn in self.turns if main is not None and turn.row == main.row][-1:]
        cut = any(turn.finish_reason == "length" for turn in last)
        return self._stop or self.limit or (StopReason.MAX_TOKENS if cut else StopReason.ANSWERED)
