"""Conversations as token ids, extended without rendering again what the engine has seen.

`prompt` renders a whole conversation once. `extension` gives what follows the model's turn: the text the template puts
between the end of that turn and the next one's beginning. It is used only when verified: the template must write
everything before the turn exactly as in the prompt that the model saw. Where it does not (a template that deletes old
reasoning), there is no extension, and the caller forks a new row.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from kestrl._shared.text.chat_template import (
    MARK,
    ChatTemplate,
    Skeleton,
    Slot,
    TemplateRefused,
    find_mark,
    mark,
    skeleton,
)
from kestrl._shared.text.marking import Shape, call_id, call_message, call_turns, marked
from kestrl._shared.text.method_cache import method_cache
from kestrl._shared.text.toolset import ToolSet
from kestrl._shared.text.vocabulary import Part, Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation."""

    role: str
    text: str
    """The message's text; of an assistant without its reasoning, if that could be separated."""
    ids: Sequence[int] | None = None
    """Sampled tokens of an assistant's `text`, used unchanged."""
    reasoning: str | None = None
    reasoning_ids: Sequence[int] | None = None
    name: str = ""
    """The tool of a result, as the model named it."""
    call_id: str = ""
    """The id that the model gave the call of a result, if any."""


def shape(messages: Sequence[Message]) -> Shape:
    return tuple(
        (message.role, message.reasoning is not None if message.role == "assistant" else not message.text.strip())
        for message in messages
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendering with slots: control tokens, text, and slots to fill."""

    text: str
    parts: tuple[Part | Slot, ...]
    reasons: bool
    """Whether the template opens the reasoning, so that the model's turn begins inside it."""


class Chat:
    """Converts conversations to token ids with a template and a vocabulary. Thread-safe."""

    def __init__(
        self,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        *,
        with_calls: bool = False,
        ends: Collection[int] = (),
    ) -> None:
        """Uses a template.

        Args:
            template: The template.
            vocabulary: The model's vocabulary.
            with_calls: Whether the template takes tool results only behind a message with `tool_calls`.
            ends: Control tokens of which any one ends a turn, so that a sampled one replaces the template's.
        """
        self._template = template
        self.vocabulary = vocabulary
        self.with_calls = with_calls
        self._ends = frozenset(ends)
        self._prompt = method_cache(self._render, 512)
        self._extension = method_cache(self._extend, 512)
        self._toolset = lru_cache(maxsize=64)(_toolset)

    def close(self) -> None:
        """Ends the process of the template."""
        self._template.close()

    def toolset(self, tools: Sequence[Mapping[str, Any]]) -> ToolSet:
        """The tool set of plain definitions; the same object for equal ones."""
        return self._toolset(json.dumps(tools, ensure_ascii=False))

    @property
    def source(self) -> str:
        """The text of the template."""
        return self._template.source

    def render(self, messages: Sequence[Mapping[str, Any]], tools: ToolSet, *, generate: bool) -> str:
        """What the template writes for marked messages, with the marks.

        Args:
            messages: As `marked` gives them.
            tools: The tool set.
            generate: Whether the model's turn begins behind them.

        Raises:
            TemplateRefused: The template refuses them.
        """
        return self._template.render(messages, tools.marked, generate=generate).text

    def prompt(self, messages: Sequence[Message], tools: ToolSet) -> list[int]:
        """Ids of a whole conversation, up to where the model's turn begins.

        Raises:
            UserInputError: The template refuses the conversation, or leaves out or repeats a message.
        """
        return self._fill(self._prompt(shape(messages), tools).parts, messages, tools)

    def rendered(self, messages: Sequence[Message], tools: ToolSet) -> tuple[str | Slot, ...]:
        """A conversation as the template writes it, with unfilled slots."""
        return skeleton(self._prompt(shape(messages), tools).text).parts

    def text(self, messages: Sequence[Message], tools: ToolSet) -> str:
        """A conversation as text, up to where the model's turn begins.

        Raises:
            UserInputError: As `prompt`.
        """
        return "".join(
            part if isinstance(part, str) else part.fill(_text(part, messages, tools))
            for part in self.rendered(messages, tools)
        )

    def reasons(self, messages: Sequence[Message], tools: ToolSet) -> bool:
        """Whether the turn after these messages begins inside the model's reasoning."""
        return self._prompt(shape(messages), tools).reasons

    def extension(
        self, messages: Sequence[Message], *, since: int, last: int | None, tools: ToolSet
    ) -> list[int] | None:
        """Ids from the end of a turn to the beginning of the next.

        Args:
            messages: The whole conversation.
            since: Index of the assistant's message in it; what follows is new.
            last: The last sampled token, which may be the one that closes a turn.
            tools: The tool set of the prompt.

        Returns:
            The ids to append, or None if the template now writes the earlier conversation differently.
        """
        parts = self._extension(shape(messages), since, tools)
        if parts is None:
            return None
        if parts and (parts[0] == last or {parts[0], last} <= self._ends):
            parts = parts[1:]
        return self._fill(parts, messages, tools)

    def closing(self, messages: Sequence[Message], *, since: int, tools: ToolSet) -> int | None:
        """The control token that follows a turn in the conversation; None if text does.

        Args:
            messages: The whole conversation.
            since: Index of the assistant's message in it.
            tools: The tool set of the prompt.
        """
        parts = self._prompt(shape(messages), tools).parts
        behind = [part for slot, part in pairwise(parts) if isinstance(slot, Slot) and slot.name == f"a{since}"]
        return behind[0] if behind and isinstance(behind[0], int) else None

    def _render(self, conversation: Shape, tools: ToolSet) -> Prompt:
        rendered = self._rendered(conversation, tools)
        names = [part.name for part in rendered.parts if isinstance(part, Slot)]
        for index, (role, flag) in enumerate(conversation):
            expected = role == "assistant" or not flag
            if names.count(f"m{index}" if role != "assistant" else f"a{index}") != expected:
                raise _left_out(index, role)
        tail = rendered.parts[-1] if rendered.parts and isinstance(rendered.parts[-1], str) else ""
        return Prompt(rendered.text, self.cut(rendered), tail.rfind("<think>") > tail.rfind("</think>"))

    def _rendered(self, conversation: Shape, tools: ToolSet) -> Skeleton:
        messages = marked(conversation, with_calls=self.with_calls)
        rendered = self._template.render(messages, tools.marked, generate=True)
        if not self.with_calls:
            return rendered
        text = rendered.text
        for index, results in call_turns(conversation):
            call_text, end = self._synthetic(index, results)
            if text.count(call_text) != 1:
                raise _left_out(index, "assistant")
            text = text.replace(call_text, mark(f"a{index}") + end)
        return skeleton(text)

    def _synthetic(self, index: int, results: int) -> tuple[str, str]:
        """What the template writes for the synthetic calls of a turn, and the part of it that closes the turn."""
        start = marked((("user", False),), with_calls=True)
        before = self._template.render(start, (), generate=True).text
        rendered = self._template.render([*start, call_message(index, results)], (), generate=False).text
        if not rendered.startswith(before):  # in the history it has no reasoning where the prompt opens it
            before = before.rstrip().removesuffix("<think>")
        if not rendered.startswith(before):
            raise TemplateRefused("the chat template writes a message differently once a tool call follows it")
        call_text = rendered[len(before) :]
        parts = self.vocabulary.structure(call_text)
        control = [part for part in parts if isinstance(part, int)]
        if not control:
            return call_text, ""
        behind = parts[-1] if isinstance(parts[-1], str) else ""
        end = next(text for text, token in self.vocabulary.added.items() if token == control[-1]) + behind
        return call_text, "" if MARK in end else end

    def _extend(self, conversation: Shape, since: int, tools: ToolSet) -> tuple[Part | Slot, ...] | None:
        before = self._prompt(conversation[:since], tools).text
        after = self._prompt(conversation, tools).text
        if not after.startswith(before):
            return None
        start = len(before)
        if conversation[since][1]:
            thought = find_mark(after, f"r{since}", start)
            if thought is None:
                return None  # the template drops the reasoning that the model's history holds
            start = thought[1]
        answer_mark = find_mark(after, f"a{since}", start)
        return None if answer_mark is None else self.cut(skeleton(after[answer_mark[1] :]))

    def cut(self, rendered: Skeleton) -> tuple[Part | Slot, ...]:
        """A rendering as control tokens, text and slots."""
        parts: list[Part | Slot] = []
        for part in rendered.parts:
            if isinstance(part, Slot):
                parts.append(part)
            else:
                parts += self.vocabulary.structure(part)
        return tuple(parts)

    def _fill(self, parts: Sequence[Part | Slot], messages: Sequence[Message], tools: ToolSet) -> list[int]:
        filled: list[Part] = []
        for part in parts:
            if isinstance(part, Slot):
                filled += _value(part, messages, tools)
            else:
                filled.append(part)
        return self.vocabulary.encode(filled)


def _toolset(definitions: str) -> ToolSet:
    return ToolSet.of(json.loads(definitions))


def _left_out(index: int, role: str) -> TemplateRefused:
    return TemplateRefused(f"the chat template leaves out or repeats message {index} ({role})")


def _value(slot: Slot, messages: Sequence[Message], tools: ToolSet) -> Sequence[Part]:
    kind = slot.name[0]
    if kind in "ar":
        message = messages[int(slot.name[1:])]
        ids = message.reasoning_ids if kind == "r" else message.ids
        if ids is not None:
            return ids
    return [slot.fill(_text(slot, messages, tools))]


def _text(slot: Slot, messages: Sequence[Message], tools: ToolSet) -> str:
    """The untrusted string that belongs in a slot."""
    kind, index = slot.name[0], int(slot.name[1:])
    match kind:
        case "t":
            return tools.words[index]
        case "r":
            return messages[index].reasoning or ""
        case "n":
            return messages[index].name
        case "c":
            return call_id(slot, messages[index].call_id)
        case _:
            return messages[index].text
