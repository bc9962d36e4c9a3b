"""Histories that a loop brings, as messages: few-shot examples, a summary, turns of another program.

An assistant message with tool calls is written in the job's tool-call format. What the format writes around a call is
structure and may be control tokens; names and arguments are text and never become one. Nothing of it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

from kestrl._shared.text.chat import Message
from kestrl._shared.text.chat_model import ChatModel
from kestrl._shared.text.chat_template import MARK
from kestrl._shared.text.vocabulary import Part
from kestrl.errors import UserCodeError, described, encodable
from kestrl.formats.objects import read_json

Calls = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class HistoryReader:
    """Reads messages in the form of OpenAI's API for one model."""

    model: ChatModel

    def messages(
        self, messages: Sequence[Mapping[str, Any]], *, rendered: int = 0, sampled: Mapping[int, Message] | None = None
    ) -> list[Message]:
        """Messages whose content is text or a list of text parts.

        Args:
            messages: The conversation.
            rendered: Number of messages whose tokens the caller has, so that their calls are not written.
            sampled: Turns that were sampled here by their index, which are taken as they are.

        Raises:
            UserCodeError: A message has another content, or calls that the job's format cannot write.
        """
        decoded: list[Message] = []
        names: dict[str, str] = {}
        for index, message in enumerate(messages):
            role, text = str(message["role"]), _text(index, message)
            if role == "assistant" and message.get("tool_calls"):
                names |= _names(message["tool_calls"])
            if sampled is not None and index in sampled:
                decoded.append(sampled[index])
                continue
            if role == "assistant" and message.get("tool_calls") and index >= rendered:
                calls = _calls(index, message["tool_calls"])
                decoded.append(self._turn(index, text, calls))
                continue
            call_id = str(message.get("tool_call_id") or "")
            name = str(message.get("name") or names.get(call_id, "")) if role == "tool" else ""
            decoded.append(Message(role=role, text=text, name=name, call_id=call_id))
        return decoded

    def _turn(self, index: int, text: str, calls: Calls) -> Message:
        vocabulary, reader = self.model.vocabulary, self.model.reader
        prose: list[Part] = [text.rstrip() + "\n"] if text.strip() else []
        ids = vocabulary.encode([*prose, *self._written(index, calls)])
        end = next((place for place, token in enumerate(ids) if token in self.model.stop_ids), len(ids))
        schemas = {name: dict[str, Any]() for name, _ in calls}
        parsed, parsed_prose = reader.parse(ids[:end], schemas), reader.parse(vocabulary.encode(prose), schemas)
        names = [*(name for name, _ in calls), *(call.name for call in parsed_prose.calls)]
        if [call.name for call in parsed.calls] != names or parsed.content != parsed_prose.content:
            raise _refused(index, f"the format {self.model.format.name} does not read it back as it is")
        return Message(role="assistant", text=vocabulary.decode(ids[:end]), ids=ids[:end])

    def _written(self, index: int, calls: Calls) -> list[Part]:
        """Calls as control tokens and text, without a control token that a name or an argument spells."""
        vocabulary, texts = self.model.vocabulary, list[str]()
        _replaced(calls, lambda text: texts.append(text) or text)
        text_of_calls = "\n".join(texts)
        control = sorted((text for text in vocabulary.added if text in text_of_calls), key=len, reverse=True)
        spelled = {text: f"{MARK}X{number}Z" for number, text in enumerate(control)}

        def marked(text: str) -> str:
            for string, mark in spelled.items():
                text = text.replace(string, mark)
            return text

        def unmarked(part: Part) -> Part:
            if isinstance(part, str):
                for string, mark in spelled.items():
                    part = part.replace(mark, string)
            return part

        number = count()
        parts = vocabulary.structure(self._write(index, _replaced(calls, marked)))
        plain = vocabulary.structure(self._write(index, _replaced(calls, lambda _: f"x{next(number)}")))
        if [part for part in parts if isinstance(part, int)] != [part for part in plain if isinstance(part, int)]:
            raise _refused(index, "a name or an argument spells a control token together with what stands around it")
        return [unmarked(part) for part in parts]

    def _write(self, index: int, calls: Calls) -> str:
        try:
            return self.model.format.write(calls)
        except ValueError as error:
            raise _refused(index, f"the format {self.model.format.name} cannot write it: {error}") from error
        except Exception as error:  # a format of the user's
            raise UserCodeError(
                f"agent.toolCallFormat: {self.model.format.name}: write raised {described(error)}", code="format_raised"
            ) from error


def _refused(index: int, reason: str) -> UserCodeError:
    return UserCodeError(f"message {index}: tool_calls: {reason}", code="unsupported_content")


def _text(index: int, message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        try:
            content = "".join(part["text"] for part in content)
        except (TypeError, KeyError) as error:
            raise UserCodeError(f"message {index}: only text can be rendered", code="unsupported_content") from error
    return content


def _names(calls: Any) -> dict[str, str]:
    """Names of calls by their ids, of those that have both."""
    names: dict[str, str] = {}
    for call in cast("list[Any]", calls) if isinstance(calls, list | tuple) else ():
        if isinstance(call, Mapping):
            entries = cast("Mapping[str, Any]", call)
            if entries.get("id") and isinstance(entries.get("function"), Mapping):
                names[str(entries["id"])] = str(entries["function"].get("name") or "")
    return names


def _calls(index: int, raw_calls: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and arguments of each call."""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    try:
        for call in raw_calls:
            function = call["function"]
            arguments: Any = function.get("arguments") or "{}"
            arguments = read_json(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(arguments, dict):
                raise _refused(index, "the arguments are not a JSON object")
            name = str(function["name"])
            if encodable(name) != name:
                raise _refused(index, "the name has a lone surrogate")
            calls.append((name, cast("dict[str, Any]", arguments)))
    except (AttributeError, KeyError, TypeError) as error:
        raise _refused(index, "each is {'id': ..., 'function': {'name': ..., 'arguments': ...}}") from error
    except ValueError as error:
        raise _refused(index, f"the arguments cannot be read: {error}") from error
    return calls


def _replaced(calls: Calls, replace: Callable[[str], str]) -> list[tuple[str, Mapping[str, Any]]]:
    def value(node: Any) -> Any:
        if isinstance(node, str):
            return replace(node)
        if isinstance(node, dict):
            return {replace(key): value(entry) for key, entry in cast("dict[str, Any]", node).items()}
        if isinstance(node, list):
            return [value(entry) for entry in cast("list[Any]", node)]
        return node

    return [(replace(name), value(dict(arguments))) for name, arguments in calls]
