"""Sampled turns as text."""

from __future__ import annotations

from collections.abc import Sequence

from kestrl._shared.text.chat_model import ChatModel
from kestrl._shared.text.parser import Parsed
from kestrl.agents import Completion
from kestrl.formats import Schemas
from kestrl_rollout.conversation.stop_strings import cut_at_stop


class TurnTexts:
    """Reads the turns of one model."""

    def __init__(self, chat_model: ChatModel) -> None:
        self._stop_ids = chat_model.stop_ids
        self._vocabulary = chat_model.vocabulary
        self._reader = chat_model.reader
        self.opens_reasoning = self._reader.opens_reasoning

    def parse(
        self, completion: Completion, schemas: Schemas, *, reasoning: bool, further: Sequence[int] = ()
    ) -> Parsed:
        """A turn with its calls.

        Args:
            completion: The turn.
            schemas: Schemas of the offered tools.
            reasoning: Whether the prompt had opened the reasoning already.
            further: Tokens that may have ended it beside the model's.

        Raises:
            UserCodeError: A user's format raised an exception.
        """
        ids, finish = completion.token_ids, completion.finish_reason
        if finish == "stop" and (ids[-1] in self._stop_ids or ids[-1] in further):
            ids = ids[:-1]
        return self._reader.parse(ids, schemas, reasoning=reasoning, cut=finish == "length")

    def text(self, completion: Completion, stops: Sequence[int], *, reasoning: bool) -> str:
        """The text of a turn, without the token that ended it."""
        ids = completion.token_ids
        return self._reader.text(ids[:-1] if ids and ids[-1] in stops else ids, reasoning=reasoning)

    def cut(self, completion: Completion, stops: Sequence[str]) -> tuple[Completion, str]:
        """A turn up to its first stop string, and which that is."""
        return cut_at_stop(completion, stops, self._vocabulary.decode)
