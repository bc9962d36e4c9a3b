"""The conversations of a run as rows: from a file through the chat template, or from stored episodes as they are."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kestrl._shared.plan.sft import SFTData, SFTSettings
from kestrl.api.common.v1 import common_pb2
from kestrl.data.conversations import read_conversations
from kestrl.episode import Purpose
from kestrl.episode.codec import group_from_proto
from kestrl.errors import UserInputError
from kestrl.storage import layout, open_store
from kestrl_learner.batch.rows import TrainRow
from kestrl_learner.sft.encoding import ConversationEncoder, train_row

log = logging.getLogger(__name__)
Item = Sequence[TrainRow]
"""The rows of one conversation."""


def load_items(settings: SFTSettings, data: SFTData, field: str) -> list[Item]:
    """The conversations of a data set that fit into `max_tokens`.

    Args:
        settings: Of the run.
        data: The data set.
        field: Its field in the manifest, for messages.

    Raises:
        UserInputError: It cannot be read or rendered, or nothing is left of it.
    """
    found = _encoded(settings, data) if data.path is not None else _sampled(data, field)
    items: list[Item] = [
        [train_row(ids, mask, number) for ids, mask in rows]
        for number, rows in enumerate(found)
        if rows and max(len(ids) for ids, _ in rows) <= settings.max_tokens
    ]
    left_out = len(found) - len(items)
    if not items:
        raise UserInputError(
            f"{field}: none of {len(found)} conversations can be learned from; raise spec.training.maxTokens (is "
            f"{settings.max_tokens}) or lower minReward"
        )
    if left_out:
        log.warning("%s: %d of %d conversations are left out as longer than maxTokens", field, left_out, len(found))
    return items


Tokens = list[tuple[Sequence[int], Sequence[int]]]


def _encoded(settings: SFTSettings, data: SFTData) -> list[Tokens]:
    assert data.path is not None
    encoder = make_encoder(settings.model, settings.template)
    found: list[Tokens] = []
    for number, conversation in enumerate(read_conversations(Path(data.path), size=data.size)):
        try:
            found.append([(row.ids, row.mask) for row in encoder.encode(conversation)])
        except UserInputError as error:
            raise UserInputError(f"{data.path}: conversation {number}: {error}") from error
    return found


def template_of(path: str | None) -> str | None:
    """The text of a chat template, None for the model's own."""
    return None if path is None else Path(path).read_text(encoding="utf-8")


def load_tokenizer(model: str, template: str | None) -> tuple[Any, str | None]:
    """A model's tokenizer of transformers, and the text of the template that replaces its own.

    Raises:
        UserInputError: Tokenizer or template cannot be read, or there is no tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        text = template_of(template)
    except (OSError, ValueError) as error:
        raise UserInputError(f"spec.model.base: the tokenizer of {model} cannot be loaded: {error}") from error
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens}:  # transformers makes one up where there is none
        raise UserInputError(f"spec.model.base: {model} has no tokenizer; add its files, such as tokenizer.json")
    return tokenizer, text


def make_encoder(model: str, template: str | None) -> ConversationEncoder:
    """The encoder of a model's conversations.

    Raises:
        UserInputError: Tokenizer or template cannot be read.
    """
    from transformers import GenerationConfig

    tokenizer, text = load_tokenizer(model, template)
    try:
        configured: Any = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # a model without generation_config.json
        configured = None
    ids = configured if isinstance(configured, list) else [configured]
    ends = [tokenizer.convert_ids_to_tokens(number) for number in ids if number is not None]
    return ConversationEncoder(tokenizer, [*ends, tokenizer.eos_token or ""], text)


def _sampled(data: SFTData, field: str) -> list[Tokens]:
    """The token rows of a run's stored training episodes with the wanted reward."""
    assert data.episodes is not None
    return list(_episodes(data, field))[: data.size]


def _episodes(data: SFTData, field: str) -> Iterator[Tokens]:
    store = open_store(str(data.episodes), create=False)
    paths = sorted(path for path in store.list(layout.episodes_folder(Purpose.TRAIN)) if path.endswith(".pb"))
    if not paths:
        raise UserInputError(f"{field}.episodes: {data.episodes} holds no training episodes (episodes/train/*.pb)")
    for path in paths:
        for message in common_pb2.GroupBatch.FromString(store.get(path)).groups:
            for episode in group_from_proto(message).episodes:
                wanted = episode.reward is not None and (data.min_reward is None or episode.reward >= data.min_reward)
                if wanted and episode.failure is None:
                    yield [(list(row.token_ids), list(row.mask)) for row in episode.rows if any(row.mask)]
