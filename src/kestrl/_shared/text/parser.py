"""Parsing of a turn into reasoning, tool calls in the model's format, and content.

Markers that are control tokens are searched in the sampled *ids*: a model that only writes the characters has not made
a call. Other markers are searched in the text. Every attempt yields a `Call`, malformed ones too, with a message to the
model about the right form; none is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kestrl._shared.text.chat import Message
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.agents import Call
from kestrl.episode import CallOutcome
from kestrl.errors import UserCodeError, encodable
from kestrl.formats import Marker, Schemas, ToolCallFormat, Turn, WrittenCall
from kestrl.tools.shapes import DEEPEST, json_problem

PROMPT_END = 16
"""Tokens at the end of a prompt that may open the reasoning."""
THINK_TAGS = ("<think>", "</think>")
"""The only reasoning markers that templates look for in a message's text, where they may delete it later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed turn."""

    text: str
    """The whole turn for people and rewards."""
    content: str
    """The text without reasoning and calls."""
    calls: Sequence[Call]
    message: Message
    """The turn as a message, with its reasoning apart, as some templates delete it later."""


class TurnReader:
    """Parses turns of one model in one tool-call format."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        format: ToolCallFormat,  # noqa: A002 - the domain's own word
        *,
        whole_turns: bool = False,
    ) -> None:
        """Reads a model's turns.

        Args:
            vocabulary: The model's vocabulary.
            format: Its tool-call format.
            whole_turns: Whether reasoning stays in a turn's message, as the template has no place for it.
        """
        self._vocabulary = vocabulary
        self.format = format
        self._separates = not whole_turns and format.reasoning == THINK_TAGS
        opening, closing = format.reasoning or ("", "")
        self._opening, self._closing = opening, closing
        by_token = {text: vocabulary.control(text) for text in (*format.markers, opening, closing) if text}
        self._by_id = {token: Marker(text) for text, token in by_token.items() if token is not None}
        # The longest first: a marker may be the prefix of another.
        textual = sorted((text for text, token in by_token.items() if token is None), key=len, reverse=True)
        self._textual = re.compile(f"({'|'.join(map(re.escape, textual))})") if textual else None

    def parse(self, ids: Sequence[int], schemas: Schemas, *, reasoning: bool = False, cut: bool = False) -> Parsed:
        """Parses a turn.

        Args:
            ids: The sampled tokens, without the one that ended the turn.
            schemas: Schemas of the offered tools.
            reasoning: Whether the prompt had opened the reasoning already.
            cut: Whether a limit ended the turn.

        Raises:
            UserCodeError: A user's format raised an exception.
        """
        text = self._vocabulary.decode(ids)
        pieces = list(self._pieces(ids, text))
        outside = list(self._without_reasoning(pieces, thinking=reasoning))
        turn = self._read(outside, schemas, cut=cut)
        calls = [self._call(_sendable(call), schemas, cut=cut) for call in turn.calls]
        message = self._message(ids, text)
        readable = self._readable(pieces, text, reasoning=reasoning)
        return Parsed(text=readable, content=encodable(turn.content), calls=calls, message=message)

    def _read(self, pieces: Sequence[str], schemas: Schemas, *, cut: bool) -> Turn:
        try:
            with self._user_code("read"):
                return self.format.read(pieces, schemas, cut=cut)
        except RecursionError:  # of a JSON parser: the depth of a text is the model's, and no failure of the format
            raw = "".join(pieces)
            return Turn(
                content="", calls=[WrittenCall(raw=raw, problem=f"it is nested more than {DEEPEST} levels deep")]
            )

    def text(self, ids: Sequence[int], *, reasoning: bool = False) -> str:
        """The text of a turn for people and rewards, which has the tag that opens its reasoning also where the prompt
        opened it.

        Args:
            ids: As of `parse`.
            reasoning: As of `parse`.
        """
        text = self._vocabulary.decode(ids)
        return self._readable(list(self._pieces(ids, text)), text, reasoning=reasoning)

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the tag that opens the reasoning."""
        return bool(self._opening) and self._vocabulary.decode(prompt[-PROMPT_END:]).rstrip().endswith(self._opening)

    def _readable(self, pieces: Sequence[str], text: str, *, reasoning: bool) -> str:
        if reasoning and self._opening:
            pieces, text = [Marker(self._opening), "\n", *pieces], f"{self._opening}\n{text}"
        try:
            with self._user_code("readable"):
                readable = self.format.readable(pieces)
        except RecursionError:  # as in _read
            readable = None
        return text if readable is None else encodable(readable)

    @contextmanager
    def _user_code(self, method: str) -> Generator[None]:
        try:
            yield
        except RecursionError:
            raise
        except Exception as error:
            raise UserCodeError(
                f"agent.toolCallFormat: {self.format.name}: {method} raised {type(error).__name__}: {error}",
                code="format_raised",
            ) from error

    def _pieces(self, ids: Sequence[int], text: str) -> Iterator[str]:
        if self._by_id.keys().isdisjoint(ids):
            yield from self._texts(text)
            return
        start = 0
        for index, token in enumerate(ids):
            if token in self._by_id:
                yield from self._texts(self._vocabulary.decode(ids[start:index]))
                yield self._by_id[token]
                start = index + 1
        yield from self._texts(self._vocabulary.decode(ids[start:]))

    def _texts(self, text: str) -> Iterator[str]:
        if self._textual is None:
            yield from [text] if text else []
            return
        for index, piece in enumerate(self._textual.split(text)):
            if piece:
                yield Marker(piece) if index % 2 else piece

    def _without_reasoning(self, pieces: Iterable[str], *, thinking: bool) -> Iterator[str]:
        """The pieces outside reasoning; a closing marker without reasoning is left out.

        Reasoning comes before calls: after a marker of the format, which may begin a call, reasoning markers are plain
        text.
        """
        thinking = thinking and bool(self._closing)
        in_calls = False
        for piece in pieces:
            if isinstance(piece, Marker) and piece in (self._opening, self._closing):
                if in_calls:
                    yield str(piece)
                else:
                    thinking = piece == self._opening
            elif not thinking:
                in_calls = in_calls or isinstance(piece, Marker)
                yield piece

    def _call(self, call: WrittenCall, schemas: Schemas, *, cut: bool) -> Call:
        """The call, with the message to the model if it cannot be executed."""
        form = f"Nothing was called; {self.format.example}."
        if call.unfinished:
            reason = "the turn's length limit cut it" if cut else "its end is missing"
            message = f"Error: the tool call was not finished, {reason}. {form}"
            problem = CallOutcome.TRUNCATED
        elif call.arguments is None or not call.name or call.problem:
            message = f"Error: the tool call cannot be read: {call.problem or 'it names no tool'}. {form}"
            problem = CallOutcome.INVALID_JSON
        elif call.name not in schemas:
            return Call(
                name=call.name,
                arguments=call.arguments,
                raw=call.raw,
                problem=CallOutcome.UNKNOWN_TOOL,
                message=unknown_tool(call.name, schemas),
                id=call.id,
            )
        else:
            return Call(name=call.name, arguments=call.arguments, raw=call.raw, id=call.id)
        return Call(name=call.name, arguments=None, raw=call.raw, problem=problem, message=message, id=call.id)

    def _message(self, ids: Sequence[int], text: str) -> Message:
        if not self._separates:
            return Message(role="assistant", text=text, ids=ids)
        token = self._vocabulary.control(self._closing)
        if token is None:
            head, closed, after_thought = text.partition(self._closing)
            if not closed:
                return Message(role="assistant", text=text, ids=ids)
            return Message(
                role="assistant", text=after_thought, reasoning=head.rpartition(self._opening)[2].strip("\n")
            )
        if token not in ids:
            return Message(role="assistant", text=text, ids=ids)
        end = list(ids).index(token)
        opening = self._vocabulary.control(self._opening)
        inside = self._trim([token_id for token_id in ids[:end] if token_id != opening])
        answer = self._trim(ids[end + 1 :])
        decode = self._vocabulary.decode
        return Message(
            role="assistant", text=decode(answer), ids=answer, reasoning=decode(inside), reasoning_ids=inside
        )

    def _trim(self, ids: Sequence[int]) -> Sequence[int]:
        """Ids without white space at the ends, which the template writes itself around reasoning."""
        start, end = 0, len(ids)
        while start < end and not self._vocabulary.decode(ids[start : start + 1]).strip():
            start += 1
        while start < end and not self._vocabulary.decode(ids[end - 1 : end]).strip():
            end -= 1
        return ids[start:end]


def unknown_tool(name: str, names: Iterable[str]) -> str:
    """The message to a model that called a tool which is not among these."""
    return f"Error: there is no tool {name!r}. The tools are: {', '.join(names) or 'none'}."


def _sendable(call: WrittenCall) -> WrittenCall:
    """A call that can be sent: with arguments that cannot, it is one that cannot be read. The result of any format is
    checked here, so that no text of a model can fail its episode.
    """
    problem = "" if call.arguments is None else json_problem(call.arguments)
    return replace(
        call,
        raw=encodable(call.raw),
        name=encodable(call.name),
        id=encodable(call.id),
        arguments=None if problem else call.arguments,
        problem=encodable(call.problem or problem),
    )
