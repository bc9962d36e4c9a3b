"""Conversations as training rows: exactly the tokens that an engine is given and that the model should have sampled.

Prompts are those of a rollout of the same conversation, by the same `Chat`: text of users, tools and the model itself
never becomes a control token, and a row goes on as long as the template only appends. Where it renders the history
anew, as templates do that drop earlier reasoning, a new row begins, and no token is learned twice.

A turn is what the template writes for the message behind its prompt, up to the first token that ends a turn. All that
the message holds has to be in it: a template that leaves out calls, reasoning or tools would teach an empty answer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from kestrl._shared.text.chat import Message, shape
from kestrl._shared.text.chat_model import ChatModel
from kestrl._shared.text.chat_template import Slot, TemplateRefused, mark, skeleton
from kestrl._shared.text.marking import marked
from kestrl._shared.text.parser import THINK_TAGS, Parsed
from kestrl._shared.text.toolset import NO_TOOLS
from kestrl._shared.text.vocabulary import Part, Vocabulary
from kestrl.agents import Call
from kestrl.data.conversations import REASONING, Conversation
from kestrl.errors import UserInputError
from kestrl.formats import Schemas
from kestrl_learner.batch.rows import TrainRow

ANSWERED = "Thank you."
"""A message behind the last turn, which shows with which token the template closes it."""


@dataclass(slots=True)
class EncodedRow:
    """Token ids, and 1 where a token is learned."""

    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])

    def add(self, ids: Sequence[int], *, learned: bool) -> None:
        self.ids += ids
        self.mask += [int(learned)] * len(ids)


class ConversationEncoder:
    """Encodes conversations for a model.

    Args:
        load: Loads the model's tokenizer and template, verified for conversations with or without tools.
        vocabulary: The model's, which decodes what was encoded.
    """

    def __init__(self, load: Callable[[bool], ChatModel], vocabulary: Vocabulary) -> None:
        self._load = cache(load)
        self._tokenizer = vocabulary

    def encode(self, conversation: Conversation) -> list[EncodedRow]:
        """The rows of a conversation, each with a learned token.

        Raises:
            UserInputError: The template cannot render it, or leaves out what a message holds.
        """
        messages = conversation.messages
        with_tools = bool(conversation.tools) or any(
            message["role"] == "tool" or message.get("tool_calls") for message in messages
        )
        rows = _Rows(self._load(with_tools), conversation.tools)
        where = f"{conversation.place}: " if conversation.place else ""
        for index, message in enumerate(messages):
            try:
                rows.add(index, message, messages[index + 1 :])
            except TemplateRefused as error:
                raise UserInputError(f"{where}messages[{index}]: the chat template refuses it: {error}") from error
            except UserInputError as error:
                raise UserInputError(f"{where}{error}") from error
        return [row for row in rows.rows if any(row.mask)]


class _Rows:
    """The rows of one conversation, message by message."""

    def __init__(self, model: ChatModel, tools: Sequence[Mapping[str, Any]]) -> None:
        self._model, self._chat = model, model.chat
        self._toolset = self._chat.toolset(list(tools)) if tools else NO_TOOLS
        self._schemas: Schemas = {
            str(function["name"]): function.get("parameters") or {}
            for function in (tool.get("function", tool) for tool in tools)
        }
        self._said: list[Message] = []
        self._calls: Sequence[Call] = ()
        """Calls of the last turn that no result has followed yet."""
        self._ids_of_calls: list[str] = []
        """Their ids in the row."""
        self._last_turn: int | None = None
        self.rows: list[EncodedRow] = []

    def add(self, index: int, message: Mapping[str, Any], following: Sequence[Mapping[str, Any]]) -> None:
        """Adds a message.

        Raises:
            UserInputError: What it holds is not rendered.
        """
        if message["role"] != "assistant":
            self._said.append(self._prompt_message(message))
            return
        if self._last_turn is None and self._toolset is not NO_TOOLS:
            self._check_tools()
        prompt = self._prompt()
        if not self.rows or prompt[: len(self.rows[-1].ids)] != self.rows[-1].ids:
            self.rows.append(EncodedRow())
        row = self.rows[-1]
        row.add(prompt[len(row.ids) :], learned=False)
        turn, parsed = self._turn(index, message, following)
        row.add(turn, learned=message.get("weight", 1) != 0)
        row.mask[0] = 0  # nothing predicts the first token of an answer without a prompt
        self._last_turn = len(self._said)
        self._said.append(parsed.message)
        self._calls = parsed.calls
        self._ids_of_calls = [str(call.get("id", "")) for call in message.get("tool_calls", ())]

    def _prompt_message(self, message: Mapping[str, Any]) -> Message:
        """A message of the prompt. A result has name and id of its call, as the model wrote them."""
        name, call_id = str(message.get("name", "")), str(message.get("tool_call_id", ""))
        if message["role"] == "tool" and self._calls:
            place = self._ids_of_calls.index(call_id) if call_id in self._ids_of_calls else 0
            place = min(place, len(self._calls) - 1)
            call = self._calls[place]
            if call_id not in self._ids_of_calls:
                self._calls = self._calls[1:] or self._calls
            name, call_id = call.name, call.id
        return Message(role=str(message["role"]), text=str(message["content"]), name=name, call_id=call_id)

    def _prompt(self) -> list[int]:
        """The prompt of the next turn, as a rollout has it."""
        if self._last_turn is not None:
            row = self.rows[-1].ids
            new = self._chat.extension(self._said, since=self._last_turn, last=row[-1], tools=self._toolset)
            if new is not None:
                return row + new
        return self._chat.prompt(self._said, self._toolset)

    def _check_tools(self) -> None:
        """Raises UserInputError if the prompt does not name a tool."""
        slot_names = {part.name for part in self._chat.rendered(self._said, self._toolset) if isinstance(part, Slot)}
        for name in self._schemas:
            if f"t{self._toolset.words.index(name)}" not in slot_names:
                raise UserInputError(
                    f"tools: the chat template does not write the tool {name!r} into the prompt; give another one with "
                    "spec.template"
                )

    def _turn(
        self, index: int, message: Mapping[str, Any], following: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], Parsed]:
        """The tokens of a turn with the one that ends it, and what a worker reads from them."""
        field = f"messages[{index}]"
        vocabulary, stops = self._chat.vocabulary, self._model.stop_ids
        parts, texts = self._written(field, message)
        last = max((place for place, part in enumerate(parts) if isinstance(part, Slot)), default=-1)
        end = next((place for place in range(last + 1, len(parts)) if parts[place] in stops), None)
        body = [_filled(part, texts) for part in (parts if end is None else parts[:end])]
        ids = vocabulary.encode(body)
        reasons = self._chat.reasons(self._said, self._toolset)
        parsed = self._model.reader.parse(ids, self._schemas, reasoning=reasons)
        self._check_calls(field, message, parsed)
        closing = cast("int", parts[end]) if end is not None else self._closing(field, parsed, following)
        return [*ids, closing], parsed

    def _written(self, field: str, message: Mapping[str, Any]) -> tuple[Sequence[Part | Slot], dict[str, str]]:
        """What the template writes behind the prompt, and the texts of its slots.

        Raises:
            UserInputError: It is not behind the prompt, or something of the message is missing in it.
        """
        before_messages = marked(shape(self._said), with_calls=self._chat.with_calls)
        before = self._chat.render(before_messages, self._toolset, generate=True)
        opened = self._chat.reasons(self._said, self._toolset)
        problem = ""
        for form in _forms(message, opened=opened, tags=THINK_TAGS[1] in self._chat.source):
            try:
                rendered = self._chat.render([*before_messages, form.message], self._toolset, generate=False)
            except TemplateRefused as error:
                problem = problem or f"{field}: the chat template cannot render it: {error}"
                continue
            if not rendered.startswith(before):
                problem = (
                    f"{field}: the chat template does not render an assistant message behind the prompt that it makes "
                    "for one, so that its tokens cannot be found; give another one with spec.template"
                )
                continue
            parts = self._chat.cut(skeleton(rendered[len(before) :]))
            missing_field = form.missing(parts)
            if not missing_field:
                self._refuse_forged(field, form.names)
                return parts, form.texts
            problem = (
                f"{field}.{missing_field}: the chat template does not write it, so that it would not be learned; give "
                "another template with spec.template, or remove it"
            )
        raise UserInputError(problem)

    def _refuse_forged(self, field: str, names: Sequence[str]) -> None:
        """Raises UserInputError if a name that the template writes as structure spells a control token."""
        for name in names:
            if any(not isinstance(part, str) for part in self._chat.vocabulary.structure(name)):
                raise UserInputError(f"{field}.tool_calls: the name {name!r} spells a control token; rename it")

    def _check_calls(self, field: str, message: Mapping[str, Any], parsed: Parsed) -> None:
        """Raises UserInputError if a worker would not read the message's calls from the turn."""
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        if not self._model.detected and not calls:
            return
        parsed_calls = [(call.name, call.arguments) for call in parsed.calls]
        if calls == parsed_calls or (not self._model.detected and not parsed_calls):
            return
        if not calls:
            raise UserInputError(
                f"{field}.content: is read as a call in the format {self._model.format.name} "
                f"({parsed.calls[0].raw[:80]!r}); write calls as tool_calls"
            )
        raise UserInputError(
            f"{field}.tool_calls: what the chat template writes is not read back as these calls in the format "
            f"{self._model.format.name}; give another template with spec.template"
        )

    def _closing(self, field: str, parsed: Parsed, following: Sequence[Mapping[str, Any]]) -> int:
        """The token that ends a turn where the template closes it by what comes next (GLM)."""
        results = [entry for entry in following[:1] if entry["role"] == "tool"]
        if results or (parsed.calls and not following):
            text = str(results[0]["content"]) if results else ANSWERED
            name, call_id = (parsed.calls[0].name, parsed.calls[0].id) if parsed.calls else ("", "")
            after = Message(role="tool", text=text, name=name, call_id=call_id)
        else:
            role = str(following[0]["role"]) if following and following[0]["role"] != "assistant" else "user"
            after = Message(role=role, text=ANSWERED)
        messages = [*self._said, parsed.message, after]
        new = self._chat.extension(messages, since=len(self._said), last=None, tools=self._toolset)
        if new and new[0] in self._model.stop_ids:
            return new[0]
        raise UserInputError(
            f"{field}: the chat template ends the turn with no token that ends one, so that the model would never "
            "learn to stop; give another one with spec.template"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """A way to hand a message to a template, with marks in place of its texts."""

    message: Mapping[str, Any]
    texts: dict[str, str]
    """The text of each slot."""
    fields: dict[str, str]
    """The field of each slot, for messages."""
    names: Sequence[str]
    """Names of tools and of arguments, which are not marked."""

    def missing(self, parts: Sequence[Part | Slot]) -> str:
        """A field that the rendering does not have, or has twice; empty if all are there once."""
        slot_names = [part.name for part in parts if isinstance(part, Slot)]
        text = "".join(part for part in parts if isinstance(part, str))
        for slot, name in self.fields.items():
            if slot_names.count(slot) != 1:
                return name
        for name in self.names:
            if name not in text:
                return "tool_calls"
        return ""


def _forms(message: Mapping[str, Any], *, opened: bool, tags: bool) -> Iterator[_Form]:
    """The ways to hand a message to a template, the likeliest first: arguments as an object or as JSON text, reasoning
    as a member or between tags in the content.

    Args:
        message: Of a row.
        opened: Whether the prompt has opened the reasoning.
        tags: Whether the template looks for reasoning in the content.
    """
    reasoning_key = next((key for key in REASONING if message.get(key)), None)
    places: list[str | None] = [None]
    if reasoning_key is not None:
        places = [reasoning_key, *(key for key in REASONING if key != reasoning_key)]
    for as_text in (False, True) if message.get("tool_calls") else (False,):
        for place in places:
            yield _form(message, reasoning_key, place, opened=opened, as_text=as_text)
        if reasoning_key is not None and tags:
            yield _form(message, reasoning_key, "content", opened=opened, as_text=as_text)


def _form(
    message: Mapping[str, Any], reasoning_key: str | None, place: str | None, *, opened: bool, as_text: bool
) -> _Form:
    texts: dict[str, str] = {}
    fields: dict[str, str] = {}
    names: list[str] = []

    def marked_text(text: str, name: str) -> str:
        core = text.strip()
        if not core:
            return text
        slot = f"s{len(texts)}"
        texts[slot], fields[slot] = core, name
        start = text.index(core)
        return text[:start] + mark(slot) + text[start + len(core) :]  # templates strip white space as in the row

    def marked_value(value: Any, name: str) -> Any:
        if isinstance(value, str):
            return marked_text(value, name)
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            names.extend(entries)
            return {key: marked_value(entry, f"{name}.{key}") for key, entry in entries.items()}
        if isinstance(value, list):
            return [marked_value(entry, name) for entry in cast("list[Any]", value)]
        return value

    content = "".join(
        piece if piece in THINK_TAGS else marked_text(piece, "content") for piece in _pieces(message["content"], opened)
    )
    marked_message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning_key is not None and place is not None:
        reasoning = marked_text(str(message[reasoning_key]), reasoning_key)
        if place == "content":
            marked_message["content"] = f"{THINK_TAGS[0]}\n{reasoning}\n{THINK_TAGS[1]}\n\n{content}"
        else:
            marked_message[place] = reasoning
    calls: list[dict[str, Any]] = []
    for number, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        names.append(name)
        where = f"tool_calls[{number}].function.arguments"
        if as_text:
            marked_arguments: Any = marked_text(json.dumps(arguments, ensure_ascii=False), where)
        else:
            marked_arguments = marked_value(arguments, where)
        calls.append({**call, "type": "function", "function": {"name": name, "arguments": marked_arguments}})
    if calls:
        marked_message["tool_calls"] = calls
    return _Form(message=marked_message, texts=texts, fields=fields, names=names)


def _pieces(content: str, opened: bool) -> Iterator[str]:
    """A content, cut at the tags around the reasoning that it begins with.

    Args:
        content: Of a message.
        opened: Whether the prompt has opened the reasoning, so that the content may begin within it.
    """
    opening, closing = THINK_TAGS
    head, tag, answer = content.partition(closing)
    before, opened_here, inside = head.partition(opening)
    if not tag or not (opened or opened_here) or (opened_here and before.strip()):
        yield content
        return
    yield from (before, opened_here, inside) if opened_here else (head,)
    yield from (tag, answer)


def _filled(part: Part | Slot, texts: Mapping[str, str]) -> Part:
    return part.fill(texts[part.name]) if isinstance(part, Slot) else part


def train_row(ids: Sequence[int], mask: Sequence[int], sequence: int) -> TrainRow:
    """A row of which every masked token is learned."""
    return TrainRow(
        token_ids=array("i", ids),
        mask=bytes(mask),
        behaviour=array("f", bytes(4 * len(ids))),
        advantages=array("d", (float(on) for on in mask)),
        sequence=sequence,
        on_policy=b"\1" * sum(mask),
        policies=[""] * sum(mask),
        engines=[""] * sum(mask),
    )
