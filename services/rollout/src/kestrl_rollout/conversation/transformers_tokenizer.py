"""The model's tokenizer with the interface of transformers, for loops written for it. Does not need transformers.

Templates are rendered as everywhere in this worker: texts of messages never become control tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kestrl._shared.text.chat_model import ChatModel
from kestrl.agents import Call
from kestrl.errors import UserCodeError, UserInputError
from kestrl.formats import Schemas
from kestrl_rollout.history.reader import HistoryReader

BEFORE = ({"role": "user", "content": "."}, {"role": "assistant", "content": "."})
"""A conversation that any messages can follow."""


class TransformersTokenizer:
    """Implements `kestrl.agents.Tokenizer`."""

    def __init__(self, chat_model: ChatModel) -> None:
        self._chat_model = chat_model
        self._history = HistoryReader(chat_model)

    @property
    def eos_token_id(self) -> int | None:
        return self._chat_model.eos_id

    @property
    def pad_token_id(self) -> int | None:
        return self._chat_model.eos_id if self._chat_model.pad_id is None else self._chat_model.pad_id

    def __len__(self) -> int:
        return self._chat_model.vocabulary.size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - transformers' name; chat models add none
        return self._chat_model.vocabulary.whole(text)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_options: Any) -> str:
        vocabulary = self._chat_model.vocabulary
        return vocabulary.decode_plain(token_ids) if skip_special_tokens else vocabulary.decode(token_ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self._chat_model.vocabulary.control(token)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **options: Any,
    ) -> Any:
        if not (add_generation_prompt and tokenize) or any(value for value in options.values()):
            raise UserCodeError(
                "apply_chat_template: only token ids with a generation prompt, without further options, are supported "
                f"here (got add_generation_prompt={add_generation_prompt}, tokenize={tokenize}, {options})",
                code="unsupported_template_option",
            )
        ids = self._chat_model.chat.prompt(
            self._history.messages(messages), self._chat_model.chat.toolset(list(tools or ()))
        )
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids

    @property
    def tool_call_format(self) -> str:
        return self._chat_model.format.name

    def read_turn(self, token_ids: Sequence[int], schemas: Schemas) -> tuple[str, Sequence[Call]]:
        parsed = self._chat_model.read_turn(token_ids, schemas)
        return parsed.content, parsed.calls

    def continue_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        new = self.extend_chat(BEFORE, [*BEFORE, *messages], [], tools)
        return new[1:] if new and new[0] in self._chat_model.stop_ids else new  # the turn already has its end

    def extend_chat(
        self,
        before: Sequence[Mapping[str, Any]],
        after: Sequence[Mapping[str, Any]],
        history: Sequence[int],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        messages = self._history.messages(after, rendered=len(before))
        since = len(before) - 1
        if since < 0 or messages[since].role != "assistant":
            raise UserCodeError(
                "extend_chat: the conversation before must end with the model's turn", code="bad_extension"
            )
        toolset = self._chat_model.chat.toolset(list(tools or ()))
        new = self._chat_model.chat.extension(
            messages, since=since, last=history[-1] if history else None, tools=toolset
        )
        if new is None:
            raise UserInputError(
                "the chat template rewrites the history here, so it cannot be extended token for token",
                code="template_rewrites_history",
            )
        return new
