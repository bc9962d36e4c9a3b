"""Loading of tokenizer, chat template and the tokens that end a turn, without weights and without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from kestrl._shared.text.chat import Chat, Message
from kestrl._shared.text.chat_template import ChatTemplate, TemplateRefused
from kestrl._shared.text.formats import choose
from kestrl._shared.text.parser import THINK_TAGS, Parsed, TurnReader
from kestrl._shared.text.toolset import NO_TOOLS, ToolSet
from kestrl._shared.text.vocabulary import Vocabulary
from kestrl.errors import UserInputError
from kestrl.formats import Schemas, ToolCallFormat

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make up a tokenizer, with its chat template."""
FILES = (*TOKENIZER_FILES, "generation_config.json")
"""Files of a model that text needs."""
SYNTHETIC_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


@dataclass(frozen=True, kw_only=True)
class ChatModel:
    """Text interface of a model: messages to tokens, sampled tokens to text."""

    chat: Chat
    stop_ids: tuple[int, ...]
    """Ids of the tokens that end a turn."""
    eos_id: int | None
    pad_id: int | None
    format: ToolCallFormat
    """The model's tool-call format."""
    detected: bool = True
    """Whether the template writes or names the format; otherwise it is a guess."""

    @property
    def vocabulary(self) -> Vocabulary:
        return self.chat.vocabulary

    def close(self) -> None:
        """Ends the process that renders the template, which a further rendering starts again."""
        self.chat.close()

    def read_turn(self, ids: Sequence[int], schemas: Schemas, *, cut: bool = False) -> Parsed:
        """Parses a turn from its sampled tokens alone, including the one that ended it."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        opening, closing = self.format.reasoning or ("", "")
        head, separator, _ = self.vocabulary.decode(ids[:end]).partition(closing) if closing else ("", "", "")
        reasoning = bool(separator) and opening not in head
        return self.reader.parse(ids[:end], schemas, reasoning=reasoning, cut=cut)

    @cached_property
    def reader(self) -> TurnReader:
        return TurnReader(self.vocabulary, self.format, whole_turns=self.chat.with_calls)


def load_model(
    tokenizer: str,
    template: str | None,
    *,
    tools: bool,
    started: datetime,
    tool_calls: str | None = None,
    offered: bool = False,
    arguments: Mapping[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
) -> ChatModel:
    """Loads tokenizer and template and verifies that conversations can be extended with them.

    Args:
        tokenizer: A folder, or a Hugging Face id.
        template: File of a template that replaces the model's own.
        tools: Whether tools are offered, so that the template must have a place for their results.
        started: The time that `strftime_now` in a template reports.
        tool_calls: The tool-call format, a name or an import path; None detects it from the template.
        offered: Whether tools are offered to a loop for which the worker parses calls, which requires a format.
        arguments: Variables of the template, such as `enable_thinking`.
        vocabulary: That of the tokenizer, where it has been loaded.

    Raises:
        UserInputError: A file is missing or unreadable, the template cannot be verified, or its tool calls cannot be
            parsed.
    """
    folder = model_folder(tokenizer)
    data = _json(folder / "tokenizer.json")
    if not data:
        raise UserInputError(
            f"model.base: {folder / 'tokenizer.json'} is missing; only models with a fast tokenizer can be used"
        )
    config = _json(folder / "tokenizer_config.json")
    source = _template(folder, template, config)
    vocabulary = vocabulary or Vocabulary(data)
    special = {**_special(_json(folder / "special_tokens_map.json")), **_special(config)}
    rendering = ChatTemplate(source, special, started=started, arguments=arguments or {})
    with_calls, closing = _verified(rendering, vocabulary, tools=tools)
    call_format, detected = choose(rendering, source, vocabulary, tool_calls, required=offered)
    eos = vocabulary.control(special.get("eos_token", ""))
    stops = [
        *_eos_ids(_json(folder / "generation_config.json")),
        *(stop_id for stop_id in (eos, *closing) if stop_id is not None),
    ]
    inner_stops = {token for text in call_format.inner_ends if (token := vocabulary.control(text)) is not None}
    stops = [stop_id for stop_id in stops if stop_id not in inner_stops]
    if not stops:
        raise UserInputError(
            "model.base: no token ends a turn: the tokenizer has no eos_token, generation_config.json no eos_token_id, "
            "and the chat template closes a turn with no control token"
        )
    return ChatModel(
        # A turn of several messages ends with the end of any of them.
        chat=Chat(rendering, vocabulary, with_calls=with_calls, ends=(*inner_stops, *stops) if inner_stops else ()),
        stop_ids=tuple(dict.fromkeys(stops)),
        eos_id=eos if eos is not None else next(iter(closing), None),
        pad_id=vocabulary.control(special.get("pad_token", "")),
        format=call_format,
        detected=detected,
    )


STARTS = (
    (Message(role="system", text="You look words up."), Message(role="user", text="What is a kestrel?")),
    (Message(role="user", text="What is a kestrel?"),),
)
"""Conversations for verifying a template. Templates without a system role are refused only for data that uses it."""


def load_vocabulary(tokenizer: str) -> Vocabulary:
    """Loads the tokenizer alone.

    Raises:
        UserInputError: It is missing or cannot be used.
    """
    return Vocabulary(_json(model_folder(tokenizer) / "tokenizer.json"))


class NoPlaceForResults(UserInputError):
    """The template refuses a tool's result."""

    code = "template_refuses_results"


def _verified(template: ChatTemplate, vocabulary: Vocabulary, *, tools: bool) -> tuple[bool, Sequence[int]]:
    """Whether the template takes results only behind `tool_calls`, and the control tokens that close a turn."""
    try:
        return False, verify_template(Chat(template, vocabulary), tools=tools).closing
    except NoPlaceForResults:
        return True, verify_template(Chat(template, vocabulary, with_calls=True), tools=tools).closing


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a verified template does with turns."""

    closing: Sequence[int]
    """The control tokens with which it closes a turn, the one of an answer first."""
    forks: bool
    """Whether it writes a turn anew once a tool's result follows, so that every turn begins a row of its own."""


def verify_template(chat: Chat, *, tools: bool) -> Verified:
    """Verifies a template with sample conversations: whether the next turn's prompt extends a turn's, token for token.

    Raises:
        UserInputError: It has no place for results, or text without control tokens is encoded differently from the
            whole text.
    """
    toolset = chat.toolset([SYNTHETIC_TOOL]) if tools else NO_TOOLS
    for start in STARTS:
        try:
            return verify_start(chat, start, toolset)
        except TemplateRefused:
            if start is STARTS[-1]:
                raise
    raise AssertionError("STARTS is not empty")


def verify_start(chat: Chat, start: Sequence[Message], toolset: ToolSet) -> Verified:
    """As `verify_template`, for the first messages of a row of data.

    Raises:
        UserInputError: As `verify_template`.
    """
    _same_as_whole(chat, start, toolset)
    answer, since = Message(role="assistant", text="One moment."), len(start)
    closing, forks = [_closing(chat, [*start, answer], since, toolset)], False
    result = Message(role="tool", text="A small falcon.", name="look_up")
    if toolset is not NO_TOOLS:
        answers = [answer]
        if THINK_TAGS[1] in chat.source and THINK_TAGS[1] not in str(chat.rendered(start, toolset)[-1]):
            answers.append(replace(answer, reasoning="Perhaps a bird."))
        for label, new in {"a tool's result": [result], "two tools' results": [result, result]}.items():
            try:
                closing.append(_closing(chat, [*start, answer, *new], since, toolset))
                forks = forks or any(
                    chat.extension([*start, reply, *new], since=since, last=None, tools=toolset) is None
                    for reply in answers
                )
            except TemplateRefused as error:
                raise NoPlaceForResults(
                    f"the chat template has no place for {label} ({error}), so tools cannot be used with it; name "
                    "another with agent.template, or leave out spec.tools"
                ) from error
    tokens = dict.fromkeys(token for token in closing if token in chat.vocabulary.control_ids)
    return Verified(closing=tuple(tokens), forks=forks)


def _closing(chat: Chat, messages: Sequence[Message], since: int, toolset: ToolSet) -> int | None:
    """The token behind a turn, where the conversation goes on or is written anew."""
    new = chat.extension(messages, since=since, last=None, tools=toolset)
    return chat.closing(messages, since=since, tools=toolset) if new is None else next(iter(new), None)


def _same_as_whole(chat: Chat, messages: Sequence[Message], toolset: ToolSet) -> None:
    if chat.prompt(messages, toolset) != chat.vocabulary.whole(chat.text(messages, toolset)):
        raise UserInputError(
            "the tokenizer cannot be used: it encodes a text differently when cut at control tokens "
            "(a pre-tokenizer that looks at the position in the whole text)"
        )


def model_folder(tokenizer: str) -> Path:
    """The folder of a model's files, those of a Hugging Face id after their download.

    Raises:
        UserInputError: There is no such folder, or it cannot be downloaded.
    """
    path = Path(tokenizer)
    if path.is_dir():
        return path
    if path.is_absolute() or tokenizer.startswith("."):
        raise UserInputError(f"model.base: the folder {tokenizer} does not exist")
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserInputError(
            f"model.base: {tokenizer!r} is not a folder, and huggingface_hub is not installed to download it"
        ) from error
    try:
        download = cast(Any, huggingface_hub).snapshot_download
        return Path(download(tokenizer, allow_patterns=list(FILES)))
    except Exception as error:
        raise UserInputError(f"model.base: cannot download {tokenizer!r} from Hugging Face: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserInputError(f"{path}: not readable as JSON: {error}") from error
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ...: strings used by templates, given as text or as an object with `content`."""
    tokens: dict[str, str] = {}
    for key, value in config.items():
        text = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _eos_ids(generation: Mapping[str, Any]) -> list[int]:
    value = generation.get("eos_token_id")
    if value is None:
        return []
    return [int(str(token)) for token in cast("list[object]", value)] if isinstance(value, list) else [int(value)]


def _template(folder: Path, override: str | None, config: Mapping[str, Any]) -> str:
    for path in (Path(override),) if override else (folder / "chat_template.jinja",):
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            if override:
                raise UserInputError(f"agent.template: {override} does not exist") from error
        except (OSError, ValueError) as error:
            raise UserInputError(f"{path}: not readable: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = cast("list[dict[str, object]]", template)
        templates_by_name = {str(entry["name"]): str(entry["template"]) for entry in entries}
        template = templates_by_name.get("tool_use", templates_by_name.get("default"))
    if not isinstance(template, str):
        raise UserInputError(
            f"model.base: {folder} has no chat template, as base models often have none; name one with agent.template"
        )
    return template
