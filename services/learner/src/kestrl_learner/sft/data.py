"""The conversations of a run as rows: from a file through the chat template, or from stored episodes as they are."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kestrl._shared.plan.sft import SFTData, SFTSettings
from kestrl._shared.text.chat_model import ChatModel, load_model, load_vocabulary
from kestrl.data.conversations import read_conversations
from kestrl.episode import Purpose
from kestrl.errors import UserInputError
from kestrl.storage import open_store
from kestrl.storage.episodes import TRAINED_OUTCOMES, EpisodeFilter, ObjectEpisodeStore
from kestrl_learner.batch.rows import TrainRow
from kestrl_learner.model.tokenizer_files import TokenizerFiles
from kestrl_learner.sft.encoding import ConversationEncoder, train_row

log = logging.getLogger(__name__)
Item = Sequence[TrainRow]
"""The rows of one conversation."""


class LoadedData(NamedTuple):
    """The conversations of a data set that are learned from."""

    items: list[Item]
    left_out: int
    """Conversations that are longer than `max_tokens`."""

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.token_ids) for rows in self.items for row in rows)


def load_items(settings: SFTSettings, data: SFTData, field: str) -> list[Item]:
    """The conversations of a data set that fit into `max_tokens`. Raises as `load_data` does."""
    loaded = load_data(settings, data, field)
    if loaded.left_out:
        log.warning("%s", left_out_warning(loaded, field))
    return loaded.items


def load_data(settings: SFTSettings, data: SFTData, field: str) -> LoadedData:
    """The conversations of a data set that fit into `max_tokens`, and the number of others.

    Args:
        settings: Of the run.
        data: The data set.
        field: Its field in the manifest, for messages.

    Raises:
        UserInputError: It cannot be read or rendered, or nothing is left of it.
    """
    conversations = _encoded(settings, data) if data.path is not None else _sampled(data, field)
    items: list[Item] = [
        [train_row(ids, mask, number) for ids, mask in rows]
        for number, rows in enumerate(conversations)
        if rows and max(len(ids) for ids, _ in rows) <= settings.max_tokens
    ]
    if not items:
        raise UserInputError(
            f"{field}: none of {len(conversations)} conversations can be learned from; raise spec.training.maxTokens "
            f"(is {settings.max_tokens}) or lower minReward"
        )
    return LoadedData(items, len(conversations) - len(items))


def left_out_warning(loaded: LoadedData, field: str) -> str:
    """The line about conversations that are longer than `max_tokens`."""
    total = len(loaded.items) + loaded.left_out
    return f"{field}: {loaded.left_out} of {total} conversations are left out as longer than maxTokens"


def shared_warning(settings: SFTSettings, training: Sequence[Item], held_out: Sequence[Item]) -> str:
    """The line about validation conversations that are trained on, too; empty if there are none, or if the manifest
    names one data set twice, which is meant.
    """
    if settings.validation is None or _source(settings.validation) == _source(settings.train):
        return ""
    trained = {_tokens(item) for item in training}
    shared = sum(_tokens(item) in trained for item in held_out)
    if not shared:
        return ""
    return (
        f"spec.data.validation: {shared} of {len(held_out)} conversations are also in spec.data.train; a loss over "
        "them does not say what the model does with new ones"
    )


def _source(data: SFTData) -> tuple[str | None, str | None]:
    return data.path, data.episodes


def _tokens(item: Item) -> tuple[bytes, ...]:
    return tuple(row.token_ids.tobytes() for row in item)


Tokens = list[tuple[Sequence[int], Sequence[int]]]


def _encoded(settings: SFTSettings, data: SFTData) -> list[Tokens]:
    assert data.path is not None
    encoder = make_encoder(settings.model, settings.template, settings.template_arguments)
    conversations = read_conversations(Path(data.path), size=data.size)
    return [[(row.ids, row.mask) for row in encoder.encode(conversation)] for conversation in conversations]


def load_tokenizer(model: str, template: str | None) -> tuple[TokenizerFiles, str | None]:
    """A model's tokenizer, and the text of the template that replaces its own.

    Raises:
        UserInputError: Tokenizer or template cannot be read, or there is no tokenizer.
    """
    files = TokenizerFiles(model, template)
    return files, files.template


def make_encoder(model: str, template: str | None, arguments: Mapping[str, Any] | None = None) -> ConversationEncoder:
    """The encoder of a model's conversations.

    Args:
        model: Folder or Hugging Face id.
        template: File of a chat template in place of the model's own.
        arguments: Variables of the template.

    Raises:
        UserInputError: Tokenizer or template cannot be used.
    """
    started, vocabulary = datetime.now().astimezone(), load_vocabulary(model)

    def load(with_tools: bool) -> ChatModel:
        return load_model(
            model, template, tools=with_tools, started=started, arguments=arguments, vocabulary=vocabulary
        )

    return ConversationEncoder(load, vocabulary)


def _sampled(data: SFTData, field: str) -> list[Tokens]:
    """The token rows of a run's stored training episodes with the wanted reward."""
    assert data.episodes is not None
    return list(_episodes(data, field))[: data.size]


def _episodes(data: SFTData, field: str) -> Iterator[Tokens]:
    episodes = ObjectEpisodeStore(open_store(str(data.episodes), create=False))
    if not episodes.steps(Purpose.TRAIN):
        raise UserInputError(f"{field}.episodes: {data.episodes} holds no training episodes (episodes/train/*.parquet)")
    trained = EpisodeFilter(purpose=Purpose.TRAIN, failed=False, outcomes=TRAINED_OUTCOMES)
    for _, _, _, episode in episodes.select(trained):
        if episode.reward is not None and (data.min_reward is None or episode.reward >= data.min_reward):
            yield [(list(row.token_ids), list(row.mask)) for row in episode.rows if any(row.mask)]
