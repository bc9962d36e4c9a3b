"""The conversations of an episode's client: each request continues a row where it is proven, and else begins one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kestrl._shared.telemetry import event
from kestrl._shared.telemetry.names import Attr, EventName
from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel
from kestrl.agents import Call, Completion
from kestrl.episode import CallOutcome
from kestrl.errors import UserCodeError, UserInputError
from kestrl_rollout.gateway.chat_types import ChatReply, ChatRequest, SampledToken, SentCall, new_id
from kestrl_rollout.gateway.fields import Refused
from kestrl_rollout.gateway.sampler import ChatCall, ChatTurn, Sampler, count
from kestrl_rollout.history.canonical import ChatHistory, call_places
from kestrl_rollout.history.reader import HistoryReader
from kestrl_rollout.history.system_messages import joined
from kestrl_rollout.history.threads import ForkReason, KnownTurn, Match, Threads


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    ids: Sequence[int]
    messages: Sequence[Message]
    match: Match
    reason: ForkReason | None
    """Why it begins a row, if it does."""


class Dialogue:
    """Samples for clients that send messages, over the rows of one episode."""

    def __init__(self, chat_model: ChatModel, sampler: Sampler, *, joins_system: bool = False) -> None:
        """Samples for one episode.

        Args:
            chat_model: Renders and parses.
            sampler: The episode.
            joins_system: Whether the template has a place for one system message alone.
        """
        self._joins_system = joins_system
        self._chat_model = chat_model
        self._sampler = sampler
        self._history = HistoryReader(chat_model)
        self._threads = Threads()
        self._rows = set[int]()

    def count_tokens(self, history: ChatHistory) -> int:
        """Length of the prompt that a request would have.

        Raises:
            Refused: The client has to change it.
        """
        return len(self._prompt(history).ids)

    async def reply(self, request: ChatRequest) -> ChatReply:
        """Samples a turn.

        Raises:
            Refused: The client has to change its request.
            LimitReached: A limit of the episode leaves no token.
            KestrlError: The engine failed, or a deadline passed.
        """
        sampler, prompt = self._sampler, self._prompt(request.history)
        self._show_results(prompt.match)
        context = sampler.limits.context_length
        if len(prompt.ids) >= context:
            raise Refused(
                f"the prompt has {len(prompt.ids)} tokens, the model's context {context}; shorten the conversation",
                code="context_length_exceeded",
                field="messages",
            )
        self._count_asked(request, len(prompt.ids))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in request.history.tools}
        turn = await sampler.generate_chat(
            ChatCall(
                prompt_ids=prompt.ids,
                history=_record(prompt.messages),
                schemas=schemas,
                max_tokens=request.max_tokens,
                stops=request.stops,
            )
        )
        return self._answer(request, prompt, turn)

    def _show_results(self, match: Match) -> None:
        """Records results of the calls of turns that were sampled here."""
        calls: Mapping[str, int] = {}
        turn: KnownTurn | None = None
        for index, message in enumerate(match.history.messages):
            if message["role"] == "assistant":
                calls, turn = call_places(message), match.known.get(index)
            place = calls.get(str(message.get("tool_call_id") or "")) if message["role"] == "tool" else None
            if turn is not None and place is not None and place < len(turn.places):
                failed = bool(message.get("is_error"))
                self._sampler.job_tools.show(turn.index, turn.places[place], message["content"], failed=failed)

    def _count_asked(self, request: ChatRequest, prompt_tokens: int) -> None:
        limits, metrics = self._sampler.limits, self._sampler.metrics
        limit = min(limits.max_tokens, limits.max_tokens_per_turn or limits.max_tokens)
        clamped = request.max_tokens is not None and request.max_tokens > min(
            limit, limits.context_length - prompt_tokens
        )
        for name in (*request.metrics, *(["sampling_forced.max_tokens"] if clamped else ())):
            count(metrics, name)

    def _prompt(self, history: ChatHistory) -> _Prompt:
        if not history.messages or history.messages[-1]["role"] == "assistant":
            raise Refused(
                "the conversation must end with a message of the user or a tool's result: a turn of the model that "
                "the client has begun is not supported in training",
                code="invalid_value",
                field="messages",
            )
        if self._joins_system:
            history = replace(history, messages=joined(history.messages))
        try:
            return self._rendered(history)
        except RecursionError as error:
            raise Refused("the request is nested too deeply", code="invalid_value") from error
        except UserInputError as error:  # the template has no place for a message
            raise Refused(str(error), code="template_refused", field="messages") from error
        except UserCodeError as error:
            if error.code != "unsupported_content":
                raise
            raise Refused(str(error), code=error.code, field="messages") from error

    def _rendered(self, history: ChatHistory) -> _Prompt:
        match, chat = self._threads.match(history), self._chat_model.chat
        sampled_messages = {index: turn.message for index, turn in match.known.items()}
        renamed = _with_ids_of_the_model(history.messages, match.known)
        messages = self._history.messages(renamed, rendered=match.since + 1, sampled=sampled_messages)
        toolset = chat.toolset(history.tools)
        if match.turn is not None:
            before = self._sampler.beginning(match.turn.row, match.turn.end)
            new = chat.extension(messages, since=match.since, last=before[-1], tools=toolset)
            if new is not None:
                return _Prompt(ids=[*before, *new], messages=messages, match=match, reason=match.reason)
            messages = self._history.messages(renamed, sampled=sampled_messages)
        text = chat.text(messages, toolset)
        for tool in history.tools:
            if tool["function"]["name"] not in text:
                raise Refused(
                    "the chat template does not render tools, so that the model would never call them; name one that "
                    "does with agent.template",
                    code="tools_not_rendered",
                    field="tools",
                )
        reason = match.reason if match.turn is None else ForkReason.TEMPLATE_REWRITES
        return _Prompt(ids=chat.prompt(messages, toolset), messages=messages, match=match, reason=reason)

    def _answer(self, request: ChatRequest, prompt: _Prompt, sampled: ChatTurn) -> ChatReply:
        completion, parsed, turn = sampled.completion, sampled.parsed, sampled.turn
        offered = bool(request.history.tools)
        places = [place for place, call in enumerate(parsed.calls) if offered and _is_readable(call)]
        readable = [parsed.calls[place] for place in places]
        unread = [call.raw for place, call in enumerate(parsed.calls) if place not in places]
        if unread:
            count(self._sampler.metrics, "calls_sent_as_text", len(unread))
        content = "\n".join(text for text in (parsed.content, *unread) if text)
        if sampled.stop:
            content = content.partition(sampled.stop)[0]
        calls = [
            SentCall(id=new_id("call_"), name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
            for call in readable
        ]
        extends = prompt.match.turn is not None and prompt.match.turn.row == turn.row
        turn_record = KnownTurn(
            index=turn.index,
            row=turn.row,
            end=turn.end,
            message=parsed.message,
            call_ids=[call.id for call in readable],
            places=places,
        )
        self._keep(prompt, turn_record, calls, [content, content + sampled.stop])
        return ChatReply(
            content=content,
            reasoning=parsed.message.reasoning or "",
            calls=calls,
            cut=completion.finish_reason == "length",
            stop=sampled.stop,
            policy=completion.policy,
            sampled_tokens=len(completion.token_ids),
            tokens=self._sampled_tokens(completion) if request.options.get("logprobs") else (),
            prompt_tokens=len(prompt.ids),
            cached_tokens=prompt.match.turn.end if extends and prompt.match.turn else 0,
        )

    def _sampled_tokens(self, completion: Completion) -> list[SampledToken]:
        decode = self._chat_model.vocabulary.decode
        return [
            SampledToken(text=decode([token]), logprob=logprob)
            for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]

    def _keep(self, prompt: _Prompt, turn: KnownTurn, calls: Sequence[SentCall], contents: Sequence[str]) -> None:
        """Remembers a turn, and counts a fork with its price: the tokens that are context once more.

        Args:
            prompt: Its prompt.
            turn: The turn.
            calls: Its calls as they were sent.
            contents: Texts as which a client may send it back.
        """
        if turn.row not in self._rows and self._rows:
            # Where nothing was known when the call came, another that came with it has begun the first row since.
            reason = prompt.reason or self._threads.reason(prompt.match) or ForkReason.RESAMPLED
            count(self._sampler.metrics, f"forks.{reason}")
            count(self._sampler.metrics, f"fork_tokens.{reason}", len(prompt.ids))
            event(EventName.FORK, {Attr.FORK_REASON: reason, Attr.INPUT_TOKENS: len(prompt.ids)})
        self._rows.add(turn.row)
        called = [{"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        echoes = [{"role": "assistant", "content": text, "tool_calls": called} for text in dict.fromkeys(contents)]
        self._threads.add(prompt.match, echoes, turn)


def _is_readable(call: Call) -> bool:
    """Whether a call can be sent as one. Whether there is such a tool is the client's to say."""
    return call.problem in (None, CallOutcome.UNKNOWN_TOOL) and bool(call.name) and call.arguments is not None


def _with_ids_of_the_model(
    messages: Sequence[Mapping[str, Any]], turns: Mapping[int, KnownTurn]
) -> list[Mapping[str, Any]]:
    """The messages, with results of calls that the model gave ids under those."""
    renamed: list[Mapping[str, Any]] = []
    calls: Sequence[Mapping[str, Any]] = ()
    ids: Sequence[str] | None = None
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            calls, ids = message["tool_calls"], turns[index].call_ids if index in turns else None
        place = call_places({"tool_calls": calls}).get(str(message.get("tool_call_id") or ""))
        if message["role"] == "tool" and place is not None:
            name = calls[place]["function"]["name"]
            call_id = message["tool_call_id"] if ids is None else ids[place]
            message = {**message, "name": name, "tool_call_id": call_id}
        renamed.append(message)
    return renamed


def _record(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """What a prompt says, as text."""
    return [
        {"role": message.role, **({"name": message.name} if message.name else {}), "content": _said(message)}
        for message in messages
    ]


def _said(message: Message) -> str:
    if message.reasoning is None:
        return message.text
    return f"<think>\n{message.reasoning}\n</think>\n\n{message.text}"
