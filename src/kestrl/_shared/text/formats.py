"""Detection of a chat template's tool-call format, by parsing a call that the template itself writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kestrl._shared.text.chat_template import ChatTemplate, TemplateRefused
from kestrl._shared.text.parser import TurnReader
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.errors import UserInputError
from kestrl.formats import ToolCallFormat
from kestrl.formats.registry import BUILT_IN, FIELD, resolve

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
NAME, ARGUMENTS = "look_up", {"word": "kestrel"}
SCHEMAS = {NAME: TOOL["function"]["parameters"]}
QUESTION = "What does the word mean that names a small falcon?"
ANSWER = "It is a bird of prey."


def choose(
    template: ChatTemplate, source: str, vocabulary: Vocabulary, override: str | None, *, required: bool
) -> tuple[ToolCallFormat, bool]:
    """The tool-call format of a model, and whether it was named or detected: otherwise it is a guess.

    Args:
        template: The chat template.
        source: The template's text.
        vocabulary: The model's vocabulary.
        override: `agent.toolCallFormat`.
        required: Whether the job offers tools to a loop for which the worker parses calls.

    Raises:
        UserInputError: The named format does not exist, or one is required and none is detected.
    """
    if override is not None:
        return resolve(override), True
    detected_format = detect(template, source, vocabulary)
    if detected_format is None and required:
        raise UserInputError(
            f"{FIELD}: the job offers tools, but the chat template writes tool calls in no format that is known "
            f"({', '.join(BUILT_IN)}). Name the format that the model was trained on, or your own as "
            "package.module:Format; or give a template that renders tools with agent.template; or remove `tools`"
        )
    return detected_format or BUILT_IN["hermes"], detected_format is not None


def detect(template: ChatTemplate, source: str, vocabulary: Vocabulary) -> ToolCallFormat | None:
    """The built-in format that parses the template's own call; if it writes none, the format that its text asks for."""
    for turn_text, reasoning in _written(template):
        ids = vocabulary.whole(turn_text)
        for format in BUILT_IN.values():  # noqa: A001 - the domain's own word
            calls = TurnReader(vocabulary, format).parse(ids, SCHEMAS, reasoning=reasoning).calls
            if [(call.name, call.arguments, call.problem) for call in calls] == [(NAME, ARGUMENTS, None)]:
                return format
        if NAME in turn_text:
            return None  # it writes calls in an unknown format
    hinted_formats = [
        known_format
        for known_format in BUILT_IN.values()
        if known_format.hints and all(hint in source for hint in known_format.hints)
    ]
    return hinted_formats[0] if hinted_formats else None


def _written(template: ChatTemplate) -> Iterator[tuple[str, bool]]:
    """What the template writes for a turn with one call, and whether the prompt before it opened the reasoning.

    Arguments are tried as an object and as JSON text: templates differ in what they accept.
    """
    messages = [{"role": "user", "content": QUESTION}]
    for arguments in (ARGUMENTS, '{"word": "kestrel"}'):
        function = {"name": NAME, "arguments": arguments}
        turn = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "000000000", "type": "function", "function": function}],
        }
        try:
            prompt = template.render(messages, [TOOL], generate=True).text
            rendered = template.render([*messages, turn], [TOOL], generate=False).text
            plain = template.render([*messages, {"role": "assistant", "content": ANSWER}], [TOOL], generate=False).text
        except TemplateRefused:
            continue  # the template refuses such a conversation; its text may still name a format
        rendered = rendered.removesuffix(plain.rpartition(ANSWER)[2])  # the end of a turn is not a part of the call
        if rendered.startswith(prompt):
            yield rendered[len(prompt) :], prompt.rfind("<think>") > prompt.rfind("</think>")
        else:
            yield rendered.rpartition(QUESTION)[2], False
