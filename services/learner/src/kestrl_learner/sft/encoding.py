"""Conversations as training rows: exactly the tokens that an engine is given and that the model should have sampled.

Each assistant message is learned behind the prompt that the chat template makes for it. A row goes on as long as the
template only appends; where it renders the history anew, as templates do that drop earlier reasoning, a new row begins,
and no token is learned twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrl.data.conversations import Conversation
from kestrl.errors import UserInputError
from kestrl_learner.batch.rows import TrainRow


@dataclass(slots=True)
class EncodedRow:
    """Token ids, and 1 where a token is learned."""

    ids: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    text: str = ""
    """What the ids are."""

    def add(self, ids: Sequence[int], text: str, *, learned: bool) -> None:
        self.ids += ids
        self.mask += [int(learned)] * len(ids)
        self.text += text


class ConversationEncoder:
    """Renders conversations with a chat template.

    Args:
        tokenizer: A tokenizer of transformers.
        ends: Tokens that end a turn, as text; a turn is learned up to the last of them.
        template: A chat template in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[str], template: str | None = None) -> None:
        self._tokenizer, self._ends, self._template = tokenizer, [end for end in ends if end], template

    def encode(self, conversation: Conversation) -> list[EncodedRow]:
        """The rows of a conversation, each with a learned token.

        Raises:
            UserInputError: The template cannot render it, or does not render an answer behind its prompt.
        """
        rows: list[EncodedRow] = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(conversation, index, prompt=True)
            whole = self._render(conversation, index + 1, prompt=False)
            if not whole.startswith(prompt):
                raise UserInputError(
                    f"messages[{index}]: the chat template does not render an assistant message behind the prompt that "
                    "it makes for one, so that its tokens cannot be found; give another one with spec.template"
                )
            if not rows or not prompt.startswith(rows[-1].text):
                rows.append(EncodedRow())
            row = rows[-1]
            between, answer = prompt[len(row.text) :], self._turn(whole[len(prompt) :])
            row.add(self._ids(between), between, learned=False)
            row.add(self._ids(answer), answer, learned=True)
            if row.mask:
                row.mask[0] = 0  # nothing predicts the first token of an answer without a prompt
        return [row for row in rows if any(row.mask)]

    def _turn(self, text: str) -> str:
        """The text up to the token that ends the turn, which the model has to sample; the rest is the template's."""
        return text[: max((text.rfind(end) + len(end) for end in self._ends if end in text), default=len(text))]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, conversation: Conversation, count: int, *, prompt: bool) -> str:
        messages: list[Mapping[str, Any]] = list(conversation.messages[:count])
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=list(conversation.tools) or None,
                    chat_template=self._template,
                    add_generation_prompt=prompt,
                    tokenize=False,
                )
            )
        except Exception as error:  # a template raises what it likes
            raise UserInputError(f"the chat template cannot render the conversation: {error}") from error


def train_row(ids: Sequence[int], mask: Sequence[int], sequence: int) -> TrainRow:
    """A row of which every masked token is learned."""
    return TrainRow(
        token_ids=array("i", ids),
        mask=bytes(mask),
        behaviour=array("f", bytes(4 * len(ids))),
        advantages=array("d", (float(on) for on in mask)),
        sequence=sequence,
        on_policy=True,
        policy="",
        engines=[""] * sum(mask),
    )
