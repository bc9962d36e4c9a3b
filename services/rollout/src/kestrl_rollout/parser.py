"""Reading a turn: hermes tool calls (`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`) outside of reasoning.

Where the markers are control tokens they are looked for among the sampled *ids*: a model that merely writes the characters has not
made a call. A tokenizer without such tokens leaves only the text. Every attempt yields a `Call`, malformed ones too, with the
message that lets the model mend it; none is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from kestrl.agents import Call
from kestrl.episode import CallOutcome
from kestrl.rpc.codec import dump_json
from kestrl_rollout.chat import Message
from kestrl_rollout.vocabulary import Vocabulary

FORM = 'write <tool_call>{"name": "<tool>", "arguments": {<arguments>}}</tool_call> with valid JSON inside'


class Marker(StrEnum):
    """What structures a turn."""

    THINK = "<think>"
    THOUGHT = "</think>"
    CALL = "<tool_call>"
    CALLED = "</tool_call>"


_MARKERS = {str(marker): marker for marker in Marker}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A turn, read."""

    text: str
    """All of it."""
    content: str
    """Without reasoning and calls."""
    calls: Sequence[Call]
    message: Message
    """As a message of the conversation, its reasoning told apart: some templates delete it later."""


@dataclass(slots=True)
class _Reading:
    """What has been read so far."""

    thinking: bool
    call: list[str] | None = None
    """Text of the open call."""


class HermesParser:
    """Reads turns of one model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        by_token = {marker: vocabulary.control(marker) for marker in Marker}
        self._by_id = {token: marker for marker, token in by_token.items() if token is not None}
        textual = [re.escape(marker) for marker, token in by_token.items() if token is None]
        self._textual = re.compile(f"({'|'.join(textual)})") if textual else None

    def parse(
        self, ids: Sequence[int], tools: Collection[str], *, reasoning: bool = False, cut: bool = False
    ) -> Parsed:
        """Reads a turn.

        Args:
            ids: The sampled tokens, without the one that ended the turn.
            tools: Names of the tools offered.
            reasoning: Whether the prompt had opened the reasoning already.
            cut: Whether a limit ended the turn.
        """
        calls: list[Call] = []
        content: list[str] = []
        state = _Reading(thinking=reasoning)
        text = self._vocabulary.decode(ids)
        for piece in self._pieces(ids, text):
            self._read(piece, state, content, calls, tools)
        if state.call is not None:
            calls.append(_unfinished("".join(state.call), cut=cut))
        return Parsed(text=text, content="".join(content).strip(), calls=calls, message=self._message(ids, text))

    def _pieces(self, ids: Sequence[int], whole: str) -> Iterator[Marker | str]:
        if self._by_id.keys().isdisjoint(ids):
            yield from self._texts(whole)
            return
        start = 0
        for index, token in enumerate(ids):
            if token in self._by_id:
                yield from self._texts(self._vocabulary.decode(ids[start:index]))
                yield self._by_id[token]
                start = index + 1
        yield from self._texts(self._vocabulary.decode(ids[start:]))

    def _texts(self, text: str) -> Iterator[Marker | str]:
        if not text:
            return
        if self._textual is None:
            yield text
            return
        for piece in self._textual.split(text):
            yield _MARKERS.get(piece, piece)

    def _read(
        self, piece: Marker | str, state: _Reading, content: list[str], calls: list[Call], tools: Collection[str]
    ) -> None:
        if state.thinking:
            state.thinking = piece is not Marker.THOUGHT
        elif state.call is not None:
            if piece is Marker.CALLED:
                calls.append(read_call("".join(state.call), tools))
                state.call = None
            elif piece is Marker.CALL:
                calls.append(_unfinished("".join(state.call), cut=False))
                state.call = []
            else:
                state.call.append(piece)
        elif piece is Marker.CALL:
            state.call = []
        elif piece is Marker.THINK:
            state.thinking = True
        elif not isinstance(piece, Marker):
            content.append(piece)

    def _message(self, ids: Sequence[int], text: str) -> Message:
        token = self._vocabulary.control(Marker.THOUGHT)
        if token is None:
            head, found, answer = text.partition(Marker.THOUGHT)
            if not found:
                return Message(role="assistant", text=text, ids=ids)
            return Message(role="assistant", text=answer, reasoning=head.rpartition(Marker.THINK)[2].strip("\n"))
        if token not in ids:
            return Message(role="assistant", text=text, ids=ids)
        end = list(ids).index(token)
        opening = self._vocabulary.control(Marker.THINK)
        inside = self._trim([each for each in ids[:end] if each != opening])
        answer = self._trim(ids[end + 1 :])
        decode = self._vocabulary.decode
        return Message(
            role="assistant", text=decode(answer), ids=answer, reasoning=decode(inside), reasoning_ids=inside
        )

    def _trim(self, ids: Sequence[int]) -> Sequence[int]:
        """Without white space at the ends: the template writes its own around reasoning."""
        start, end = 0, len(ids)
        while start < end and not self._vocabulary.decode(ids[start : start + 1]).strip():
            start += 1
        while start < end and not self._vocabulary.decode(ids[end - 1 : end]).strip():
            end -= 1
        return ids[start:end]


def _unfinished(raw: str, *, cut: bool) -> Call:
    why = "the turn's length limit cut it" if cut else "it has no </tool_call>"
    message = f"Error: the tool call was not finished, {why}. Nothing was called; {FORM}."
    return Call(name="", arguments=None, raw=raw, problem=CallOutcome.TRUNCATED, message=message)


def _invalid(raw: str, name: str, why: str) -> Call:
    message = f"Error: the tool call cannot be read: {why}. Nothing was called; {FORM}."
    return Call(name=name, arguments=None, raw=raw, problem=CallOutcome.INVALID_JSON, message=message)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


_decode = json.JSONDecoder(parse_constant=_refuse_constant).decode


def read_call(raw: str, tools: Collection[str]) -> Call:
    """One call from the text between its markers."""
    try:
        value = _decode(raw)
        if "\\u" in raw:
            dump_json(value).encode()  # half a surrogate pair could not travel further
    except RecursionError:
        return _invalid(raw, "", "it is nested too deeply")
    except ValueError as error:
        return _invalid(raw, "", str(error))
    if not isinstance(value, dict):
        return _invalid(raw, "", "it is no JSON object")
    call = cast(dict[str, Any], value)
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return _invalid(raw, "", 'it has no "name"')
    if not isinstance(arguments, dict):
        return _invalid(raw, name, '"arguments" is no JSON object')
    arguments = cast(dict[str, Any], arguments)
    if name not in tools:
        offered = ", ".join(tools) or "none"
        message = f"Error: there is no tool {name!r}. The tools are: {offered}."
        return Call(name=name, arguments=arguments, raw=raw, problem=CallOutcome.UNKNOWN_TOOL, message=message)
    return Call(name=name, arguments=arguments, raw=raw)
